"""The comms of a rank's widgets: those of displayed widgets are relayed to the notebook, where they are opened again under their ids.

Of a widget that changes often, the newest state is sent. Other comms, and widgets that were never displayed, have nobody to talk to::

    display(widget)    "open", with all state, of it and of what it refers to; they travel with the display
    widget.value = 3   "update": keys that have changed, ten times a second at most; by the agent's link, as all that follows
    widget.send(…)     "custom", in order
    widget.close()     "close"

What a front end sends comes by the control socket, and is handled by the main thread, between cells.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

REFERENCE = re.compile(r'"(?:IPY_MODEL_|model_id": ")([^"]+)"')
"""In a state as JSON: another model; also one that is displayed in an Output."""
MAX_CUSTOM = 1000
"""Custom messages that wait at once; of more, the oldest are dropped."""
MAX_INPUT = 1000
"""The same of messages from the front end, of which updates of one widget count as one."""

Comm = dict[str, Any]
"""``kind`` (open, update, custom, close), ``id``, ``seq``, ``data``, and what was bytes in that: ``paths``, ``buffers`` (base64)."""


class Relay:
    """The comms that are open in the notebook, and what has changed since it was told.

    Attributes:
        wake: called on any thread when there is something to send.
    """

    def __init__(self) -> None:
        self.active = False
        """Whether what the present cell displays, or the last one has, is relayed."""
        self.wake: Callable[[], object] = lambda: None
        self.notebook = ""
        """Which one knows what is open; "" while none does."""
        self._open: set[str] = set()
        self._updates: dict[str, dict[str, Any]] = {}
        self._others: list[Comm] = []
        self._seq = 0
        """Counts messages: what opens a model travels with its display, and what changes it may come before."""
        self._lock = threading.RLock()
        """A widget that is deleted closes itself, on any thread, also on one that holds it."""

    def begin(self, notebook: str, *, visible: bool) -> None:
        """A cell of this notebook begins, or of one that shows no widgets (""); another one than before knows none of what is open."""
        self.active = bool(notebook) and visible
        if notebook and notebook != self.notebook:
            self.notebook = notebook
            with self._lock:
                self._open, self._updates, self._others = set(), {}, []

    def opened(self, idents: Iterable[str]) -> list[Comm]:
        """Open these models and what they refer to, as far as they are not open; what is referred to comes first."""
        found: list[Comm] = []
        for ident in idents:
            widget = instance(ident)
            if widget is None or ident in self._open:
                continue
            self._open.add(ident)  # from now on changes are kept
            state = dict(widget.get_state())
            if "msg_id" in state:  # an Output: what it captures stays here, see `captured`
                state["msg_id"] = ""
            found += [*self.opened(references(state)), self._comm("open", ident, state)]
        return found

    def keep(self, shown: Iterable[str]) -> None:
        """Close all models but these and what they refer to."""
        kept, new = set[str](), [*shown]
        while new:
            widget = instance(ident := new.pop())
            if widget is not None and ident not in kept:
                kept.add(ident)
                new += references(widget.get_state())
        for ident in self._open - kept:
            self._close(ident)

    def _close(self, ident: str) -> None:
        with self._lock:
            self._open.discard(ident)
            self._updates.pop(ident, None)
        self._add(self._comm("close", ident, {}))

    def publish(self, ident: str, kind: str, data: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        """What a widget says on its comm; in the place of ipykernel's own way."""
        if ident not in self._open:
            return
        method = data.get("method")
        if kind == "comm_close":
            self._close(ident)
        elif method == "update":
            state = with_buffers(data["state"], data.get("buffer_paths", ()), buffers)
            if "msg_id" in state:
                del state["msg_id"]
            with self._lock:
                self._updates.setdefault(ident, {}).update(state)
        elif method == "custom":
            self._add(self._comm("custom", ident, {"content": data.get("content")}, buffers))
        # else an echo of what the front end has sent itself: only the text has changed
        self.wake()

    def tell_all(self) -> None:
        """The notebook was away, and has missed what had changed: tell all state anew; on any thread."""
        for ident in [*self._open]:
            if (widget := instance(ident)) is not None:
                state = {key: value for key, value in widget.get_state().items() if key != "msg_id"}
                with self._lock:
                    self._updates[ident] = state
        self.wake()

    def _add(self, comm: Comm) -> None:
        with self._lock:
            self._others = [*self._others[-MAX_CUSTOM:], comm]

    def take(self) -> list[Comm]:
        """What the notebook is to be told now; forgotten here."""
        with self._lock:
            updates, self._updates = self._updates, {}
            others, self._others = self._others, []
        found: list[Comm] = []
        for ident, state in updates.items():
            found += [*self.opened(references(state)), self._comm("update", ident, state)]
        return [*found, *others]

    def _comm(self, kind: str, ident: str, data: Mapping[str, Any], buffers: Sequence[Any] = ()) -> Comm:
        with self._lock:
            self._seq += 1
            seq = self._seq
        paths: list[Any] = []
        if kind in ("open", "update"):
            data, paths, buffers = sys.modules["ipywidgets.widgets.widget"]._remove_buffers(data)
        encoded = [base64.b64encode(each).decode() for each in buffers or ()]
        return {"kind": kind, "id": ident, "seq": seq, "data": data, "paths": paths, "buffers": encoded}


class Inbox:
    """What front ends have sent to widgets of this rank, until its main thread handles it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, dict[str, Any], list[bytes]]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, ident: str, data: dict[str, Any], buffers: Sequence[str]) -> None:
        """Keep a message; called on the control thread. Updates of one widget in a row become one: the newest values."""
        decoded = [base64.b64decode(each) for each in buffers]
        with self._lock:
            last = self._waiting[-1] if self._waiting else None
            merges = last is not None and last[0] == ident and not decoded and not last[2]
            if last is not None and merges and last[1].get("method") == data.get("method") == "update":
                last[1]["state"] = {**last[1]["state"], **data["state"]}
            else:
                self._waiting = [*self._waiting[-MAX_INPUT:], (ident, data, decoded)]

    def handle(self) -> None:
        """Hand them to their widgets, whose callbacks run; called on the main thread, between cells."""
        from comm import get_comm_manager

        with self._lock:
            waiting, self._waiting = self._waiting, []
        comms = get_comm_manager().comms
        for ident, data, buffers in waiting:
            if ident in comms:
                message = {"header": {}, "content": {"comm_id": ident, "data": data}, "buffers": buffers}
                comms[ident].handle_msg(message)


relay = Relay()
"""That of this rank."""


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


def instance(model: str) -> Any:
    """The widget with this model, if ipywidgets still has it."""
    module = sys.modules.get("ipywidgets.widgets.widget")
    return None if module is None else module._instances.get(model)


def references(state: Mapping[str, Any]) -> list[str]:
    """The models that a state refers to, in its order."""
    return list(dict.fromkeys(REFERENCE.findall(json.dumps(state, default=lambda value: ""))))


def with_buffers(state: Mapping[str, Any], paths: Sequence[Any], buffers: Sequence[Any]) -> dict[str, Any]:
    """A state with its bytes in it."""
    whole = dict(state)
    sys.modules["ipywidgets.widgets.widget"]._put_buffers(whole, paths, buffers)
    return whole
