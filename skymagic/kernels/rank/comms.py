"""The comms of a rank's widgets: those of displayed widgets are relayed to the notebook, where proxies under their ids pass them on.

Of a widget that changes often, the newest state is sent. Other comms, and widgets that were never displayed, have nobody to talk to::

    display(widget)    "state", whole, of the widget and of what it refers to
    widget.value = 3   "state": keys that have changed, ten times a second at most
    widget.send(…)     "custom", in order
    widget.close()     "close"

All of it goes by the agent's link, in order. What a front end sends comes by the control socket (`entry.BetweenCells`).
"""

from __future__ import annotations

import base64
import json
import re
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skymagic.runtime.on_import import when_imported

REFERENCE = re.compile(r'"IPY_MODEL_([^"]+)"')
"""In a state as JSON: another model."""
MAX_CUSTOM = 1000
"""Custom messages that wait at once; of more, the oldest are dropped."""

Comm = dict[str, Any]
"""``kind`` (state, custom, close), ``id``, ``data``, and what was bytes in that: ``paths``, ``buffers`` (base64)."""


class WidgetRelay:
    """The widgets that are open in the notebook, and what has changed since it was told.

    Attributes:
        active: whether what the present cell displays, or the last one has, is relayed.
        wake: called on any thread when there is something to send.
    """

    def __init__(self) -> None:
        self.active = False
        self.wake: Callable[[], object] = lambda: None
        self._notebook = ""
        """Which one knows what is open; "" while none does."""
        self._open: set[str] = set()
        self._changed: dict[str, dict[str, Any]] = {}
        self._others: deque[Comm] = deque(maxlen=MAX_CUSTOM)
        self._lock = threading.RLock()
        """A widget that is deleted closes itself, on any thread, also on one that holds it."""

    def begin(self, notebook: str, *, visible: bool) -> None:
        """A cell of this notebook begins, or of one that shows no widgets (""); another one than before knows none of what is open."""
        self.active = bool(notebook) and visible
        if notebook and notebook != self._notebook:
            with self._lock:
                self._notebook = notebook
                self._open, self._changed = set(), {}
                self._others.clear()

    def open(self, ident: str) -> None:
        """Have a model and what it refers to told to the notebook, as far as they are not; what is referred to comes first."""
        with self._lock:
            widget = instance(ident)
            if widget is None or ident in self._open:
                return
            self._open.add(ident)
            state = dict(widget.get_state())
            for other in references(state):
                self.open(other)
            self._changed[ident] = state

    def publish(self, ident: str, kind: str, data: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        """What a widget says on its comm, instead of ipykernel's own way."""
        with self._lock:
            if ident not in self._open:
                return
            if kind == "comm_close":
                self._open.discard(ident)
                self._changed.pop(ident, None)
                self._others.append(_comm("close", ident))
            elif data.get("method") == "update":
                state = dict(data["state"])
                _widget_module()._put_buffers(state, data.get("buffer_paths", ()), buffers)
                self._changed.setdefault(ident, {}).update(state)
            elif data.get("method") == "custom":  # else an echo of what the front end has sent itself
                self._others.append(_comm("custom", ident, {"content": data.get("content")}, (), buffers))
        self.wake()

    def tell_all(self) -> None:
        """The notebook was away, and has missed what had changed: tell all state again; on any thread."""
        with self._lock:
            opened, self._open = self._open, set()
            for ident in opened:
                self.open(ident)
        self.wake()

    def take(self) -> list[Comm]:
        """What the notebook is to be told now; forgotten here."""
        with self._lock:
            changed, self._changed = self._changed, {}
            for state in changed.values():
                for other in references(state):
                    self.open(other)
            states, self._changed = {**self._changed, **changed}, {}
            others = [*self._others]
            self._others.clear()
            return [
                *(_comm("state", ident, *_widget_module()._remove_buffers(each)) for ident, each in states.items()),
                *others,
            ]


def _comm(
    kind: str, ident: str, data: Mapping[str, Any] | None = None, paths: Sequence[Any] = (), buffers: Sequence[Any] = ()
) -> Comm:
    encoded = [base64.b64encode(each).decode() for each in buffers or ()]
    return {"kind": kind, "id": ident, "data": data or {}, "paths": paths, "buffers": encoded}


relay = WidgetRelay()
"""The relay of this rank's widgets."""


def install() -> None:
    """Have widgets' comms relayed: ipykernel's own would go to a channel on which no front end listens."""
    import ipykernel.comm.comm as comms
    from ipykernel.kernelbase import Kernel

    def publish_msg(
        comm: Any, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        comm.kernel = comm.kernel or Kernel.instance()  # a widget whose comm has none says nothing
        relay.publish(comm.comm_id, msg_type, data or {}, buffers or ())

    comms.BaseComm.publish_msg = publish_msg
    when_imported("ipywidgets.widgets.widget_output", _let_through)


def _let_through(module: types.ModuleType) -> None:
    """Have ``with output:`` capture nothing: a front end captures by the ids of requests, and knows none of a rank's. Text and errors go
    where the cell's go; ipywidgets' own way would swallow the errors."""
    module.Output.__enter__ = lambda self: None
    module.Output.__exit__ = lambda self, *_: None


def _widget_module() -> Any:
    return sys.modules["ipywidgets.widgets.widget"]


def instance(model: str) -> Any:
    """The widget with this model, if ipywidgets still has it."""
    module = sys.modules.get("ipywidgets.widgets.widget")
    return None if module is None else module._instances.get(model)


def references(state: Mapping[str, Any]) -> list[str]:
    """The models that a state refers to, in its order."""
    return list(dict.fromkeys(REFERENCE.findall(json.dumps(state, default=lambda value: ""))))
