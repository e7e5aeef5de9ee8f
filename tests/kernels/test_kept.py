"""What a rank has shown and another notebook gets: of a flood its beginning, its end, and how much lies between."""

from __future__ import annotations

from typing import Any

from skymagic.kernels.agent.kept import FIRST_BYTES, LAST_BYTES, KeptOutput

COUNT, SIZE = 3000, 1000


def flooded() -> KeptOutput:
    kept = KeptOutput(0)
    for number in range(1, COUNT + 1):
        kept.add({"rank": 0, "kind": "stream", "name": "stdout", "text": f"{number}\n".rjust(SIZE)})
    return kept


def numbers(contents: list[dict[str, Any]]) -> list[int]:
    return [int(one["text"]) for one in contents if one["kind"] == "stream"]


def test_of_a_flood_there_is_the_beginning_the_end_and_the_size_of_the_rest() -> None:
    contents = list(flooded().after(0))
    (gap,) = [one for one in contents if one["kind"] == "held_back"]
    first, last = FIRST_BYTES // SIZE, LAST_BYTES // SIZE
    assert numbers(contents) == [*range(1, first + 1), *range(COUNT - last + 1, COUNT + 1)]
    assert contents.index(gap) == first
    assert gap["nbytes"] == (COUNT - first - last) * SIZE
    assert [one["seq"] for one in contents] == sorted(one["seq"] for one in contents)


def test_what_was_shown_does_not_come_again() -> None:
    kept, first, last = flooded(), FIRST_BYTES // SIZE, LAST_BYTES // SIZE
    assert numbers(list(kept.after(COUNT - 2))) == [COUNT - 1, COUNT]
    assert list(kept.after(COUNT)) == []
    shown = first + 100  # some of what is not kept any more
    contents = list(kept.after(shown))
    assert [one["nbytes"] for one in contents if one["kind"] == "held_back"] == [(COUNT - last - shown) * SIZE]
    assert numbers(contents) == [*range(COUNT - last + 1, COUNT + 1)]
