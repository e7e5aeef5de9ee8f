"""What ranks use, as their agent measures it, and as the notebook makes rates of it."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from skymagic.cluster.resources import rate
from skymagic.kernels.agent.resources import Gpus, Resources, of_devices, process
from skymagic.wire import agent as wire

NVML = """
from types import SimpleNamespace as Of
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(index):
    if index > 1: raise NVMLError("no such GPU")
    return index
def nvmlDeviceGetMemoryInfo(index): return Of(used=(index + 1) * 10**9, total=80 * 10**9)
def nvmlDeviceGetUtilizationRates(index): return Of(gpu=40 + index)
"""


def test_a_process_uses_processor_time_and_memory() -> None:
    found = process(os.getpid())
    assert found is not None
    while (now := process(os.getpid())) is not None and now[0] == found[0]:
        pass  # which is work
    assert now is not None
    assert now[1] > 1 << 20
    assert process(2**22 + 1) is None, "no process has this number"


def test_gpus_are_asked_where_there_is_a_driver_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(tmp_path)
    gpus = Gpus()
    deadline = time.monotonic() + 30
    while not (found := gpus.latest([0, 1, 7])) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread asks; what it has found is there at the next look
    assert found == {0: (0.4, 1e9, 80e9), 1: (0.41, 2e9, 80e9)}
    assert of_devices([0, 1], found) == [pytest.approx(0.405), 3e9, 160e9]
    assert of_devices([7], found) == []
    gpus.close()
    gpus._thread.join(10)
    assert not gpus._thread.is_alive()


def test_a_node_replies_once_and_without_gpus_asks_nobody() -> None:
    resources = Resources()
    reply = resources.reply(wire.Measure((4, 5), {}, 9), {4: os.getpid()})
    assert (reply.rank, reply.number, list(reply.value["ranks"])) == (4, 9, ["4"])
    assert len(reply.value["ranks"]["4"]) == 2
    assert resources._gpus is None
    assert wire.decode(wire.encode(reply)) == reply


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ((10.0, 1.0), (12.0, 4.0), 1.5),
        (None, (12.0, 4.0), math.nan),
        ((10.0, 5.0), (12.0, 4.0), math.nan),
        ((10.0, 1.0), (500.0, 4.0), math.nan),
    ],
    ids=["rate", "first", "another process", "too old"],
)
def test_processor_time_is_a_rate(before: tuple[float, float] | None, now: tuple[float, float], found: float) -> None:
    assert rate(before, now) == pytest.approx(found, nan_ok=True)
