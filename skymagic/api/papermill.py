"""papermill's engine ``skymagic``: ``papermill in.ipynb out.ipynb -p epochs 3 --engine skymagic`` executes the notebook on a pool's head.

The pool is that of ``SKYMAGIC_POOL``, or the only one that outlives its notebook. papermill imports this module, and nothing else does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from papermill.engines import Engine as PapermillEngine

from skymagic.api import executing, notebooks
from skymagic.wire import notebook as wire

POOL = "SKYMAGIC_POOL"


class Engine(PapermillEngine):  # type: ignore[misc]  # papermill has no types
    """What papermill calls."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> None:
        """Execute it, and bring back what its cells have shown.

        Args:
            options: papermill's own; ``pool`` names the pool, ``log_output`` shows what cells show.

        Raises:
            RequestError, PoolError: it was not begun, or is out of sight.
        """
        path = Path(options.get("input_path") or "notebook.ipynb")
        output = Path(nb_man.output_path or path.with_suffix(".executed.ipynb"))
        request = notebooks.NotebookRequest(path, options.get("pool") or os.environ.get(POOL) or None, output=output)
        cells = nb_man.nb.cells
        run = notebooks.begin(request, _plain(nb_man.nb))
        words = executing.Text(run)
        under_way: list[int] = []

        def hear(message: wire.NotebookMessage) -> None:
            if options.get("log_output"):
                words.hear(message)
            if isinstance(message, wire.CellBegun):
                for number in under_way:
                    nb_man.cell_complete(cells[number], number)
                under_way[:] = [message.cell]
                nb_man.cell_start(cells[message.cell], message.cell)
            if isinstance(message, wire.CellFailed):
                nb_man.cell_exception(cells[message.cell], message.cell)

        ended = notebooks.follow(run, hear, lambda executed: _filled(cells, executed["cells"]))
        for number in under_way:
            nb_man.cell_complete(cells[number], number)
        if ended.status in ("stopped", "lost"):
            raise RuntimeError(f"{path.name} {executing.ENDS[ended.status]}: {ended.problem or 'as requested'}")


def _plain(notebook: Any) -> dict[str, Any]:
    import json

    made: dict[str, Any] = json.loads(json.dumps(notebook))
    return made


def _filled(cells: Any, executed: Any) -> None:
    """Give cells what they have shown."""
    from nbformat import from_dict

    for cell, done in zip(cells, executed, strict=True):
        if cell.cell_type == "code":
            outputs = from_dict(done["outputs"])  # type: ignore[no-untyped-call]
            cell.outputs, cell.execution_count = outputs, done["execution_count"]
