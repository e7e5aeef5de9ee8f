"""Promise 4: output appears in the cell that caused it, of rank 0 unless told otherwise; the logs have all of every rank."""

from __future__ import annotations

import os

import pytest

from tests.lab.notebook import Notebook, seen

WAYS = {
    "print": "print(word)",
    "standard error": "print(word, file=sys.stderr)",
    "a file descriptor": r"os.write(1, word.encode() + b'\n');",
    "a subprocess": "import subprocess; subprocess.run(['echo', word], check=True);",
    "a C library": "import ctypes; libc = ctypes.CDLL(None); libc.puts(word.encode()); libc.fflush(None);",
    "logging": "import logging; logging.warning(word)",
    "a thread": "import threading; t = threading.Thread(target=print, args=[word]); t.start(); t.join()",
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_written_is_shown_once_and_logged_of_all(pool: Notebook, way: str) -> None:
    word = f"word-{os.urandom(6).hex()}"
    shown = pool.run(f"%%sky_broadcast\nword = '{word[:8]}' '{word[8:]}'\n{WAYS[way]}")
    assert shown.text.count(word) == 1
    for rank in (0, 1):
        assert pool.run(f"%sky_logs -t {rank} -n 20").stdout.count(word) == 1


@pytest.mark.parametrize(("only", "expected"), [("head", [0]), ("1", [1]), ("all", [0, 1])])
def test_only_chooses_whose_output_is_shown(pool: Notebook, only: str, expected: list[int]) -> None:
    shown = pool.run(f"%%sky_broadcast --only {only}\nprint('of', rank)")
    label = "[{0}] " if len(expected) > 1 else ""
    assert sorted(shown.lines) == [label.format(rank) + f"of {rank}" for rank in expected]


def test_both_streams_keep_their_order(pool: Notebook) -> None:
    cell = "for i in range(20):\n    print('out', i, flush=True)\n    print('err', i, file=sys.stderr, flush=True)"
    shown = pool.run(f"%%sky_broadcast\n{cell}")
    assert shown.text.splitlines() == [f"{name} {i}" for i in range(20) for name in ("out", "err")]


def test_the_last_line_of_a_short_cell_is_shown(pool: Notebook) -> None:
    """It is written just before the cell ends; twenty cells, because the end could win a race."""
    cell = "%%sky_broadcast\nprint('first', flush=True)\nprint('last')"
    assert [pool.run(cell).text for _ in range(20)] == ["first\nlast\n"] * 20


def test_lines_of_ranks_are_whole_and_in_order(pool: Notebook) -> None:
    cell = "for i in range(200):\n    for piece in (f'{rank}:', f'{i}:', 'x' * 40, '\\n'):\n        os.write(1, piece.encode())"
    shown = pool.run(f"%%sky_broadcast --only all\n{cell}")
    for rank in (0, 1):
        mine = [line for line in shown.lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {rank}:{i}:{'x' * 40}" for i in range(200)]


def test_the_last_expression_of_rank_0_is_displayed(pool: Notebook) -> None:
    shown = pool.run("%%sky_broadcast\n{'rank': rank}")
    assert [data["text/plain"] for data in shown.rich] == ["{'rank': 0}"]
    assert pool.run("%%sky_broadcast\nrank;").outputs == []


def test_rich_output_keeps_its_place(pool: Notebook) -> None:
    cell = "from IPython.display import HTML\nprint('before')\ndisplay(HTML('<b>bold</b>'))\nprint('after')"
    shown = pool.run(f"%%sky_broadcast\n{cell}")
    assert shown.kinds == ["stdout", "display_data", "stdout"]
    assert shown.rich[0]["text/html"] == "<b>bold</b>"


def test_a_display_is_updated(pool: Notebook) -> None:
    cell = "handle = display('first', display_id=True)\nhandle.update('second')"
    shown = pool.run(f"%%sky_broadcast\n{cell}")
    assert [data["text/plain"] for data in shown.rich] == ["'second'"]


def test_flood_is_cut_with_a_note_and_spares_the_next_cell(pool: Notebook) -> None:
    cell = "for i in range(30_000):\n    print('flood', i, 'x' * 60)\nprint('its last line')"
    shown = pool.run(f"%%sky_broadcast\n{cell}")
    assert "of rank 0's output not shown" in shown.text
    assert pool.run("%%sky_broadcast\nprint('quiet')").text == "quiet\n"
    assert "its last line" in pool.run("%sky_logs -t 1 -n 5").stdout


FLOOD = """
import sys
written_4 = 0
while True:
    written_4 += sys.stdout.write('flood ' * 2_000 + '\\n')"""


def test_a_flood_delays_no_question(pool: Notebook) -> None:
    """Whatever rank 0 prints, the notebook hears at once where the ranks are, and what else ends."""
    pool.run(f"%%sky_broadcast -t 0 -a{FLOOD}")
    pool.run("run_4 = _\nimport time")
    pool.run(
        "def ask_4():\n    began = time.monotonic()\n"
        "    get_ipython().run_line_magic('sky_stacks', '')\n    return time.monotonic() - began"
    )
    pool.run("asked_4 = [ask_4() for _ in range(20)]")
    assert max(pool.value("asked_4")) < 1.0
    pool.run("%%sky_broadcast -t 1 -o other_4\nrank")
    assert pool.value("other_4") == [1]
    assert pool.value("run_4.done(), run_4.cancel(), run_4.wait(60)") == (False, True, True)
    assert seen(pool, "globals().get('written_4', 0)")[0] > 1_000_000


def test_output_after_the_cell_stays_out_of_the_next_one(pool: Notebook) -> None:
    pool.run(
        "%%sky_broadcast\nimport threading\ngo_4 = threading.Event()\n"
        "def late_4():\n    go_4.wait()\n    print('late')\nthread_4 = threading.Thread(target=late_4); thread_4.start()"
    )
    shown = pool.run("%%sky_broadcast\nprint('first')\ngo_4.set(); thread_4.join()\nprint('last')")
    assert shown.lines[0] == "first"
    assert shown.lines[-1] == "last"


def test_logs_are_found_by_pattern_and_as_an_object(pool: Notebook) -> None:
    word = os.urandom(6).hex()
    pool.run(f"%%sky_broadcast\nprint('needle', '{word}', rank)")
    pool.run(f"%sky_logs --grep 'needle {word}' -o logs_4")
    found = pool.value("{rank: str(text) for rank, text in dict(logs_4).items()}")
    assert [f"needle {word} {rank}" in found[rank] for rank in (0, 1)] == [True, True]


def test_a_progress_bar_ends_as_in_a_plain_cell(pool: Notebook) -> None:
    cell = r"print('\r 10 %', end=''); print('\r 60 %', end=''); print('\r100 %')"
    assert pool.run(f"%%sky_broadcast\n{cell}").stdout == "100 %\n"


def test_unicode_arrives(pool: Notebook) -> None:
    text = "äöü ß € 漢字 🤖 \t end"
    assert pool.run(f"%%sky_broadcast\nprint({text!r})").stdout == f"{text}\n"
    assert seen(pool, repr(text)) == [text] * 2
