"""`sky.report`: what it takes and refuses, what becomes of it on a rank, and that it costs a step nothing."""

from __future__ import annotations

import math
import threading
import warnings
from typing import Any

import pytest

import skymagic as sky
from skymagic.runtime import reporting
from skymagic.runtime.reporting import MOST_NAMES, Recorder
from skymagic.wire.metrics import Rows
from tests.lab.golden import Golden
from tests.lab.waiting import Overtaken


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Rows]:
    """This process as a rank: what it sends."""
    found: list[Rows] = []
    monkeypatch.setattr(reporting, "_recorder", Recorder())
    monkeypatch.setattr(reporting, "_send", found.append)
    return found


def rows(sent: list[Rows]) -> dict[tuple[str, ...], list[tuple[Any, ...]]]:
    """What came, without its seconds; NaN as None."""
    reporting.flush()
    found: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
    for batch in sent:
        for names, flat in batch.items():
            width = 3 + len(names)
            for i in range(0, len(flat), width):
                row = flat[i + 1 : i + width]
                found.setdefault(names, []).append(tuple(None if math.isnan(v) else v for v in row))
    return found


def test_rows_by_their_names(sent: list[Rows]) -> None:
    sky.report(step=0, total=2, loss=0.5)
    sky.report(step=1, total=2, loss=1)
    sky.report(step=1, accuracy=0.25, lr=1e-3)
    assert rows(sent) == {
        ("loss",): [(0, 2, 0.5), (1, 2, 1)],
        ("accuracy", "lr"): [(1, None, 0.25, 1e-3)],
    }
    reporting.flush()
    assert len(sent) == 1, "what was sent is not sent again"


def test_omitted_steps_continue_counting(sent: list[Rows]) -> None:
    reporting.begin()
    sky.report(loss=3.0)
    sky.report(loss=2.0)
    sky.report(step=10, loss=1.0)
    sky.report(loss=0.5)
    assert [row[0] for row in rows(sent)["loss",]] == [1, 2, 10, 11]


def test_one_number_of_whatever_kind(sent: list[Rows]) -> None:
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = torch.ones(1, requires_grad=True)
        sky.report(
            step=np.int64(3),
            a=np.float32(0.5),
            b=np.array([2.0]),
            c=weight.sum() * 3,
            d=True,
            e=math.inf,
        )
    assert rows(sent) == {("a", "b", "c", "d", "e"): [(3, None, 0.5, 2, 3, 1, math.inf)]}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"loss": "0.5"}, TypeError, "sky.report(loss=…) takes one number, not a str"),
        ({"loss": None}, TypeError, "not None"),
        ({"loss": [1.0]}, TypeError, "not a list"),
        ({"loss": 1j}, TypeError, "not a complex"),
        ({"rank": 1}, ValueError, "'rank' is already a column of the table"),
        ({"seconds": 1}, ValueError, "'seconds' is already a column of the table"),
        ({" ": 1}, ValueError, "cannot be a column's name"),
        ({"x" * 101: 1}, ValueError, "cannot be a column's name"),
        ({f"n{i}": 1 for i in range(MOST_NAMES + 1)}, ValueError, "more than 200 different names"),
        ({"step": -1}, ValueError, "neither negative nor infinite"),
        ({"step": math.nan}, ValueError, "neither negative nor infinite"),
        ({"step": "1"}, TypeError, "sky.report(step=…) takes one number, not a str"),
        ({"step": 1, "total": 0}, ValueError, "a total above 0"),
    ],
)
@pytest.mark.parametrize("on_a_rank", [True, False])
def test_invalid_metrics_are_refused_at_once_everywhere(
    given: dict[str, Any], kind: type[Exception], message: str, on_a_rank: bool, sent: list[Rows], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    if not on_a_rank:
        monkeypatch.setattr(reporting, "_send", None)
    with pytest.raises(kind) as raised:
        sky.report(**given)
    assert message in str(raised.value)
    assert rows(sent) == {}, "nothing of it is kept"


def test_number_of_names_is_bounded_over_calls(sent: list[Rows]) -> None:
    for i in range(MOST_NAMES):
        sky.report(**{f"n{i}": 1.0})
    with pytest.raises(ValueError, match="report fewer"):
        sky.report(another=1.0)


def test_arrays_must_be_reduced(golden: Golden, sent: list[Rows]) -> None:
    torch = pytest.importorskip("torch")
    with golden.raises(TypeError):
        sky.report(loss=torch.ones(2))


def test_many_threads_lose_nothing(sent: list[Rows]) -> None:
    going = threading.Event()

    def work(number: int) -> None:
        for i in range(2000):
            sky.report(step=i, loss=float(number))

    def take() -> None:
        while not going.is_set():
            reporting.flush()

    taker = threading.Thread(target=take)
    taker.start()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    going.set()
    taker.join()
    found = rows(sent)["loss",]
    assert sorted((loss, step) for step, _, loss in found) == [
        (n, i) for n in range(4) for i in range(2000)
    ]


def test_end_of_a_cell_waits_for_sending_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overtaken = Overtaken()
    monkeypatch.setattr(reporting, "_send", overtaken.send)
    sky.report(loss=1.0)
    sent, end = overtaken.order(reporting.flush)
    assert sent
    assert not end
