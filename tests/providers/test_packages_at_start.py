"""A pool of other machines has from its start what the notebook uses, in the notebook's versions."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from skymagic.data.capture.loaded import imported_modules
from tests.lab.distributions import Shelf
from tests.lab.hosts import loopback
from tests.lab.notebook import Notebook, opened, seen
from tests.providers.test_packages import said


@pytest.mark.needs("sshd")
def test_start_installs_packages_the_notebook_uses(tmp_path: Path) -> None:
    """From an empty home folder; includes editable and local distributions, again after a change of their source."""
    shelf = Shelf(tmp_path / "shelf")
    for version in ("1.2", "9.0"):
        shelf.add(
            "tiny-data", version, {"tinydata.py": f"version = {version!r}\n"}, here=version == "1.2"
        )
    shelf.add("tiny-models", "2.0", {"tinymodels.py": ""})
    shelf.add("tiny-unused", "2.0", {"tinyunused.py": ""})
    shelf.add("tiny-own", "1.0", {"tinyown.py": "mine = True\n"})
    (shelf.site / "tiny_own-1.0.dist-info/direct_url.json").write_text(
        '{"url": "file:///src", "dir_info": {}}'
    )
    shelf.editable(
        "tiny-base", "0.5", {"tinybase.py": "from tinydata import version\n"}, ["tiny-data"]
    )
    project = shelf.editable(
        "tiny-edited", "1.0", {"tinyedited/__init__.py": "state = 1\n"}, ["tiny-base"]
    )
    for name in ("tiny-own", "tiny-edited"):  # an index may have something else of these names
        shelf.add(
            name,
            "1.0",
            {f"{name.replace('-', '')}.py": "raise SystemExit('another')\n"},
            here=False,
        )
    with loopback(
        tmp_path / "hosts", env={**shelf.of_hosts, "PIP_NO_INDEX": ""}, names=("gpu1",)
    ) as hosts:
        (tmp_path / "client/.ssh").mkdir(parents=True)
        shutil.copy(hosts.config, tmp_path / "client/.ssh/config")
        (tmp_path / "notebook").mkdir()
        (tmp_path / "notebook/helper.py").write_text("import tinymodels\n")
        env = {"HOME": str(tmp_path / "client"), **shelf.of_notebook}
        with opened(
            tmp_path / "notebook", "import tinydata, tinyown, tinyedited, helper", env=env
        ) as notebook:
            plan = notebook.run("%sky_pool lab --provider ssh --hosts gpu1 --dry-run").text
            assert "tiny_data, tiny_models" in plan
            assert f"from {project} here" in plan
            notebook.run("%sky_pool lab --provider ssh --hosts gpu1")
            packages = hosts[0].home.glob(
                ".skymagic/env/*/lib/python*/site-packages/tiny_*.dist-info"
            )
            assert sorted(path.name.removesuffix(".dist-info") for path in packages) == [
                "tiny_base-0.5", "tiny_data-1.2", "tiny_edited-1.0", "tiny_models-2.0", "tiny_own-1.0",
            ]  # fmt: skip
            cell = "import helper, tinyedited, tinyown, tinybase\ntinyedited.state, tinybase.version, tinyown.mine"
            assert seen(notebook, cell) == [(1, "1.2", True)]
            follows(notebook, shelf, project, cell)
            (project / "src/tinyedited/__init__.py").write_text("state = 3\n")
            notebook.run("%sky_down lab")
            notebook.run("%sky_pool lab --provider ssh --hosts gpu1")
            assert seen(notebook, cell) == [(3, "1.2", True)]
            assert len(list(hosts[0].home.glob(".skymagic/env/*/.ready"))) == 1, (
                "an edit makes no new environment"
            )
    assert shelf.builds("tiny-edited").read_text().count("built") == 3


def follows(notebook: Notebook, shelf: Shelf, project: Path, cell: str) -> None:
    """An edit is on the nodes with the next cell, and with the next ranks; so is what only a later cell needs."""
    (project / "src/tinyedited/__init__.py").write_text("state = 2\n")
    shown = notebook.run(f"%%sky_broadcast -o now\n{cell}")
    assert "installing tiny-edited 1.0 on gpu1 …" in said(shown)
    assert re.search("tiny-edited .*%sky_restart", shown.text)
    notebook.run("%sky_restart")
    shown = notebook.run(f"%%sky_broadcast -o now\n{cell}")
    assert notebook.value("now") == [(2, "1.2", True)]
    assert "installing" not in said(shown)


def test_modules_behind_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are imported, used by values, or used by functions of the notebook; a local module hides a distribution."""
    (tmp_path / "beside_it.py").write_text(
        "import yaml\ntry:\n    import bleach\nexcept ImportError:\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    space: dict[str, object] = {"__name__": "__main__"}
    exec(
        "import beside_it, decimal\nfrom packaging.version import Version\nversion = Version('1')\n"
        "def f():\n    import pandas\n    try:\n        import numpy\n    except ImportError:\n        pass\n"
        "class C:\n    def m(self):\n        import scipy.stats\n",
        space,
    )
    names = imported_modules(space, str(tmp_path))
    assert {"yaml", "decimal", "packaging.version", "pandas", "scipy.stats"} <= names
    assert not names & {"beside_it", "numpy", "bleach"}
