"""Widgets that a rank displays, as text that follows them."""

from __future__ import annotations

import ipywidgets

from skymagic.kernels.rank.widgets import MIME, Views, as_text
from tests.lab.waiting import Overtaken


def test_the_end_of_a_cell_waits_for_what_another_thread_publishes() -> None:
    overtaken = Overtaken()
    label = ipywidgets.Label("begun")
    views = Views(overtaken.send)
    shown = views.shown({"data": {MIME: {"model_id": label.model_id}}})
    assert shown["data"]["text/plain"] == "begun"
    label.value = "over"
    published = "update_display_data", as_text(shown["transient"]["display_id"], "over")
    assert overtaken.order(views.refresh) == [published, ()]
    label.close()
