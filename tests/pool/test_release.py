"""The end of a pool: each step runs, each failure is named, and the stop button skips none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from skymagic import plugins
from skymagic.errors import PoolError
from skymagic.plan.requests import Defaults, PoolRequest
from skymagic.pool import Pool
from skymagic.pool.pool import run_steps
from skymagic.pool.status import State
from skymagic.providers.local import Local
from skymagic.providers.provider import Survey
from tests.lab.golden import Golden


@dataclass(frozen=True)
class Broken(Survey):
    """What a provider holds that cannot be given back."""

    closed: list[str] = field(default_factory=list)

    def close(self) -> None:
        self.closed.append("closed")
        raise ConnectionError("the cloud does not answer")


@contextlib.contextmanager
def dashboard(pool: Any) -> Iterator[None]:
    """What a plugin has open in the notebook, whose end fails."""
    yield
    raise ValueError("the dashboard hangs")


@pytest.fixture
def broken() -> tuple[Pool, Broken]:
    """A pool that has not been started, two of whose parts cannot be released."""
    made = Local().plan(PoolRequest(nodes=1), print)
    survey = Broken(made.plan)
    pool = Pool("main", Local(), survey, {}, Defaults(), lambda pool: None)
    pool.plugins = (plugins.Plugin("innotebook", around_client=dashboard),)
    return pool, survey


def test_unreleased_resources_are_named(golden: Golden, broken: tuple[Pool, Broken]) -> None:
    pool, survey = broken
    pool.start(print)
    agent = Path(pool.agents.started[0].directory)
    with golden.raises(PoolError) as caught:
        pool.close()
    assert caught.value.code == "not-released"
    assert "the plugin 'innotebook'" in str(caught.value)
    assert "ValueError: the dashboard hangs" in str(caught.value)
    assert "(ConnectionError: " in str(caught.value)
    assert survey.closed == ["closed"]
    assert pool.state is State.STOPPED
    assert not agent.exists()
    pool.close()  # twice is safe


def interrupted() -> None:
    raise KeyboardInterrupt


def test_the_stop_button_skips_no_step(golden: Golden) -> None:
    ran: list[str] = []
    steps = [("one", interrupted), ("two", lambda: 1 / 0), ("three", lambda: ran.append("three"))]
    with pytest.raises(KeyboardInterrupt) as caught:
        run_steps("it is over", steps)
    assert ran == ["three"]
    golden(caught.value.__notes__)
