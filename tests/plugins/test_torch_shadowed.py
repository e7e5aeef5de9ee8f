"""What a cell puts in the place of Python's and torch's own functions does not cost the ranks their process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.notebook import Notebook, opened

SETUP = (
    "%%sky_broadcast\nimport skymagic, builtins, torch, torch.distributed as dist\nrank = skymagic.instance_info().rank"
)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("shadowed"), "%sky_pool --nodes 2 --plugin torch", SETUP) as one:
        yield one


@pytest.mark.parametrize(
    ("owner", "name"),
    [("dist", "all_gather"), ("dist", "all_reduce"), ("dist", "all_gather_object"), ("builtins", "open")],
)
def test_a_function_that_rank_0_has_replaced(notebook: Notebook, owner: str, name: str) -> None:
    notebook.run(f"%%sky_broadcast\nmine, kept = 'kept', {owner}.{name}")
    failing = f"{owner}.{name} = None\n    raise ValueError('planted')"
    assert "planted" in notebook.fail(f"%%sky_broadcast\nif rank == 0:\n    {failing}\ndist.barrier()").text
    notebook.run(
        f"%%sky_broadcast -o found\n{owner}.{name} = kept\nt = torch.ones(1)\ndist.all_reduce(t)\n(float(t), mine)"
    )
    assert notebook.value("found") == [(2.0, "kept")] * 2
