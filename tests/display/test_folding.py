"""Equal lines of many ranks are one line; of a few, each has its own."""

from __future__ import annotations

import copy
import re
from pathlib import Path

from skymagic.display.labels import LONGEST_WAIT, MANY, WAIT, Folded, Folding, Labels
from tests.lab.notebook import opened


def told(found: list[Folded]) -> list[tuple[tuple[int, ...], str]]:
    return [(one.ranks, one.text) for one in found]


def test_a_line_that_all_have_written_leaves_at_once() -> None:
    lines = Folding(range(3))
    assert lines.add((2, "stdout"), ["epoch 1", "mine"], 0.0) == []
    assert lines.add((0, "stdout"), ["epoch 1"], 0.1) == []
    assert told(lines.add((1, "stdout"), ["epoch 1", "mine"], 0.2)) == [((0, 1, 2), "epoch 1")]
    assert told(lines.due(0.1)) == []
    assert told(lines.due(WAIT + 0.1)) == [((1, 2), "mine")]
    assert lines.all() == []


def test_what_differs_waits_a_moment_and_each_ranks_lines_stay_in_order() -> None:
    lines = Folding(range(3))
    for rank in range(3):
        lines.add((rank, "stdout"), [f"loss {rank}", "same", f"last {rank}"], rank / 100)
    assert told(lines.due(WAIT)) == [((0,), "loss 0")], "and 'same' waits for the others"
    assert told(lines.all()) == [
        ((1,), "loss 1"),
        ((2,), "loss 2"),
        ((0, 1, 2), "same"),
        *(((rank,), f"last {rank}") for rank in range(3)),
    ]


def test_lines_that_wait_for_each_other_leave_after_a_while() -> None:
    lines = Folding(range(3))
    lines.add((0, "stdout"), ["a", "b"], 0.0)
    lines.add((1, "stdout"), ["b", "a"], 0.0)
    other = copy.deepcopy(lines)
    assert sorted(told(other.all())) == [((0,), "a"), ((0, 1), "b"), ((1,), "a")]
    assert lines.due(2 * WAIT) == []
    assert sorted(told(lines.due(LONGEST_WAIT))) == [((0,), "a"), ((0, 1), "b"), ((1,), "a")]


def test_streams_are_not_mixed_and_a_line_that_comes_twice_is_there_twice() -> None:
    lines = Folding(range(2))
    lines.add((0, "stdout"), ["x", "x"], 0.0)
    lines.add((1, "stderr"), ["x"], 0.0)
    assert told(lines.add((1, "stdout"), ["x", "x"], 0.0)) == [((0, 1), "x"), ((0, 1), "x")]
    assert lines.all() == [Folded("stderr", (1,), "x")]


def test_labels_of_one_of_a_few_and_of_many() -> None:
    for ranks in (MANY - 1, MANY):
        written: list[str] = []
        labels = Labels(range(ranks), lambda name, text, to=written: to.append(text), noun="node")  # type: ignore[misc]
        for rank in range(ranks):
            labels.text(rank, "stdout", "ready\n" if rank else "ready\nhead\n")
        labels.text(3, "stdout", "open")
        labels.finish()
        whole = "".join(written)
        if ranks < MANY:
            assert (
                whole
                == "[0] ready\n[0] head\n"
                + "".join(f"[{rank}] ready\n" for rank in range(1, ranks))
                + "[3] open\n"
            )
        else:
            assert whole == f"nodes 0–{MANY - 1}: ready\n[0] head\n[3] open\n"


def test_a_flood_of_many_ranks_is_folded_in_linear_time() -> None:
    lines, found = Folding(range(64)), 0
    for rank in range(64):
        found += len(
            lines.add(
                (rank, "stdout"),
                [f"{rank if step % 2 else 'all'} {step}" for step in range(500)],
                0.0,
            )
        )
    assert found + len(lines.due(1.0)) == 250 + 250 * 64


def lines_of(rank: int, lines: list[str]) -> list[str]:
    """What a rank has written, by lines of one rank or of several."""
    found = []
    for line in lines:
        match = re.fullmatch(r"(?:\[(\d+)\]|ranks ([\d–, ]+):) (.*)", line)
        assert match is not None, line
        spans = [span.split("–") for span in (match[1] or match[2]).split(", ")]
        if any(int(span[0]) <= rank <= int(span[-1]) for span in spans):
            found.append(match[3])
    return found


def test_a_cell_of_many_ranks(tmp_path: Path) -> None:
    with opened(tmp_path, f"%sky_pool --ranks {MANY}") as notebook:
        lines = notebook.run(
            "%%sky_broadcast --only all\nimport os\nrank = int(os.environ['RANK'])\nprint('step 1')\n"
            "if rank == 5:\n    print('loss is nan')\nprint('step 2')"
        ).lines
        for rank in range(MANY):
            assert lines_of(rank, lines) == [
                "step 1",
                *(["loss is nan"] if rank == 5 else []),
                "step 2",
            ]
        assert "[5] loss is nan" in lines
        assert len(lines) < 2 * MANY, (
            "which is said of several; a rank that is late has lines of its own"
        )
        few = notebook.run("%%sky_broadcast -t 2,3 --only all\nprint('few')").lines
        assert sorted(few) == ["[2] few", "[3] few"]
