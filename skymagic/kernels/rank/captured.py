"""``with output:`` on a rank: what is printed and displayed within goes into the ipywidgets.Output, as its state.

In a notebook the front end captures it, by the id of the request; here nobody knows the ids of a rank's requests. Only where the
notebook shows widgets: else text is shown where it belongs, in the cell.
"""

from __future__ import annotations

import io
import sys
import types
from typing import Any

from skymagic.kernels.rank.comms import relay


class _Stream(io.TextIOBase):
    """Standard output or error of what is captured."""

    def __init__(self, output: Any, name: str) -> None:
        self._output, self._name = output, name

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        _append(self._output, {"output_type": "stream", "name": self._name, "text": text})
        return len(text)


_open: list[tuple[Any, Any, Any]] = []
"""(the widget, and the streams in whose place its own are), the innermost last."""
_clearing: set[str] = set()
"""Models of those to be cleared by what comes next."""


def adapt(module: types.ModuleType) -> None:
    """Of ``ipywidgets.widgets.widget_output``: its Output captures here what a front end would."""
    output = module.Output
    enter, leave = output.__enter__, output.__exit__

    def __enter__(self: Any) -> Any:
        if not relay.active:
            return enter(self)
        _open.append((self, sys.stdout, sys.stderr))
        sys.stdout, sys.stderr = _Stream(self, "stdout"), _Stream(self, "stderr")
        return None

    def __exit__(self: Any, kind: Any, problem: Any, tb: Any) -> Any:
        if not (_open and _open[-1][0] is self):
            return leave(self, kind, problem, tb)
        _, sys.stdout, sys.stderr = _open.pop()
        if kind is None or not issubclass(kind, Exception):
            return None
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        shell.showtraceback((kind, problem, tb), tb_offset=0)
        lines, shell._last_traceback = shell._last_traceback or [], None
        _append(self, {"output_type": "error", "ename": kind.__name__, "evalue": str(problem), "traceback": lines})
        return True

    output.__enter__, output.__exit__ = __enter__, __exit__


def take(kind: str, content: dict[str, Any]) -> bool:
    """Whether this display message belongs to an Output, which has it now."""
    if not _open or kind not in ("display_data", "execute_result", "clear_output"):
        return False
    output = _open[-1][0]
    if kind == "clear_output":
        if content.get("wait"):
            _clearing.add(output.model_id)
        else:
            output.outputs = ()
    else:
        data, metadata = content.get("data", {}), content.get("metadata", {})
        _append(output, {"output_type": "display_data", "data": data, "metadata": metadata})
    return True


def _append(output: Any, one: dict[str, Any]) -> None:
    before = () if output.model_id in _clearing else output.outputs
    _clearing.discard(output.model_id)
    last = before[-1] if before else {}
    if one["output_type"] == last.get("output_type") == "stream" and one["name"] == last["name"]:
        before, one = before[:-1], {**one, "text": last["text"] + one["text"]}
    output.outputs = (*before, one)
