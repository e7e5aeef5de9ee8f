"""A first pool on a fresh host, with the packages that people have: torch by its plugin alone, the rest as the notebook uses it."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import pytest

from tests.lab.distributions import Shelf
from tests.lab.hosts import loopback
from tests.lab.notebook import opened, seen
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings

NAMES = ("torch", "numpy", "pandas")
HERE = """import helper, numpy as np, tinyedited
class Scale:
    def __init__(self, by): self.by = by
    def __call__(self, x): return self.by * x
scale, table = Scale(2), helper.DataFrame({'x': np.arange(4.0)})"""
THERE = f"""import torch, importlib.metadata as metadata
float(scale(helper.DataFrame(table).x).sum()), tinyedited.state, torch.cuda.is_available(), [metadata.version(name) for name in {NAMES}]"""


@pytest.mark.needs("sshd")
def test_fresh_host_gets_the_notebooks_packages(tmp_path: Path) -> None:
    """Same versions, no CUDA without a GPU, a class, a helper module and an editable package, none of them listed."""
    shelf = Shelf(tmp_path / "shelf")
    shelf.editable("tiny-edited", "1.0", {"tinyedited/__init__.py": "state = 1\n"}, ["numpy"])
    (tmp_path / "notebook").mkdir()
    (tmp_path / "notebook/helper.py").write_text("from pandas import DataFrame\n")
    try:
        with loopback(tmp_path / "hosts", env=pip_settings(), names=("gpu1",)) as hosts:
            env = {
                "HOME": str(home_that_knows(hosts, tmp_path / "client", fresh=True)),
                **shelf.of_notebook,
            }
            with opened(tmp_path / "notebook", env=env) as notebook:
                notebook.run("%sky_pool lab --provider ssh --hosts gpu1 --plugin torch")
                notebook.run(HERE)
                assert seen(notebook, THERE) == [
                    (12.0, 1, False, [metadata.version(name) for name in NAMES])
                ]
            packages = hosts[0].home.glob(".skymagic/env/*/lib/python*/site-packages/*")
            assert not [path.name for path in packages if path.name.startswith(("nvidia", "cuda"))]
    finally:
        shutil.rmtree(tmp_path / "hosts", ignore_errors=True)  # torch is large
