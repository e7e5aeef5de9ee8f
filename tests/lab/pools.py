"""Local pools that test files share: one per worker and shape, emptied between those that borrow it.

A file that needs a notebook with a pool, and leaves it as it was but for names, files, settings and other pools::

    notebook = borrowed("--ranks 2", "import sys")

``borrowed(KERNEL)`` has no pool: those that its borrower makes there are stopped afterwards. With ``scope="function"`` each test gets it
emptied, which takes a tenth of a second instead of some. Within a test, ``with shared_pools.lent(…) as one`` is the same. A test that breaks its
pool (ends it, kills its processes, fills its disk) says so with ``shared_pools.spoil(notebook)``, or takes one of its own with
``tests.lab.notebook.opened``. A pool that is not as it was is never lent again: whether it is, is looked at each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.durations import CLOCK
from tests.lab.notebook import Notebook

KERNEL = ""
"""The shape of a notebook without a pool."""
MOST = 2
"""Pools that a worker keeps: each takes memory and, with its heartbeats, some of the processor."""
IN_KERNEL = "__import__('tests.lab.emptying', fromlist=['_'])"
EMPTY_RANKS = f"%%sky_broadcast --no-push --timeout 30s -o _lab_pids\n{IN_KERNEL}.empty(globals())"


class Pools:
    """Owns the notebooks of one worker that are lent, each with a pool `main`."""

    started = 0
    """How many were started here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[str, tuple[Notebook, int]] = {}  # the one lent last comes last
        self._lent: set[str] = set()

    @contextmanager
    def lent(
        self, shape: str, *cells: str, view_after: float = 600.0, watched: bool = False
    ) -> Iterator[Notebook]:
        """A notebook with a pool of this shape, empty but for what these cells do.

        Args:
            shape: options of ``%sky_pool``: ``--ranks 2 --plugin torch``.
            view_after: ``SkyMagic.view_after``, as for `Notebook`.
            watched: whether somebody could be asked something, as for `Notebook`.
        """
        assert shape not in self._lent, (
            f"{shape} is lent already: a second one beside it is its test's own"
        )
        with CLOCK.starting():
            notebook = self.emptied(shape) or self._opened(shape)
        self._lent.add(shape)
        notebook.watched = watched
        try:
            for cell in (f"%config SkyMagic.view_after = {view_after}", *cells):
                notebook.run(cell)
            yield notebook
        finally:
            self._lent.discard(shape)

    def spoil(self, notebook: Notebook) -> None:
        """Say that the pool of `notebook` is broken: its kernel is closed when the next one asks for it."""
        for shape, (one, _) in self._kept.items():
            if one is notebook:
                self._kept[shape] = one, -1

    def close(self) -> None:
        """Close them all."""
        for shape in list(self._kept):
            self._close(shape)

    def _opened(self, shape: str) -> Notebook:
        for other in [each for each in self._kept if each not in self._lent][
            : max(0, len(self._kept) - MOST + 1)
        ]:
            self._close(other)
        Pools.started += 1
        folder = self._folder / str(Pools.started)
        folder.mkdir()
        notebook = Notebook(folder)
        try:
            notebook.run("%load_ext skymagic")
            ranks = 0
            if shape != KERNEL:
                notebook.run(f"%sky_pool main {shape}")
                notebook.run(f"%%sky_broadcast --no-push\n{IN_KERNEL}.remember(globals());")
                ranks = notebook.value("__import__('skymagic').find('main').world_size")
            notebook.value(f"{IN_KERNEL}.remember_kernel(globals())")
        except BaseException:
            notebook.close()
            raise
        self._kept[shape] = notebook, ranks
        return notebook

    def emptied(self, shape: str) -> Notebook | None:
        """The one that is kept, emptied; None where there is none, or it is not what it was, and was closed."""
        if shape not in self._kept:
            return None
        notebook, ranks = self._kept.pop(shape)
        try:
            assert notebook.alive, "its kernel was ended"
            assert ranks >= 0, "its test has said that it is broken"
            notebook.value(f"{IN_KERNEL}.check({ranks})")
            if ranks:
                notebook.run(EMPTY_RANKS)
                assert len(set(notebook.value("_lab_pids"))) == ranks
            notebook.value(f"{IN_KERNEL}.empty_kernel(globals())")
        except Exception as problem:
            print(f"a pool of {shape} is not lent again: {problem}")
            notebook.close()
            return None
        self._kept[shape] = notebook, ranks
        return notebook

    def _close(self, shape: str) -> None:
        notebook, _ = self._kept.pop(shape)
        with suppress(Exception):
            notebook.close()


@pytest.fixture(scope="session")
def shared_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """The pools of this worker that test files share."""
    pools = Pools(tmp_path_factory.mktemp("shared"))
    yield pools
    pools.close()


def borrowed(
    shape: str, *cells: str, scope: Literal["module", "function"] = "module", **options: Any
) -> Any:
    """A fixture for a test file: a notebook with a shared pool. The arguments are those of `Pools.lent`."""

    @pytest.fixture(scope=scope)
    def notebook(shared_pools: Pools) -> Iterator[Notebook]:
        with shared_pools.lent(shape, *cells, **options) as one:
            yield one

    return notebook
