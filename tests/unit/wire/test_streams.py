"""Standard output and standard error in one pipe: what comes out is what was written, in that order, however it is cut."""

from __future__ import annotations

import select
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as some

from skymagic.wire.streams import HEADER_BYTES, MARK, MAX_TEXT_BYTES, FrameReader, frame

TEXT = some.binary(min_size=1, max_size=40) | some.sampled_from(
    [MARK, MARK[:3], b"\x1b", MARK + b"zzzz\x00", frame(b"x")]
)


def read(data: bytes, cuts: list[int]) -> list[tuple[str, bytes]]:
    """What comes out where the agent reads up to these places; parts of one stream in a row joined."""
    reader, parts = FrameReader(), list[tuple[str, bytes]]()
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        parts += reader.feed(data[start:end])
    parts += reader.end()
    joined = groupby(parts, key=lambda part: part[0])
    return [(name, b"".join(text for _, text in some)) for name, some in joined]


@given(
    some.lists(
        some.tuples(some.sampled_from(["stdout", "stderr"]), some.binary(min_size=1, max_size=40))
    ),
    some.data(),
)
def test_the_order_is_kept(written: list[tuple[str, bytes]], data: some.DataObject) -> None:
    written = [(name, text.replace(MARK, b"")) for name, text in written]
    whole = b"".join(text if name == "stdout" else frame(text) for name, text in written)
    cuts = sorted(data.draw(some.lists(some.integers(0, len(whole)), max_size=8)))
    expected = groupby([part for part in written if part[1]], key=lambda part: part[0])
    assert read(whole, cuts) == [
        (name, b"".join(text for _, text in each)) for name, each in expected
    ]


@given(some.lists(TEXT))
def test_text_like_a_frame_is_not_lost(texts: list[bytes]) -> None:
    whole = b"".join(texts)
    found = read(whole, [])
    framed = sum(name == "stderr" for name, _ in found)
    assert sum(len(text) for _, text in found) >= len(whole) - HEADER_BYTES * (
        framed + whole.count(MARK)
    )
    assert b"".join(text for _, text in read(whole.replace(b"\x1b", b""), [])) == whole.replace(
        b"\x1b", b""
    )


def test_a_frame_is_written_at_once() -> None:
    assert len(frame(b"x" * MAX_TEXT_BYTES)) == select.PIPE_BUF


@pytest.mark.parametrize("cut", range(1, HEADER_BYTES + 3))
def test_a_frame_is_known_wherever_it_is_cut(cut: int) -> None:
    whole = b"out" + frame("größe\r".encode()) + b"after"
    assert read(whole, [cut]) == [
        ("stdout", b"out"),
        ("stderr", "größe\r".encode()),
        ("stdout", b"after"),
    ]


def test_partial_frame_prefix_is_shown_at_the_end() -> None:
    reader = FrameReader()
    assert reader.feed(b"colour \x1b") == [("stdout", b"colour ")]
    assert reader.feed(b"[0m") == [("stdout", b"\x1b[0m")]
    assert reader.feed(b"\x1b") == []
    assert reader.end() == [("stdout", b"\x1b")]
    assert reader.end() == []
