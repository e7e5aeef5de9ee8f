"""Two whole pools start at once on the same host, from an empty home."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.hosts import loopback
from tests.lab.notebook import opened, seen
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings


@pytest.mark.needs("sshd")
def test_two_pools_at_once(tmp_path: Path) -> None:
    """One of them makes the environment, and the other waits for it; both work, and one ends without the other."""
    with loopback(tmp_path / "hosts", env=pip_settings(), names=("gpu1",)) as hosts:
        env = {"HOME": str(home_that_knows(hosts, tmp_path / "client", fresh=True))}
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
        with opened(tmp_path / "one", env=env) as one, opened(tmp_path / "other", env=env) as other:
            notebooks = {"one": one, "other": other}
            starts = {
                name: each.start(f"%sky_pool {name} --provider ssh --hosts gpu1") for name, each in notebooks.items()
            }
            for name, start in starts.items():
                assert notebooks[name].finish(start).error is None
            assert [seen(each, "1 + 1") for each in notebooks.values()] == [[2], [2]]
            assert len(list(hosts[0].home.glob(".skymagic/env/*/.ready"))) == 1
            assert list(hosts[0].home.glob(".skymagic/incoming/*")) == []
            one.run("%sky_down one")
            assert seen(other, "2 + 2") == [4]
