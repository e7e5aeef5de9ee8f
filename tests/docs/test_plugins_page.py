"""The plugin of docs/reference/plugins.md, as it stands there: as an object, and as a package with an entry point."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skymagic as sky

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "plugins.md"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The documented module, installed where this process and the ranks find it."""
    place = tmp_path / "site"
    info = place / "skymagic_checkpoints-1.0.dist-info"
    info.mkdir(parents=True)
    text = DOCS.read_text()
    (block,) = re.findall(r"<!-- tested:.*?-->\n```python\n(.*?)```", text, re.DOTALL)
    (entry,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (place / "skymagic_checkpoints.py").write_text(block)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: skymagic-checkpoints\nVersion: 1.0\n"
    )
    points = entry.replace("[project.entry-points.", "[").replace('"', "")
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    )
    yield tmp_path / "data"
    sys.modules.pop("skymagic_checkpoints", None)


@sky.function
def save() -> tuple[str, str]:
    folder = Path(os.environ["CHECKPOINTS"])
    if sky.instance_info().is_head:
        Path(folder, "model.pt").write_text("weights")
    return folder.name, os.environ["CHECKPOINTS_NODES"]


def check(plugin: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sky.Compute(nodes=2, plugins=[plugin]) as pool:
        assert save() @ pool == [("rank-0", "2"), ("rank-1", "2")]
    assert "rank-0 left model.pt" in capsys.readouterr().out
    assert [path.name for path in sorted(folder.iterdir())] == ["rank-0"]


def test_the_documented_plugin_by_name(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "checkpoints" in sky.plugins.names()
    check(f"checkpoints:folder={package},keep=false", package, capsys)


def test_the_documented_plugin_as_an_object(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from skymagic_checkpoints import checkpoints  # type: ignore[import-not-found]

    plugin = checkpoints(str(package), keep=False)
    assert plugin.bootstrap(sky.plugins.Cluster()) == [f"mkdir -p {package}"]
    check(plugin, package, capsys)
