"""What a run reads of its mailbox: text that has come by now is one, and nothing changes places or is lost."""

from __future__ import annotations

from typing import Any

from skymagic.run.submission import JOINED_CHARS, Repeated, Submission


def shown(
    submission: Submission, rank: int, text: str, seq: int, name: str = "stdout", **more: Any
) -> None:
    submission.put(
        "output", rank, {"kind": "stream", "name": name, "text": text, "seq": seq, **more}
    )


def read(submission: Submission) -> list[tuple[int, str, int]]:
    """(Rank, text or kind, number) of each event."""
    return [
        (one.rank, one.content.get("text", one.kind), one.content.get("seq", 0))
        for one in submission.news()
    ]


def test_text_of_a_stream_that_has_come_is_one() -> None:
    submission = Submission([0, 1])
    for seq in range(1, 4):
        shown(submission, 0, f"step {seq}\n", seq)
    shown(submission, 0, "a warning\n", 4, "stderr")
    shown(submission, 1, "step 1\n", 1)
    shown(submission, 0, "step 4\n", 5)
    submission.put("outcome", 0, {"status": "ok"})
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
    come = [
        {"kind": "stream", "name": "stdout", "text": f"{seq}\n", "seq": seq} for seq in range(1, 5)
    ]
    assert [repeated.take(0, content) for content in come[:2]] == [[], []]
    [announced] = repeated.take(0, come[2])
    assert (announced["text"], announced["seq"], announced["maybe_seen"]) == ("1\n2\n3\n", 3, True)
    assert repeated.take(0, come[3]) == [come[3]]
    assert repeated.take(1, come[0]) == [come[0]], "nothing of this rank is in doubt"


def test_what_follows_a_gap_is_not_in_doubt() -> None:
    repeated = Repeated({0: 3})
    numbers = {"kind": "numbers", "batches": [], "seq": 1}
    picture = {"kind": "display_data", "data": {}, "seq": 2}
    after = {"kind": "stream", "name": "stdout", "text": "new\n", "seq": 7}
    assert repeated.take(0, numbers) == repeated.take(0, picture) == []
    assert repeated.take(0, after) == [numbers, {**picture, "maybe_seen": True}, after]


def test_a_flood_comes_in_pieces_and_what_was_not_read_is_there_still() -> None:
    submission, piece = Submission([0]), "x" * (JOINED_CHARS // 2)
    for seq in range(1, 6):
        shown(submission, 0, piece, seq)
    assert [seq for _, _, seq in read(submission)] == [2, 4, 5]
    shown(submission, 0, "text\n", 6)
    submission.put("died", 0, {})
    submission.put("stop", -1)
    first = submission.read(0.0)
    assert first is not None
    assert first.content["text"] == "text\n"
    assert [len(submission.unread(kind)) for kind in ("died", "stop", "output")] == [1, 1, 0]
