"""A pool of other machines has from its start what the notebook uses, in the notebook's versions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from skymagic.data.capture.namespace import imported
from tests.lab.distributions import Shelf
from tests.lab.hosts import loopback
from tests.lab.notebook import opened, seen


@pytest.mark.needs("sshd")
def test_a_start_brings_what_the_notebook_uses(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")
    for version in ("1.2", "9.0"):
        shelf.add("tiny-data", version, {"tinydata.py": f"version = {version!r}\n"}, here=version == "1.2")
    shelf.add("tiny-models", "2.0", {"tinymodels.py": ""})
    shelf.add("tiny-unused", "2.0", {"tinyunused.py": ""})
    shelf.add("tiny-own", "1.0", {"tinyown.py": ""})
    (shelf.site / "tiny_own-1.0.dist-info/direct_url.json").write_text('{"url": "file:///src", "dir_info": {}}')
    with loopback(tmp_path / "hosts", env={**shelf.of_hosts, "PIP_NO_INDEX": ""}, names=("gpu1",)) as hosts:
        (tmp_path / "client/.ssh").mkdir(parents=True)
        shutil.copy(hosts.config, tmp_path / "client/.ssh/config")
        (tmp_path / "notebook").mkdir()
        (tmp_path / "notebook/helper.py").write_text("import tinymodels\n")
        env = {"HOME": str(tmp_path / "client"), **shelf.of_notebook}
        with opened(tmp_path / "notebook", "import tinydata, tinyown, helper", env=env) as notebook:
            plan = notebook.run("%sky_pool lab --provider ssh --hosts gpu1 --dry-run").text
            assert "tiny_data, tiny_models" in plan
            assert "tiny_own" not in plan
            notebook.run("%sky_pool lab --provider ssh --hosts gpu1")
            packages = hosts[0].home.glob(".skymagic/env/*/lib/python*/site-packages/tiny_*.dist-info")
            assert sorted(path.name for path in packages) == ["tiny_data-1.2.dist-info", "tiny_models-2.0.dist-info"]
            assert seen(notebook, "import helper, tinydata\ntinydata.version") == ["1.2"]


def test_modules_behind_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported ones, those of values, and those that functions of the notebook need; a module beside it stands for its own."""
    (tmp_path / "beside_it.py").write_text("import yaml\ntry:\n    import bleach\nexcept ImportError:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    space: dict[str, object] = {"__name__": "__main__"}
    exec(
        "import beside_it, decimal\nfrom packaging.version import Version\nversion = Version('1')\n"
        "def f():\n    import pandas\n    try:\n        import numpy\n    except ImportError:\n        pass\n"
        "class C:\n    def m(self):\n        import scipy.stats\n",
        space,
    )
    names = imported(space, str(tmp_path))
    assert {"yaml", "decimal", "packaging.version", "pandas", "scipy.stats"} <= names
    assert not names & {"beside_it", "numpy", "bleach"}
