"""A JAX program that initialises and shuts down the mesh itself."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab.notebook import opened, seen
from tests.programs.test_programs import program


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install jax")
def test_a_program_that_initialises_jax_itself_runs_again_and_again(tmp_path: Path) -> None:
    with opened(tmp_path, "%sky_pool --nodes 2 --plugin jax") as notebook:
        for _ in range(2):
            assert seen(notebook, program("jax_initialize")) == [[2, 6.0]] * 2
        shown = notebook.run(f"%%sky_broadcast\n{program('jax_initialize')}").stderr
        assert "this call of initialize changes nothing" in shown
        assert "this call of shutdown changes nothing" in shown
