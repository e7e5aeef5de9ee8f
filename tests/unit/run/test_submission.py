"""What a run reads of its mailbox: text that has come by now is one, and nothing changes places or is lost."""

from __future__ import annotations

from dataclasses import replace

from skymagic.run.submission import (
    JOINED_CHARS,
    OutputArrived,
    RankDeath,
    RankFinished,
    Repeated,
    StopPressed,
    Submission,
)
from skymagic.wire.agent import RankExited
from skymagic.wire.outcome import Outcome
from skymagic.wire.output import OutputDisplay, OutputMetrics, OutputText


def shown(
    submission: Submission,
    rank: int,
    text: str,
    seq: int,
    name: str = "stdout",
    *,
    maybe_seen: bool = False,
) -> None:
    submission.put(OutputArrived(OutputText(rank, name, text, seq=seq, maybe_seen=maybe_seen)))


def read(submission: Submission) -> list[tuple[int, str, int]]:
    """(Rank, text or "outcome", number) of each event."""
    events = []
    for event in submission.news():
        if isinstance(event, RankFinished):
            events.append((event.rank, "outcome", 0))
            continue
        assert isinstance(event, OutputArrived)
        assert isinstance(event.output, OutputText)
        events.append((event.rank, event.output.text, event.output.seq))
    return events


def test_text_of_a_stream_that_has_come_is_one() -> None:
    submission = Submission([0, 1])
    for seq in range(1, 4):
        shown(submission, 0, f"step {seq}\n", seq)
    shown(submission, 0, "a warning\n", 4, "stderr")
    shown(submission, 1, "step 1\n", 1)
    shown(submission, 0, "step 4\n", 5)
    submission.put(RankFinished(0, Outcome()))
    shown(submission, 0, "after it\n", 6)
    assert read(submission) == [
        (0, "step 1\nstep 2\nstep 3\n", 3), (0, "a warning\n", 4), (1, "step 1\n", 1), (0, "step 4\n", 5),
        (0, "outcome", 0), (0, "after it\n", 6),
    ]  # fmt: skip


def test_what_is_announced_stays_by_itself() -> None:
    submission = Submission([0])
    shown(submission, 0, "seen?\n", 1, maybe_seen=True)
    shown(submission, 0, "new\n", 2)
    shown(submission, 0, "seen?\n", 3, maybe_seen=True)
    assert read(submission) == [(0, "seen?\n", 1), (0, "new\n", 2), (0, "seen?\n", 3)]


def test_what_may_have_been_seen_is_announced_once() -> None:
    repeated = Repeated({0: 3})
    come = [OutputText(0, "stdout", f"{seq}\n", seq=seq) for seq in range(1, 5)]
    assert [repeated.take(output) for output in come[:2]] == [[], []]
    assert repeated.take(come[2]) == [OutputText(0, "stdout", "1\n2\n3\n", seq=3, maybe_seen=True)]
    assert repeated.take(come[3]) == [come[3]]
    other = OutputText(1, "stdout", "1\n", seq=1)
    assert repeated.take(other) == [other], "nothing of this rank is in doubt"


def test_what_follows_a_gap_is_not_in_doubt() -> None:
    repeated = Repeated({0: 3})
    numbers = OutputMetrics(0, (), seq=1)
    picture = OutputDisplay(0, "display_data", {"data": {}}, seq=2)
    after = OutputText(0, "stdout", "new\n", seq=7)
    assert repeated.take(numbers) == repeated.take(picture) == []
    assert repeated.take(after) == [numbers, replace(picture, maybe_seen=True), after]


def test_a_flood_comes_in_pieces_and_what_was_not_read_is_there_still() -> None:
    submission, piece = Submission([0]), "x" * (JOINED_CHARS // 2)
    for seq in range(1, 6):
        shown(submission, 0, piece, seq)
    assert [seq for _, _, seq in read(submission)] == [2, 4, 5]
    shown(submission, 0, "text\n", 6)
    submission.put(RankDeath(RankExited(0, 0, None, False)))
    submission.put(StopPressed())
    assert submission.read(0.0) == OutputArrived(OutputText(0, "stdout", "text\n", seq=6))
    counts = [len(submission.unread(kind)) for kind in (RankDeath, StopPressed, OutputArrived)]
    assert counts == [1, 1, 0]
