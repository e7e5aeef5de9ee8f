"""Values of JSON become what the fields of a dataclass are annotated with, or are refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from skymagic.wire import agent as wire
from skymagic.wire.metrics import MetricBatch
from skymagic.wire.output import OutputMetrics, OutputText
from skymagic.wire.typed import fields_of, plain, read
from tests.lab.golden import Golden


@dataclass(frozen=True)
class Point:
    x: float
    name: str = ""


@dataclass(frozen=True)
class Shape:
    corners: tuple[Point, ...]
    by_rank: dict[int, Point]
    center: Point | None = None
    row: tuple[int, str] = (0, "")
    anything: Any = None
    limit: str | None = None
    parts: tuple[str | list[int], ...] = ()


SHAPE = Shape(
    (Point(1.5, "a"), Point(2)),
    {3: Point(0.0)},
    Point(4.0),
    (7, "b"),
    {"c": [1]},
    "d",
    ("inline", [0, 64]),
)


@pytest.mark.parametrize("convert", [plain, lambda shape: shape], ids=["plain", "encoder"])
def test_nested_dataclasses_survive_json(convert: Any) -> None:
    text = json.dumps(convert(SHAPE), default=fields_of)
    assert read(Shape, json.loads(text)) == SHAPE


@pytest.mark.parametrize(
    "changes",
    [
        {"corners": {}},
        {"corners": [{"x": "1"}]},
        {"corners": [{"name": "a"}]},
        {"corners": [{"x": 1, "y": 2}]},
        {"by_rank": []},
        {"by_rank": {"a": {"x": 1}}},
        {"center": 3},
        {"row": [1]},
        {"row": ["a", "b"]},
        {"limit": 1},
        {"parts": [1]},
        {"unknown": 1},
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a Shape"):
        read(Shape, json.loads(json.dumps(plain(SHAPE))) | changes)


def test_only_dataclasses_are_encoded(golden: Golden) -> None:
    with golden.raises(TypeError):
        wire.encode(wire.RankReply(0, 1, object()))


def test_scalars_of_messages_are_checked(golden: Golden) -> None:
    line = wire.encode(wire.Signal((1, 2), 9))
    assert wire.decode(line) == wire.Signal((1, 2), 9)
    with golden.raises(ValueError):
        wire.decode(line.replace(b"9", b'"9"'))


def test_output_travels_as_line_and_as_plain_value() -> None:
    for output in (
        OutputText(3, "stdout", "text\n", seq=7),
        OutputMetrics(3, (MetricBatch(("loss",), "AAAA"),), dropped=2),
    ):
        assert wire.decode(wire.encode(output)) == output
        assert wire.CODEC.from_plain(wire.CODEC.to_plain(output)) == output
