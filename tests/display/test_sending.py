"""What has left a notebook's kernel is known: each call comes once, in order, when its text is on its way to the front end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

COUNT = 1500
"""More than a queue of ZeroMQ's holds: a thread that waits for itself would wait for ever."""

notebook = borrowed(
    "--ranks 2", "from functools import partial\nfrom skymagic.display import live, sending\nsending.prepare()"
)


def test_a_flood_is_told_of_in_order(notebook: Notebook) -> None:
    shown = notebook.run(
        "begun, left = [], []\n"
        f"for step in range({COUNT}):\n"
        "    with sending.content(step, partial(begun.append, step), partial(left.append, step)):\n"
        "        sending.write('stdout', f'step {step}\\n')"
    )
    assert shown.lines == [f"step {step}" for step in range(COUNT)]
    assert notebook.value(f"begun == left == [*range({COUNT})]")


def test_messages_say_of_which_content_they_are(notebook: Notebook) -> None:
    shown = notebook.run(
        "nothing = lambda: None\n"
        "for number in range(3):\n"
        "    with sending.content(0, nothing, nothing, {'rank': 0, 'from': number, 'to': number}):\n"
        "        sending.write('stdout', f'step {number}\\n')\n"
        "    print('apart', flush=True)\n"
        "with sending.content(0, nothing, nothing, {'rank': 0, 'from': 3, 'to': 4}):\n"
        "    live.show({'data': {'text/plain': 'a display'}})\n"
        "live.show({'data': {'text/plain': 'apart'}})\n"
    )
    found = [
        (content["text"], [one["from"] for one in metadata.get("skymagic", ())])
        if kind == "stream"
        else (content["data"]["text/plain"], [one["from"] for one in content["metadata"].get("skymagic", ())])
        for kind, metadata, content in shown.messages
    ]
    steps = [pair for number in range(3) for pair in [(f"step {number}\n", [number]), ("apart\n", [])]]
    assert found == [*steps, ("a display", [3]), ("apart", [])]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell what was sent")
def test_bytes_are_counted_as_they_leave(notebook: Notebook) -> None:
    notebook.run(
        "import threading\n"
        "at, last = [], threading.Event()\n"
        "def told():\n"
        "    box, = sending._outboxes.values()\n"
        "    at.append([(box.given, one.left(box.given)) for one in box._connections.values()])\n"
        "with sending.content(0, lambda: None, told):\n"
        "    live.show({'data': {'text/plain': 'x' * 500_000}})\n"
        "with sending.content(0, lambda: None, lambda: (told(), last.set())):\n"
        "    sending.write('stderr', 'short\\n')\n"
        "last.wait(30)"  # else the cell's end is given to ZeroMQ too, and may not have left yet
    )
    counted = notebook.value("at")
    assert [len(connections) for connections in counted] == [1, 1]
    assert all(given == left > 500_000 for connections in counted for given, left in connections)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell what was sent")
def test_of_each_source_one_content_at_most_is_under_way(notebook: Notebook) -> None:
    notebook.run(
        "most, under_way = [0], set()\n"
        "def begin(number):\n"
        "    under_way.add(number)\n"
        "    most[0] = max(most[0], len(under_way))\n"
        "for number in range(300):\n"  # which a front end takes even if it is busy
        "    with sending.content(0, partial(begin, number), partial(under_way.discard, number)):\n"
        "        sending.write('stdout', f'{number}\\n')"
    )
    assert notebook.value("most") == [1]


def test_a_content_has_left_with_its_last_part(notebook: Notebook) -> None:
    """Its first part is not taken for all of it: a kernel that is killed in between would lose the rest."""
    shown = notebook.run(
        "import threading\n"
        "calls, last = [], threading.Event()\n"
        "with sending.content(0, partial(calls.append, 'begun'), lambda: (calls.append('left'), last.set())):\n"
        "    sending.write('stderr', 'what follows may ')\n"
        "    sending.write('stderr', 'have been shown before\\n')\n"
        "    live.show({'data': {'text/plain': 'a display'}})\n"
        "    calls.append(last.wait(0.2))\n"
        "    sending.write('stdout', 'after it\\n')\n"
        "calls.append(last.wait(10))"
    )
    assert shown.stderr == "what follows may have been shown before\n"
    assert shown.kinds == ["stderr", "display_data", "stdout"]
    assert notebook.value("calls") == ["begun", False, "left", True]


def test_what_is_kept_back_has_not_left(notebook: Notebook) -> None:
    """Lines that are open, or wait for those of other ranks, are shown later: until then they are not taken for shown."""
    notebook.run(
        "from skymagic.display.screen import NotebookScreen\n"
        "screen, one, other = NotebookScreen([0, 1]), threading.Event(), threading.Event()\n"
        "with sending.content(0, lambda: None, one.set):\n"
        "    screen.text(0, 'stdout', 'whole\\nhalf')\n"
        "with sending.content(1, lambda: None, other.set):\n"
        "    screen.text(1, 'stdout', 'whole\\n')\n"
        "found = [other.wait(10), one.is_set()]\n"  # they are told of in order
        "screen.finish()\n"
        "found.append(one.wait(10))"
    )
    assert notebook.value("found") == [True, False, True]


def test_what_shows_nothing_does_not_add_up(notebook: Notebook) -> None:
    notebook.run(
        "calls = []\n"
        "def nothing(number):\n"
        "    with sending.content(number % 2, partial(calls.append, number), partial(calls.append, -number)):\n"
        "        pass\n"
        "for number in range(1000): nothing(number)"
    )
    notebook.run("for number in 1000, 1001: nothing(number)\nprint()")
    notebook.run("sending.write('stdout', 'shown\\n')")
    assert [call for call in notebook.value("calls") if call > 0] == [1000, 1001]
    notebook.run("nothing(2000)\nsending.forget()\nsending.write('stdout', 'more\\n')")
    assert 2000 not in notebook.value("calls")
