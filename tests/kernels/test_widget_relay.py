"""What a rank tells of its widgets: all of it anew where the notebook was away, and to a notebook that has taken the pool over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from skymagic.kernels.rank.comms import MAX_CUSTOM, WidgetRelay

ipywidgets: Any = pytest.importorskip("ipywidgets")


@pytest.fixture
def slider() -> Iterator[Any]:
    made = ipywidgets.IntSlider(3, max=10)
    yield made
    made.close()


def follow(relay: WidgetRelay, widget: Any) -> None:
    """WidgetRelay what a widget says; in a rank the comm does."""
    state = {"method": "update", "state": {"value": widget.value}}
    widget.observe(
        lambda change: relay.publish(widget.model_id, "comm_msg", {**state, "state": {"value": change["new"]}}, []),
        "value",
    )


def test_the_newest_of_what_has_changed_is_told_once(slider: Any) -> None:
    relay = WidgetRelay()
    relay.begin("notebook", visible=True)
    relay.open(slider.model_id)
    opened = relay.take()
    assert [comm["kind"] for comm in opened] == ["state"] * 3, "its layout and its style come before it"
    assert (opened[-1]["id"], opened[-1]["data"]["value"]) == (slider.model_id, 3)
    follow(relay, slider)
    slider.value = 5
    slider.value = 6
    [update] = relay.take()
    assert (update["kind"], update["id"], update["data"]) == ("state", slider.model_id, {"value": 6})
    assert relay.take() == []


def test_a_notebook_that_was_away_is_told_all_state_anew(slider: Any) -> None:
    relay = WidgetRelay()
    relay.begin("notebook", visible=True)
    relay.open(slider.model_id)
    follow(relay, slider)
    slider.value = 7
    relay.take()  # and lost with the link
    relay.tell_all()
    told = {comm["id"]: comm for comm in relay.take()}
    assert told[slider.model_id]["data"]["value"] == 7
    assert told[slider.model_id]["data"]["max"] == 10


def test_a_notebook_that_has_taken_the_pool_over_knows_none_of_what_is_open(slider: Any) -> None:
    relay = WidgetRelay()
    relay.begin("notebook", visible=True)
    relay.open(slider.model_id)
    first = relay.take()
    follow(relay, slider)
    slider.value = 8
    relay.begin("", visible=True)  # a cell of one that shows no widgets
    assert not relay.active
    relay.begin("another", visible=True)
    slider.value = 9
    assert relay.take() == [], "the other has not opened it"
    relay.open(slider.model_id)
    again = relay.take()
    assert [comm["id"] for comm in again] == [comm["id"] for comm in first]
    assert again[-1]["data"]["value"] == 9


def test_messages_that_nobody_takes_are_bounded(slider: Any) -> None:
    relay = WidgetRelay()
    relay.begin("notebook", visible=True)
    relay.open(slider.model_id)
    for number in range(MAX_CUSTOM + 100):
        relay.publish(slider.model_id, "comm_msg", {"method": "custom", "content": number}, [])
    kept = [comm["data"]["content"] for comm in relay.take() if comm["kind"] == "custom"]
    assert kept == [*range(100, MAX_CUSTOM + 100)]
