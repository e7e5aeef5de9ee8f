"""Output: whatever a rank writes, by whatever means, is shown in its cell while that runs, and stands complete in the rank's log."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.lab.notebook import Notebook, Shown, gate
from tests.lab.pools import borrowed

notebook = borrowed(
    "--ranks 2",
    "%%sky_broadcast\nimport os, sys, subprocess, threading\nrank = int(os.environ['RANK']);",
)


def log(notebook: Notebook, rank: int, lines: int = 1_000_000) -> list[str]:
    return notebook.run(f"%sky_logs --rank {rank} -n {lines}").lines


def held_back(shown: Shown) -> int:
    """Bytes that the notes on the screen say were not shown."""
    factors = {"bytes": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}
    found = re.findall(r"\[([\d.]+) (bytes|KB|MB|GB) of rank \d+'s output not shown", shown.stderr)
    return round(sum(float(number) * factors[unit] for number, unit in found))


# ------------------------------------------------------------------------------------------ all ways to write


WAYS = {
    "os.write to stderr": r"os.write(2, word.encode() + b'\n');",
    "a subprocess's stderr": "subprocess.run('echo $WORD >&2', shell=True, check=True);",
    "os.system": "os.system('echo $WORD');",
    "a forked child": "import multiprocessing as mp\np = mp.get_context('fork').Process(target=print, args=[word])\np.start(); p.join()",
    "a warning on stderr": "import warnings; warnings.warn(word)",
    "no newline": "print(word, end='')",
    "sys.__stdout__": r"sys.__stdout__.write(word + '\n');",
    "the binary buffer": r"sys.stdout.buffer.write(word.encode() + b'\n');",
    "the binary buffer of stderr": r"assert sys.stderr.buffer.write(b'-' * 9000 + word.encode() + b'\n') == 9001 + len(word)",
}


@pytest.mark.parametrize("way", WAYS)
def test_is_shown_from_the_head_and_logged_of_all(notebook: Notebook, way: str) -> None:
    word = f"word-{os.urandom(8).hex()}"
    os_word = f"os.environ['WORD'] = word = '{word[:9]}' '{word[9:]}'"  # a warning shows its line of source
    shown = notebook.run(f"%%sky_broadcast\n{os_word}\n{WAYS[way]}")
    assert (shown.stderr if "stderr" in way else shown.stdout).count(word) == 1
    assert shown.text.count(word) == 1
    assert sum(word in line for line in log(notebook, 0, 5)) == 1
    assert sum(word in line for line in log(notebook, 1, 5)) == 1


# ------------------------------------------------------------------------------------------ unchanged


def test_bars_show_their_last_state_and_keep_colours(
    notebook: Notebook,
) -> None:
    shown = notebook.run(r"""%%sky_broadcast
print('\r 10 %', end=''); print('\r 20 %', end=''); print('\r100 %')
print('\x1b[31mred\x1b[0m\x1b[K')""")
    assert shown.stdout == "100 %\n\x1b[31mred\x1b[0m\n"


UNICODE = "äöü ß € 漢字 🤖👩‍🔬 עברית \u0301 \x00 \t end"


def test_unicode(notebook: Notebook) -> None:
    notebook.run(f"text = {UNICODE!r}")
    shown = notebook.run(
        "%%sky_broadcast\nprint(text)\nprint(text, file=sys.stderr)\nos.write(1, text.encode());"
    )
    assert shown.stdout == f"{UNICODE}\n{UNICODE}"
    assert shown.stderr == f"{UNICODE}\n"


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (
            "import time\nfor byte in '€🤖'.encode():\n    os.write(1, bytes([byte])); time.sleep(0.02)",
            "€🤖",
        ),
        (r"os.write(1, b'a\xff\xfeb\n');", "a��b\n"),
        (r"print('lone \ud800')", "lone \\ud800\n"),
        (r"os.write(1, b'cut \xe2\x82');", "cut �"),
        ("print('next')", "next\n"),
    ],
    ids=["cut between writes", "invalid", "lone surrogate", "cut at the end", "in the next cell"],
)
def test_characters_that_are_cut_or_invalid(notebook: Notebook, body: str, shown: str) -> None:
    assert notebook.run(f"%%sky_broadcast\n{body}").stdout == shown


# ------------------------------------------------------------------------------------------ floods


def test_flood_is_cut_on_screen_and_complete_in_the_log(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.screen_limit = 20_000")
    shown = notebook.run(
        "%%sky_broadcast\nfor i in range(100_000):\n    print('paced', i)\nprint('the end')"
    )
    notebook.run("%config SkyMagic.screen_limit = 1_000_000")
    expected = [f"paced {i}" for i in range(100_000)]
    total = sum(len(line) + 1 for line in [*expected, "the end"])
    assert len(shown.stdout) < total / 2
    assert len(shown.stdout) + held_back(shown) == pytest.approx(
        total, rel=0.05
    )  # the note says 1.2 MB
    assert "%sky_logs -t 0" in shown.stderr
    assert [line for line in log(notebook, 0) if line.startswith("paced")] == expected
    assert [line for line in log(notebook, 1) if line.startswith("paced")] == expected


def test_a_megabyte_without_newline(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast\nprint('w' * 1_000_000, end='')")
    assert len(shown.stdout) + held_back(shown) == pytest.approx(1_000_000, rel=0.05)
    assert set(shown.stdout) == {"w"}
    assert "w" * 1_000_000 in "\n".join(log(notebook, 0))
    assert "w" * 1_000_000 in "\n".join(log(notebook, 1))


def test_flooding_thread_after_its_cell_disturbs_nothing(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast\nstop = threading.Event()\ndef flood():\n    while not stop.is_set():\n        os.write(1, b'late\\n')\n"
        "thread = threading.Thread(target=flood, daemon=True); thread.start()"
    )
    notebook.run("%%sky_broadcast -o answer\nstop.set(); thread.join(); 'answered'")
    assert notebook.value("answer") == ["answered"] * 2


# ------------------------------------------------------------------------------------------ in its cell, and in time


def test_dots_on_stderr_appear_while_the_cell_runs(notebook: Notebook) -> None:
    """`tests/run/test_shown.py` tests stdout and several ranks."""
    fifo = gate(notebook.folder)
    shown = notebook.start(
        f"%%sky_broadcast -t 0\nprint('..', end='', file=sys.stderr)\nopen({str(fifo)!r}).read();"
    )
    notebook.watch(shown, lambda cell: ".." in cell.text)
    assert not shown.done
    fifo.write_text("go")
    assert notebook.finish(shown).text == ".."


def test_lines_of_several_ranks_appear_while_the_cell_runs(notebook: Notebook) -> None:
    fifo = gate(notebook.folder)
    shown = notebook.start(
        f"%%sky_broadcast --only all\nprint('rank', rank)\nif rank == 0:\n    open({str(fifo)!r}).read()\nprint('after')"
    )
    notebook.watch(
        shown, lambda cell: "[0] rank 0\n" in cell.stdout and "[1] after\n" in cell.stdout
    )
    assert not shown.done
    fifo.write_text("go")
    assert len(notebook.finish(shown).lines) == 4


def test_rich_output_appears_while_the_cell_runs(notebook: Notebook) -> None:
    fifo = gate(notebook.folder)
    shown = notebook.start(
        f"%%sky_broadcast -t 0\nprint('before')\ndisplay('rich')\nopen({str(fifo)!r}).read();"
    )
    notebook.watch(shown, lambda cell: bool(cell.rich))
    assert shown.stdout == "before\n"
    assert not shown.done
    fifo.write_text("go")
    notebook.finish(shown)


def test_late_thread_output_is_logged_not_shown_in_later_cells(
    notebook: Notebook,
) -> None:
    fifo = gate(notebook.folder)
    notebook.run(
        f"%%sky_broadcast\ndef later():\n    open({str(fifo)!r}).read()\n    print('much later')\n"
        "thread = threading.Thread(target=later)\nif rank == 0:\n    thread.start()"
    )
    fifo.write_text("go")
    notebook.run("x = 1")
    shown = notebook.run("%%sky_broadcast\nprint('mine')\nthread.join() if rank == 0 else None")
    assert "mine" in shown.stdout
    assert "much later" in "\n".join(log(notebook, 0))


def test_order_of_text_and_displays(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\nfor i in range(3):\n    print(i, end=' '); os.system(f'echo sub {i}'); display(i)"
    )
    assert shown.kinds == ["stdout", "display_data"] * 3


# ------------------------------------------------------------------------------------------ last words


HANDLER = """%%sky_broadcast -t 0 -o heard
import signal, time
refused, heard = [], []
def handler(*_):
    heard.append(1)
    try:
        print('from the handler', file=sys.stderr)
    except RuntimeError as problem:
        refused.append(problem)
def fire(main):
    while len(heard) < 20:
        time.sleep(0.002)
        signal.pthread_kill(main, signal.SIGUSR1)
before = signal.signal(signal.SIGUSR1, handler)
fires = threading.Thread(target=fire, args=[threading.get_ident()])
fires.start()
while fires.is_alive():
    print('from the loop', file=sys.stderr)
signal.signal(signal.SIGUSR1, before)
assert not refused, refused
len(heard)"""


def test_a_signal_handler_prints_while_its_thread_prints(notebook: Notebook) -> None:
    """Like a hook during a progress bar: the signal arrives while the other thread is in its write."""
    shown = notebook.run(HANDLER)
    # amid a line of the loop whose end is not written yet, too
    assert [shown.stderr.count("from the handler")] == notebook.value("heard")


def test_last_words_of_a_rank_that_is_killed(notebook: Notebook) -> None:
    shown = notebook.finish(
        notebook.start(
            "%%sky_broadcast --only all\nimport signal\nif rank == 1:\n    for i in range(500):\n        print('word', i)\n"
            "    print('last words')\n    os.kill(os.getpid(), signal.SIGKILL)"
        )
    )
    assert shown.lines == [f"[1] word {i}" for i in range(500)] + ["[1] last words"]
    assert "last words" in shown.failure.text, "the error shows the end of the log"
    assert log(notebook, 1)[-1] == "last words", "the log outlives the rank"
    notebook.run(
        "%%sky_broadcast\nimport os, sys, subprocess, threading\nrank = int(os.environ['RANK']);"
    )


def test_last_words_of_a_rank_that_exits(notebook: Notebook) -> None:
    """Later tests get new ranks, without the loggers that earlier cells configured."""
    shown = notebook.finish(
        notebook.start("%%sky_broadcast\nprint('before')\nif rank == 0:\n    os._exit(3)")
    )
    assert shown.lines == ["before"]
    assert shown.error is not None
    notebook.run(
        "%%sky_broadcast\nimport os, sys, subprocess, threading\nrank = int(os.environ['RANK']);"
    )


# ------------------------------------------------------------------------------------------ logs


def test_logs_of_all_ranks_are_labelled(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast --only 0\nprint('logged by', rank)")
    assert notebook.run("%sky_logs -n 1").lines == ["[0] logged by 0", "[1] logged by 1"]
    assert notebook.run("%sky_logs --rank 1 -n 1").lines == ["logged by 1"]


def test_logs_can_be_followed_until_the_stop_button(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -a\nimport time\nwhile not os.path.exists('enough'):\n    print('round', flush=True)\n    time.sleep(0.05)"
    )
    following = notebook.start("%sky_logs --rank 1 -n 1 -f")
    notebook.watch(following, lambda so_far: so_far.lines.count("round") > 5)
    notebook.interrupt()
    assert notebook.finish(following).error is None
    notebook.run("open('enough', 'w').close()")


def test_progress_bars_are_text(notebook: Notebook) -> None:
    """A widget would be lost in the saved notebook."""
    shown = notebook.run(
        "%%sky_broadcast\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(7), desc='train', mininterval=0):\n    pass"
    )
    assert set(shown.kinds) == {"stderr"}
    last = shown.stderr.rstrip("\n").split("\r")[-1]
    assert "train: 100%" in last
    assert "7/7" in last


# ------------------------------------------------------------------------------------------ both streams in one order


LOOPS = """\
import logging, os, sys, warnings
from tqdm import tqdm
for epoch in range(100):
    for step in tqdm(range(3), desc=f'epoch {epoch}', mininterval=0, miniters=1):
        if epoch % 10 == 0:
            tqdm.write(f'note {step}')
    print('epoch', epoch, 'is over')
    if epoch % 20 == 0:
        print('part of a line ', end='', flush=True)
        logging.getLogger('mixed').warning('said %s', epoch)
        print('and ', end='', file=sys.stderr, flush=True)
        sys.stdout.write('the rest\\n')
        sys.stderr.write('so on\\n')
"""
TIMES = re.compile(r"\[\d\d:\d\d<[^\]]*\]|\d+%\|[^|]*\|")
RECORDED = """\
import sys
class Recorder:
    encoding = 'utf-8'
    def __init__(self, name): self.name = name
    def write(self, text): parts.append((self.name, text)); return len(text)
    def flush(self): pass
parts, kept = [], (sys.stdout, sys.stderr)
sys.stdout, sys.stderr = Recorder('stdout'), Recorder('stderr')
try:
    exec(LOOPS)
finally:
    sys.stdout, sys.stderr = kept
"""


def final(text: str) -> list[str]:
    """The lines that stay on a screen, without what depends on the clock; a line that is written over leaves its last state."""
    return [TIMES.sub("", line.rpartition("\r")[2]).replace(" ", "") for line in text.split("\n")]


@pytest.mark.parametrize("busy", [False, True], ids=["at rest", "under load"])
def test_bars_and_prints_follow_each_other_as_they_were_written(
    notebook: Notebook, busy: bool
) -> None:
    pytest.importorskip("tqdm")
    notebook.run(f"LOOPS = {LOOPS!r}\n{RECORDED}")
    written = final("".join(text for _, text in notebook.value("parts")))
    enough = notebook.folder / "enough of it"
    if busy:
        notebook.run(
            f"%%sky_broadcast -a -t 1\nwhile not os.path.exists({str(enough)!r}): sum(range(10_000))"
        )
    cell = notebook.run(f"%%sky_broadcast -t 0\n{LOOPS}")
    enough.touch()
    assert cell.stdout.count("is over") == 100
    screen = (
        one["text"] if one["kind"] == "stream" else f"{one['data']['text/plain']}\n"
        for one in cell.outputs
    )
    assert final("".join(screen)) == written


def test_nested_bars_of_one_rank_are_displays_that_move_and_end(notebook: Notebook) -> None:
    pytest.importorskip("tqdm")
    cell = notebook.run("""%%sky_broadcast -t 0
import time
from tqdm import tqdm
for epoch in tqdm(range(3), desc='train', mininterval=0):
    for step in tqdm(range(4), desc='validate', mininterval=0, leave=False):
        time.sleep(0.1 if epoch == 1 else 0)
print('over')""")
    assert "\x1b[A" not in str(cell.outputs), "a notebook cannot go up a line"
    assert [line.partition(":")[0] for line in cell.said.splitlines()] == ["train", "over"]
    assert "3/3" in cell.said


def test_stderr_follows_descriptor_2(notebook: Notebook, tmp_path: Path) -> None:
    cell = f"""%%sky_broadcast
import os, subprocess, sys
kept, file = os.dup(2), os.open({str(tmp_path / "errors")!r}, os.O_CREAT | os.O_WRONLY)
print('before', file=sys.stderr)
os.dup2(file, 2)
print('within', file=sys.stderr)
subprocess.run('echo child >&2', shell=True)
os.dup2(kept, 2)
print('after', file=sys.stderr)
(sys.stderr.fileno(), sys.stderr.name)"""
    shown = notebook.run(cell)
    assert shown.stderr == "before\nafter\n"
    assert (tmp_path / "errors").read_text() == "within\nchild\n"
    assert shown.rich[-1]["text/plain"] == "(2, '<stderr>')"
