"""The console command: pools that were started here, and what it refuses."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from skymagic.api.command import main
from tests.lab.golden import Golden

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = settings["project"]["scripts"]["skymagic"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["down", "--hosts", "gpu1", "lab", "--all"], "say lab or --all, not both"),
        (["status", "--hosts", "gpu1;touch x"], "gpu1;touch x"),
        (["status", "--provider", "aws", "--hosts", "gpu1"], "--hosts names your own machines"),
        (["down", "--provider", "aws", "--all"], "leave one of them out"),
    ],
)
def test_misuse_of_the_command(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 2
    assert said in capsys.readouterr().err


def test_the_command_lists_the_pools_started_here(
    golden: Golden,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from skymagic.pool import records

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["pools"]) == 0
    golden(capsys.readouterr().out)
    records.write(
        records.PoolRecord("lab", "lab-0a1b2c3d", "ssh", ("gpu1",), "/work", process="1 1 long-ago")
    )
    assert main(["pools"]) == 0
    assert "lab (lab-0a1b2c3d) on gpu1, since" in capsys.readouterr().out
    assert main(["pools", "--json"]) == 0
    assert '"left": true' in capsys.readouterr().out
