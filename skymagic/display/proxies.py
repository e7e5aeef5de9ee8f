"""Widgets of ranks in the notebook: for each model on a rank a proxy under the same id, that passes on what either side says.

To the front end a proxy is a widget of the notebook's own, also when the page is reloaded. It keeps the newest state alone. A display
has the widget and its text, which a saved notebook shows where there is no such model any more; when the rank or the pool ends, only the
text stays. Changes of widgets come by the agents' links, displays with the output of the run: a display waits for its model.
"""

from __future__ import annotations

import base64
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.display.live import show, widget_view
from skymagic.wire.agent import WidgetInput

MODEL_TIMEOUT = 2.0
"""Seconds in which the model of a display comes; later, or over a lost link, the display is text."""


@dataclass
class _WidgetDisplay:
    """A display of a model: its newest text, and the one that the notebook has."""

    model: str
    text: str
    said: str

    def bundle(self) -> dict[str, Any]:
        """The display's MIME bundle."""
        return {"text/plain": self.text, **widget_view(self.model)}


class Proxies:
    """The proxies of one pool's widgets."""

    def __init__(self, send: Callable[[WidgetInput], object]) -> None:
        self._send = send
        self._models: dict[str, tuple[int, Any]] = {}
        """By id: whose it is, and the proxy."""
        self._displays: dict[str, _WidgetDisplay] = {}
        """By display id."""
        self._changed = threading.Condition()

    def display(self, rank: int, content: Mapping[str, Any]) -> dict[str, Any] | None:
        """The MIME bundle of a display of a rank's widget; None where it can only be text."""
        model = content.get("model", "")
        with self._changed:
            if not model or not self._changed.wait_for(lambda: model in self._models, MODEL_TIMEOUT):
                return None
            text = content["data"]["text/plain"]
            made = self._displays[content["transient"]["display_id"]] = _WidgetDisplay(model, text, text)
            return made.bundle()

    def say(self, content: Mapping[str, Any]) -> bool:
        """Take another text of a display; False if it is not of a widget that is shown."""
        with self._changed:
            found = self._displays.get((content.get("transient") or {}).get("display_id", ""))
            if found is not None:
                found.text = content["data"]["text/plain"]
            return found is not None

    def settle(self) -> None:
        """Put the newest texts into the notebook, beside the widgets: once per cell, for a front end redraws the widgets."""
        with self._changed:
            for ident, one in self._displays.items():
                if one.text != one.said:
                    one.said = one.text
                    show({"data": one.bundle(), "transient": {"display_id": ident}}, update=True)

    def take(self, rank: int, comms: Sequence[Mapping[str, Any]]) -> None:
        """What has changed on a rank (`kernels.rank.comms`); on a link's thread."""
        with self._changed:
            for comm in comms:
                ident = comm["id"]
                _, proxy = self._models.get(ident, (rank, None))
                if proxy is not None and comm["kind"] == "close":
                    self._close([ident])
                elif proxy is not None:
                    proxy.take(comm)
                elif comm["kind"] == "state" and "_model_name" in comm["data"]:  # whole
                    tell = functools.partial(self._tell, rank, ident)
                    self._models[ident] = rank, _proxy_class()(ident, _state(comm), tell)
            self._changed.notify_all()

    def _tell(self, rank: int, model: str, data: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        self._send(WidgetInput(rank, model, dict(data), tuple(base64.b64encode(each).decode() for each in buffers)))

    def forget(self, ranks: Iterable[int]) -> None:
        """Close the widgets of ranks that have ended: their texts stay."""
        gone = {*ranks}
        with self._changed:
            self._close([ident for ident, (rank, _) in self._models.items() if rank in gone])

    def close(self) -> None:
        """The pool ends; twice is safe."""
        with self._changed:
            self._close([*self._models])

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
        """The state of a widget that lives on a rank."""

        _model_name, _model_module, _model_module_version = Unicode(), Unicode(), Unicode()

        def __init__(self, ident: str, state: dict[str, Any], tell: Callable[..., object]) -> None:
            self._state, self._tell = state, tell
            names = ("_model_name", "_model_module", "_model_module_version")
            super().__init__(model_id=ident, **{name: state[name] for name in names})

        def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
            keys = self._state if key is None else [key] if isinstance(key, str) else key
            return {name: self._state[name] for name in keys}

        def take(self, comm: Mapping[str, Any]) -> None:
            """Pass on what the rank says."""
            if comm["kind"] == "custom":
                self.send(comm["data"]["content"], [base64.b64decode(each) for each in comm["buffers"]])
                return
            new = _state(comm)
            self._state.update(new)
            self.send_state([*new])

        def _handle_msg(self, msg: Mapping[str, Any]) -> None:
            """Pass on what a front end says."""
            data, buffers = msg["content"]["data"], msg.get("buffers") or []
            if data["method"] == "request_state":
                self.send_state()
                return
            if data["method"] == "update":
                self._state.update(_with_buffers(data["state"], data.get("buffer_paths", ()), buffers))
            self._tell(data, buffers)

    return Proxy


def _state(comm: Mapping[str, Any]) -> dict[str, Any]:
    """The state that a rank has sent, with its bytes in it."""
    return _with_buffers(comm["data"], comm["paths"], [base64.b64decode(each) for each in comm["buffers"]])


def _with_buffers(state: Mapping[str, Any], paths: Sequence[Sequence[Any]], buffers: Sequence[Any]) -> dict[str, Any]:
    """A copy of a state with bytes put where the paths lead."""
    from ipywidgets.widgets.widget import _put_buffers

    whole: dict[str, Any] = copy.deepcopy(dict(state))
    _put_buffers(whole, paths, buffers)
    return whole
