"""Show widgets created on a rank as text, because the front end has no channel to their models.

A displayed widget appears as the ``text/plain`` or ``text/html`` of its bundle and does not change
afterwards.
"""

from __future__ import annotations

import types
from typing import Any

from skymagic.runtime.on_import import when_imported

MIME = "application/vnd.jupyter.widget-view+json"
"""MIME type of a widget's display: a reference to a model that only the rank has."""


def install() -> None:
    """Keep messages of widgets on the rank."""
    import ipykernel.comm.comm as comms

    # ipykernel would send them on a channel without a front end
    if hasattr(comms, "BaseComm"):
        comms.BaseComm.publish_msg = _publish_nothing
    else:  # ipykernel before 6.18, as in Google Colab
        comms.Comm._publish_msg = _publish_nothing
    when_imported("ipywidgets.widgets.widget_output", _capture_nothing)


def _publish_nothing(comm: Any, msg_type: str, *args: Any, **keys: Any) -> None:
    """Take the place of a comm's method that sends a message."""


def without_widget(content: dict[str, Any]) -> dict[str, Any]:
    """Return a display message without its reference to a widget's model, leaving text or HTML."""
    data = {mime: value for mime, value in content["data"].items() if mime != MIME}
    return {**content, "data": data}


def _capture_nothing(module: types.ModuleType) -> None:
    """Make ``with output:`` capture nothing.

    A front end captures by request ids, and knows none of a rank's. Text and errors go where the
    cell's go; ipywidgets would swallow the errors.
    """
    module.Output.__enter__ = lambda self: None
    module.Output.__exit__ = lambda self, *_: None
