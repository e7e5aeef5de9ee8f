"""Widgets of ranks in the notebook: for each model on a rank a proxy, under the same id, that passes on what either side says.

To the front end a proxy is a widget of the notebook's own, also when the page is loaded anew. It keeps the newest state alone. A display
has the widget and, beside it, its text, which a saved notebook shows where there is no such model any more; when the rank or the pool
ends, the text alone stays.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import importlib.util
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.display.live import show, watched
from skymagic.wire.agent import WidgetInput

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MAX_EARLY = 1000
"""Changes of models that are not here yet, of all of them together."""
_notebook = secrets.token_hex(8)


def notebook_id() -> str:
    """Which notebook this is; "" where nobody looks at it, or there are no widgets."""
    with contextlib.suppress(ImportError):
        if watched() and importlib.util.find_spec("ipywidgets") is not None:
            return _notebook
    return ""


@dataclass
class _Display:
    """A display of a model: the text that it would be without it, and the one that the notebook has."""

    rank: int
    model: str
    text: str
    said: str

    def bundle(self) -> dict[str, Any]:
        """It as MIME types."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model}
        return {"text/plain": self.text, WIDGET_VIEW: view}


class Proxies:
    """Those of one pool.

    Args:
        send: to the rank's agent; called on the thread on which the front end's messages are handled.
    """

    def __init__(self, send: Callable[[WidgetInput], object]) -> None:
        self._send = send
        self._models: dict[str, tuple[int, Any]] = {}
        """By id: whose it is, and the proxy."""
        self._displays: dict[str, _Display] = {}
        """By display id."""
        self._early: list[Mapping[str, Any]] = []
        """What has changed in models that are still on their way, with their displays."""
        self._lock = threading.RLock()

    def display(self, rank: int, content: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a display of a rank's widget is here as MIME types; None where it can only be text."""
        with self._lock:
            for comm in content.get("comms", ()):
                self._open(rank, comm)
            if (model := content.get("model", "")) not in self._models:
                return None
            text = content["data"]["text/plain"]
            made = self._displays[content["transient"]["display_id"]] = _Display(rank, model, text, text)
            return made.bundle()

    def say(self, content: Mapping[str, Any]) -> bool:
        """Take another text of a display; False if it is not of a widget that is shown."""
        with self._lock:
            found = self._displays.get((content.get("transient") or {}).get("display_id", ""))
            if found is not None:
                found.text = content["data"]["text/plain"]
            return found is not None

    def settle(self) -> None:
        """Put the newest texts into the notebook, beside the widgets: once per cell, for a front end draws the widgets anew."""
        with self._lock:
            for ident, one in self._displays.items():
                if one.text != one.said:
                    one.said = one.text
                    show({"data": one.bundle(), "transient": {"display_id": ident}}, update=True)

    def take(self, rank: int, comms: Sequence[Mapping[str, Any]]) -> None:
        """What has changed on a rank (`kernels.rank.comms`); on a link's thread."""
        with self._lock:
            for comm in comms:
                if comm["kind"] == "text":
                    if comm["id"] in self._displays:
                        self._displays[comm["id"]].text = comm["data"]
                    continue
                _, proxy = self._models.get(comm["id"], (rank, None))
                if comm["kind"] == "open":
                    self._open(rank, comm)
                elif proxy is None:
                    self._early = [*self._early[1 - MAX_EARLY :], comm]
                elif comm["kind"] == "close":
                    self._close([comm["id"]])
                else:
                    proxy.take(comm)

    def _open(self, rank: int, comm: Mapping[str, Any]) -> None:
        if comm["id"] in self._models:
            return
        tell = functools.partial(self._tell, rank, comm["id"])
        proxy = _proxy_class()(comm["id"], with_buffers(comm), comm["seq"], tell)
        self._models[comm["id"]] = rank, proxy
        waiting = [one for one in self._early if one["id"] == comm["id"]]
        self._early = [one for one in self._early if one["id"] != comm["id"]]
        self.take(rank, waiting)

    def _tell(self, rank: int, model: str, data: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        encoded = tuple(base64.b64encode(each).decode() for each in buffers)
        self._send(WidgetInput(rank, model, dict(data), encoded))

    def forget(self, ranks: Iterable[int]) -> None:
        """These ranks have ended: their widgets' texts stay."""
        gone = {*ranks}
        with self._lock:
            self._close([ident for ident, (rank, _) in self._models.items() if rank in gone])

    def close(self) -> None:
        """The pool ends; twice is safe."""
        with self._lock:
            self._close([*self._models])
            self._early.clear()

    def _close(self, models: Sequence[str]) -> None:
        for ident in [ident for ident, one in self._displays.items() if one.model in models]:
            text = self._displays.pop(ident).text  # before the widget goes: a front end hides what had its view
            show({"data": {"text/plain": text}, "transient": {"display_id": ident}}, update=True)
        for model in models:
            self._models.pop(model)[1].close()


@functools.cache
def _proxy_class() -> Any:
    """ipywidgets takes long to import."""
    import ipywidgets
    from traitlets import Unicode

    class Proxy(ipywidgets.Widget):  # type: ignore[misc]  # untyped base
        """The state of a widget that lives elsewhere."""

        _model_name, _model_module, _model_module_version = Unicode(), Unicode(), Unicode()

        def __init__(self, ident: str, state: dict[str, Any], seq: int, tell: Callable[..., object]) -> None:
            self._state, self._tell = state, tell
            self._seqs = dict.fromkeys(state, seq)
            names = ("_model_name", "_model_module", "_model_module_version")
            super().__init__(model_id=ident, **{name: state[name] for name in names})

        def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
            keys = self._state if key is None else [key] if isinstance(key, str) else key
            return {name: self._state[name] for name in keys}

        def take(self, comm: Mapping[str, Any]) -> None:
            """What its rank says."""
            if comm["kind"] == "custom":
                self.send(comm["data"]["content"], [base64.b64decode(each) for each in comm["buffers"]])
                return
            new = {key: value for key, value in with_buffers(comm).items() if comm["seq"] > self._seqs.get(key, 0)}
            self._state.update(new)
            self._seqs.update(dict.fromkeys(new, comm["seq"]))
            self.send_state([*new])

        def _handle_msg(self, msg: Mapping[str, Any]) -> None:
            """What a front end says."""
            data, buffers = msg["content"]["data"], msg.get("buffers") or []
            if data["method"] == "request_state":
                self.send_state()
                return
            if data["method"] == "update":
                self._state.update(put_buffers(data["state"], data.get("buffer_paths", ()), buffers))
            self._tell(data, buffers)

    return Proxy


def with_buffers(comm: Mapping[str, Any]) -> dict[str, Any]:
    """The state that an "open" or "update" brings, with its bytes in it."""
    return put_buffers(comm["data"], comm["paths"], [base64.b64decode(each) for each in comm["buffers"]])


def put_buffers(state: Mapping[str, Any], paths: Sequence[Sequence[Any]], buffers: Sequence[Any]) -> dict[str, Any]:
    """A copy of a state with bytes put where the paths lead."""
    from ipywidgets.widgets.widget import _put_buffers

    whole: dict[str, Any] = copy.deepcopy(dict(state))
    _put_buffers(whole, paths, buffers)
    return whole
