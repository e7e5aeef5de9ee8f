"""Widgets that a rank displays, as text that follows them."""

from __future__ import annotations

import threading
from typing import Any

import ipywidgets

from skymagic.kernels.rank.widgets import MIME, Views


def test_the_end_of_a_cell_waits_for_what_another_thread_publishes() -> None:
    happened, taken, ended = list[str](), threading.Event(), threading.Event()

    def publish(kind: str, content: dict[str, Any]) -> None:
        taken.set()
        ended.wait(0.3)  # a cell that does not wait for this has ended by then
        happened.append(content["data"]["text/plain"])

    label = ipywidgets.Label("begun")
    views = Views(publish)
    assert views.shown({"data": {MIME: {"model_id": label.model_id}}})["data"]["text/plain"] == "begun"
    label.value = "over"
    flusher = threading.Thread(target=views.refresh)
    flusher.start()
    assert taken.wait(10)
    views.refresh()
    happened.append("the cell's end")
    ended.set()
    flusher.join()
    label.close()
    assert happened == ["over", "the cell's end"]
