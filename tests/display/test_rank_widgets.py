"""Widgets made on ranks, in a notebook whose front end shows widgets: both directions, and what stays when their rank is gone."""

from __future__ import annotations

import os
from typing import Any

from tests.lab.notebook import WIDGET_VIEW, Notebook, Shown
from tests.lab.pools import borrowed

SLIDER = """%%sky_broadcast
import ipywidgets, os, time
slider = ipywidgets.IntSlider(3, max=10, description='depth')
said = ipywidgets.HTML('<b>as it is</b>')
def moved(change):
    said.value = f'moved to {change["new"]}'
slider.observe(moved, 'value')
ipywidgets.VBox([slider, said])"""

notebook = borrowed("--ranks 2", watched=True)


def displayed(shown: Shown) -> list[dict[str, Any]]:
    """The bundles with widgets of ranks: a run's line, which may have buttons, has HTML too."""
    bundles: list[dict[str, Any]] = list(shown.rich)
    return [data for data in bundles if WIDGET_VIEW in data and "text/html" not in data]


def children(notebook: Notebook, box: str) -> list[str]:
    """The models in a box."""
    return [each.removeprefix("IPY_MODEL_") for each in notebook.widgets[box]["children"]]


def models(notebook: Notebook, shown: Shown) -> tuple[str, list[str]]:
    """The model that a cell shows, and those in it."""
    [data] = displayed(shown)
    box = data[WIDGET_VIEW]["model_id"]
    return box, children(notebook, box)


def follow(notebook: Notebook, model: str, key: str, value: Any) -> None:
    """Wait until a widget is so; what the kernel sends belongs to no cell of ours."""
    notebook.watch(Shown(), lambda _: notebook.widgets[model][key] == value)


def test_a_widget_of_a_rank_is_a_widget_of_the_notebook_with_its_text_beside_it(notebook: Notebook) -> None:
    shown = notebook.run(SLIDER)
    [data] = displayed(shown)
    assert data["text/plain"].startswith("IntSlider(value=3, description='depth', max=10)")
    box, (slider, said) = models(notebook, shown)
    assert notebook.widgets[box]["_view_name"] == "VBoxView"
    assert notebook.widgets[slider]["_model_name"] == "IntSliderModel"
    assert (notebook.widgets[slider]["value"], notebook.widgets[said]["value"]) == (3, "<b>as it is</b>")
    layout = notebook.widgets[slider]["layout"].removeprefix("IPY_MODEL_")
    assert notebook.widgets[layout]["_model_name"] == "LayoutModel"


def test_a_slider_that_is_moved_calls_back_on_its_rank_between_cells(notebook: Notebook) -> None:
    _, (slider, said) = models(notebook, notebook.run(SLIDER))
    notebook.tell(slider, {"method": "update", "state": {"value": 7}, "buffer_paths": []})
    follow(notebook, said, "value", "moved to 7")
    assert notebook.run("%%sky_broadcast\nprint(slider.value)").lines == ["7"]


def test_a_widget_moves_while_its_cell_runs_and_waits_for_its_end_with_what_is_pressed(notebook: Notebook) -> None:
    gates = [str(notebook.folder / f"gate-{os.urandom(4).hex()}") for _ in range(2)]
    shown = notebook.start(
        "%%sky_broadcast -a\nbar, button = ipywidgets.IntProgress(max=4), ipywidgets.Button(description='more')\n"
        "button.on_click(lambda _: setattr(bar, 'max', bar.value + 5))\ndisplay(ipywidgets.HBox([bar, button]))\n"
        f"for value, gate in enumerate({gates!r}, 1):\n    bar.value = value\n"
        "    while not os.path.exists(gate): time.sleep(0.01)\n"
    )
    notebook.watch(shown, lambda cell: bool(displayed(cell)))
    _, (bar, button) = models(notebook, shown)
    follow(notebook, bar, "value", 1)
    notebook.click(button)
    open(gates[0], "w").close()
    follow(notebook, bar, "value", 2)
    assert notebook.widgets[bar]["max"] == 4, "a callback must not run amid the cell"
    open(gates[1], "w").close()
    follow(notebook, bar, "max", 7)


def test_an_output_captures_neither_text_nor_errors(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast\nwith ipywidgets.Output(): print('of the cell')")
    assert shown.text == "of the cell\n"
    assert notebook.fail("%%sky_broadcast\nwith ipywidgets.Output(): 1 / 0").ename == "ZeroDivisionError"


def test_bytes_and_children_that_are_new(notebook: Notebook) -> None:
    box, before = models(
        notebook, notebook.run("%%sky_broadcast\nbox = ipywidgets.VBox([ipywidgets.Image(value=b'\\x89PNG')])\nbox")
    )
    assert len(before) == 1
    notebook.run("%%sky_broadcast\nbox.children = (*box.children, ipywidgets.Label('new'))")
    notebook.watch(Shown(), lambda _: len(children(notebook, box)) == 2)
    assert notebook.widgets[children(notebook, box)[1]]["value"] == "new"


def test_a_page_that_is_loaded_anew_gets_all_state(notebook: Notebook) -> None:
    _, (slider, _) = models(notebook, notebook.run(SLIDER))
    notebook.run("%%sky_broadcast\nslider.value = 9")
    follow(notebook, slider, "value", 9)
    states = notebook.value(f"__import__('ipywidgets').widgets.widget._instances[{slider!r}].get_state()['value']")
    assert states == 9
    notebook.tell(slider, {"method": "request_state"})
    notebook.run("pass")
    assert notebook.widgets[slider]["value"] == 9


def test_hidden_ranks_and_bars_of_tqdm_are_text(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast --only 1\ndisplay(ipywidgets.Label(os.environ['RANK']))\n"
        "from tqdm.notebook import tqdm\nfor _ in tqdm(range(3), desc='three'): pass"
    )
    bundles = [data for data in displayed(shown) if WIDGET_VIEW in data]
    assert [data["text/plain"] for data in bundles] == ["1"]
    assert any("three: 100%" in data["text/plain"] for data in shown.rich)


def test_where_nobody_looks_a_widget_is_text(notebook: Notebook) -> None:
    notebook.watched = False
    try:
        shown = notebook.run("%%sky_broadcast\nipywidgets.Label('plain')")
    finally:
        notebook.watched = True
    assert [[*data] for data in shown.rich] == [["text/plain"]]


def test_when_a_rank_or_the_pool_ends_the_text_stays(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast --only all\nlabel = ipywidgets.Label(f'of {os.environ[\"RANK\"]}')\nlabel")
    assert sorted(data["text/plain"] for data in displayed(shown)) == ["of 0", "of 1"]
    notebook.run("%%sky_broadcast --only all\nlabel.value += ' by now'")
    notebook.run("%sky_restart --rank 1")
    notebook.watch(shown, lambda cell: len(displayed(cell)) == 1)
    notebook.run("%sky_down")
    assert sorted([*data.items()] for data in shown.rich) == [
        [("text/plain", "of 0 by now")],
        [("text/plain", "of 1 by now")],
    ]
    assert not [each for each in notebook.widgets.values() if each["_model_name"] == "LabelModel"]
