"""What has left a notebook's kernel is known: each call comes once, in order, when its text is on its way to the front end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.notebook import Notebook, opened

COUNT = 1500
"""More than a queue of ZeroMQ's holds: a thread that waits for itself would wait for ever."""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("sending")) as one:
        one.run("from functools import partial\nfrom skymagic.display import live, sending\nsending.prepare()")
        yield one


def test_a_flood_is_told_of_in_order(notebook: Notebook) -> None:
    shown = notebook.run(
        "begun, left = [], []\n"
        f"for step in range({COUNT}):\n"
        "    sending.once_sent(step, partial(begun.append, step), partial(left.append, step))\n"
        "    sending.write('stdout', f'step {step}\\n')"
    )
    assert shown.lines == [f"step {step}" for step in range(COUNT)]
    assert notebook.value(f"begun == left == [*range({COUNT})]")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell what was sent")
def test_bytes_are_counted_as_they_leave(notebook: Notebook) -> None:
    notebook.run(
        "at = []\n"
        "def told():\n"
        "    box, = sending._outboxes.values()\n"
        "    at.append([(box.given, one.left(box.given)) for one in box._connections.values()])\n"
        "sending.once_sent(0, lambda: None, told)\n"
        "live.show({'data': {'text/plain': 'x' * 500_000}})\n"
        "sending.once_sent(0, lambda: None, told)\n"
        "sending.write('stderr', 'short\\n')"
    )
    counted = notebook.value("at")
    assert [len(connections) for connections in counted] == [1, 1]
    assert all(given == left > 500_000 for connections in counted for given, left in connections)


def test_what_shows_nothing_does_not_add_up(notebook: Notebook) -> None:
    notebook.run(
        "calls = []\n"
        "for number in range(1000):\n"
        "    sending.once_sent(number % 2, partial(calls.append, number), partial(calls.append, -number))"
    )
    notebook.run(
        "for number in 1000, 1001:\n    sending.once_sent(number % 2, lambda: None, partial(calls.append, number))\nprint()"
    )
    notebook.run("sending.write('stdout', 'shown\\n')")
    assert notebook.value("calls") == [1000, 1001]
    notebook.run(
        "sending.once_sent(0, lambda: None, partial(calls.append, 2000))\nsending.forget()\nsending.write('stdout', 'more\\n')"
    )
    assert notebook.value("calls") == [1000, 1001]
