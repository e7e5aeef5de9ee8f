"""What code on a rank asks of `skymagic.runtime`."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError
from typing import Any

import cloudpickle
import pytest

import skymagic as sky
from skymagic.errors import SkyError
from skymagic.runtime import info as runtime
from skymagic.runtime.info import InstanceInfo, Peer
from tests.lab.golden import Golden

THIRD = InstanceInfo(
    node=1,
    total_nodes=2,
    head_addr="10.0.0.1",
    head_port=40123,
    accelerators=2,
    peers=(Peer(0, "10.0.0.1", "a"), Peer(1, "10.0.0.2", "b")),
    rank=2,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    hostname="b",
    job_id="7f",
)


# ------------------------------------------------------------------------------------------ where am I


def test_outside_a_pool_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPUTE_POOL", raising=False)
    info = sky.instance_info()
    assert (info.rank, info.world_size, info.node, info.total_nodes) == (0, 1, 0, 1)
    assert (info.local_rank, info.local_world_size, info.is_head) == (0, 1, True)
    assert info.hostname


def test_json_round_trip() -> None:
    assert InstanceInfo.from_json(THIRD.to_json()) == THIRD
    assert InstanceInfo.from_plain(THIRD.plain()) == THIRD
    assert "\n" not in THIRD.to_json()
    assert THIRD.plain()["is_head"] is False


def test_unknown_fields_of_newer_versions_are_ignored() -> None:
    assert InstanceInfo.from_plain({**THIRD.plain(), "colour": "blue"}) == THIRD


def test_info_is_a_value() -> None:
    with pytest.raises(FrozenInstanceError):
        THIRD.rank = 3  # type: ignore[misc]
    assert len({THIRD, InstanceInfo.from_json(THIRD.to_json())}) == 1


@pytest.mark.parametrize("text", ["x", "[]", '{"peers": [1]}', '{"peers": 3}', '"text"'])
def test_a_broken_variable_is_named(
    golden: Golden, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("COMPUTE_POOL", text)
    with golden.raises(SkyError):
        sky.instance_info()


def test_taking_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPUTE_POOL", THIRD.to_json())
    assert runtime.participants() == (0, 1, 2, 3)
    with runtime.participation([3, 2]):
        assert runtime.participants() == (2, 3)
        with runtime.participation(None):
            assert runtime.participants() == (0, 1, 2, 3)
        assert runtime.participants() == (2, 3)
    with pytest.raises(KeyError), runtime.participation([2]):
        raise KeyError
    assert runtime.participants() == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("only", "error"),
    [
        ("heads", ValueError), ("0,1", ValueError), (-1, ValueError), ([0, -2], ValueError), ([], ValueError),
        (None, TypeError), (True, TypeError), (1.0, TypeError), (["0"], TypeError), (b"01", TypeError),
        ({0: True}, TypeError), (lambda: True, TypeError), (lambda a, b: True, TypeError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("control", [sky.stdout, sky.stderr], ids=["stdout", "stderr"])
def test_wrong_only_is_refused_where_it_is_written(
    control: Any, only: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"sky\.std"):
        control(only=only)


@pytest.mark.parametrize("control", [sky.stdout(only="head"), sky.silent], ids=["stdout", "silent"])
def test_lazy_functions_are_too_late(golden: Golden, control: Any) -> None:
    def lazy() -> None: ...

    lazy.__sky_lazy__ = True  # type: ignore[attr-defined]
    with golden.raises(TypeError):
        control(lazy)


@pytest.mark.parametrize("thing", [3, int, "head"])
def test_only_functions_are_decorated(golden: Golden, thing: Any) -> None:
    with golden.raises(TypeError):
        sky.silent(thing)
    with pytest.raises(TypeError):
        sky.stdout(thing)


def test_functions_keep_their_results_and_names() -> None:
    @sky.silent
    def add(a: int, *, b: int) -> int:
        """Adds."""
        return a + b

    assert add(1, b=2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Adds.")


def test_pausing_functions_are_refused(golden: Golden) -> None:
    def steps() -> Any:
        yield 1

    async def wait() -> None: ...

    for function in (steps, wait):
        with golden.raises(TypeError):
            sky.silent(function)


def test_in_memory_streams_are_silenced_too(capsys: pytest.CaptureFixture[str]) -> None:
    print("before")
    with sky.silent:
        print("hidden")
        print("hidden", file=sys.stderr)
        assert sys.stdout.encoding == "utf-8"
        assert not sys.stdout.isatty()
        assert sys.stdout.getvalue() == "before\n"  # type: ignore[union-attr]
    print("after")
    assert tuple(capsys.readouterr()) == ("before\nafter\n", "")


def test_decorated_functions_travel() -> None:
    rank = 1

    @sky.stdout(only=lambda info: info.rank == rank)
    def f() -> int:
        return rank

    assert cloudpickle.loads(cloudpickle.dumps(f))() == 1
    assert cloudpickle.loads(cloudpickle.dumps(sky.silent)) == sky.silent
