"""What a run reads of its mailbox: text that has come by now is one, and nothing changes places or is lost."""

from __future__ import annotations

from skymagic.run.submission import (
    JOINED_CHARS,
    OutputArrived,
    RankDeath,
    RankFinished,
    StopPressed,
    Submission,
)
from skymagic.wire.agent import RankExited
from skymagic.wire.outcome import Outcome
from skymagic.wire.output import OutputText


def shown(
    submission: Submission,
    rank: int,
    text: str,
    seq: int,
    name: str = "stdout",
) -> None:
    submission.put(OutputArrived(OutputText(rank, name, text, seq=seq)))


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


def test_consecutive_text_of_a_stream_is_joined() -> None:
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


def test_flood_is_joined_in_pieces_and_nothing_is_lost() -> None:
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
