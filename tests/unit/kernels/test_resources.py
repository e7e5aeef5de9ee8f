"""What ranks use, as their agent measures it, and as the notebook makes rates of it."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest

from skymagic.cluster.telemetry import rate
from skymagic.display.panel import RankUse, usage_text
from skymagic.kernels.agent import resources
from skymagic.kernels.agent.resources import Gpus, Measurements, combined_gpu_use, process_use
from skymagic.wire import agent as wire
from tests.lab.waiting import until


class Nvml:
    """Stands for nvidia-ml-py's module on a machine with two GPUs and a third that is partitioned; its driver may go."""

    __spec__ = ModuleSpec("pynvml", None)

    class NVMLError(Exception):
        """As NVML's own."""

    def __init__(self) -> None:
        self.starts = True
        self.lost = set[int]()
        self.asked = 0
        """How often a GPU was asked."""
        self.answers = threading.Event()
        """Whether the driver answers, or hangs."""
        self.answers.set()

    def nvmlInit(self) -> None:
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.asked += 1
        self.answers.wait(60)
        if index > 2 or index in self.lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        """In bytes."""
        return SimpleNamespace(used=(handle + 1) * 10**9, free=1, total=80 * 10**9)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        """In percent."""
        if handle == 2:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=40 + handle, memory=90)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.fixture
def gpus(nvml: Nvml) -> Iterator[Gpus]:
    gpus = Gpus()
    yield gpus
    nvml.answers.set()
    gpus.close()
    gpus._thread.join(10)
    assert not gpus._thread.is_alive()


def latest(
    gpus: Gpus, devices: list[str], told: list[str]
) -> dict[str, tuple[float, float, float]]:
    """Ask until these devices tell; what they tell. A thread asks: what it has found is there at a later look."""
    until(lambda: list(gpus.latest(devices)) == told)
    return gpus.latest(devices)


def test_a_process_uses_processor_time_and_memory() -> None:
    found = process_use(os.getpid())
    assert found is not None
    while (now := process_use(os.getpid())) is not None and now[0] == found[0]:
        pass  # which is work
    assert now is not None
    assert now[1] > 1 << 20
    assert process_use(2**22 + 1) is None, "no process has this number"


def test_gpus_are_measured_if_there_is_a_driver(gpus: Gpus) -> None:
    found = latest(gpus, ["0", "1", "2", "7"], ["0", "1"])
    assert found == {"0": (0.4, 1e9, 80e9), "1": (0.41, 2e9, 80e9)}, "parts of a GPU do not tell"
    assert combined_gpu_use(["0", "1"], found) == [pytest.approx(0.405), 3e9, 160e9]
    assert combined_gpu_use(["7"], found) == []


def test_lost_gpu_is_no_longer_reported(nvml: Nvml, gpus: Gpus) -> None:
    latest(gpus, ["0", "1"], ["0", "1"])
    nvml.lost.add(0)
    assert latest(gpus, ["0", "1"], ["1"]) == {"1": (0.41, 2e9, 80e9)}
    nvml.lost.clear()
    latest(gpus, ["0", "1"], ["0", "1"])


def test_measurements_expire_when_the_driver_hangs(
    nvml: Nvml, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest(gpus, ["0"], ["0"])
    nvml.answers.clear()
    monkeypatch.setattr(resources, "MAX_AGE", 0.0)  # as if that time had gone by
    assert gpus.latest(["0"]) == {}


def test_no_gpus_without_a_driver(nvml: Nvml) -> None:
    nvml.starts = False
    gpus = Gpus()
    gpus._thread.join(10)
    assert gpus.latest(["0"]) == {}
    assert nvml.asked == 0
    gpus.close()


def test_ranks_are_reported_with_their_gpus(nvml: Nvml) -> None:
    """From NVIDIA's module to the displayed text."""
    node = Measurements()
    message = wire.Measure((0, 1, 2), {0: ("0", "1"), 1: ("2",)}, 3)
    pids = dict.fromkeys(range(3), os.getpid())
    until(lambda: len(node.reply(message, pids).ranks[0].gpu) == 3)
    reply = node.reply(message, pids)
    assert wire.decode(wire.encode(reply)) == reply
    assert [len(reply.ranks[rank].gpu) for rank in range(3)] == [3, 0, 0], (
        "one with parts of a GPU is as one without"
    )
    usage = reply.ranks[0]
    use = RankUse(math.nan, usage.memory, 64e9, *usage.gpu)
    assert usage_text(use).startswith("GPU 40%, 3.0 GB of 160.0 GB; memory ")
    assert usage.cpu_seconds >= 0
    node.close()
    assert node._gpus is not None
    node._gpus._thread.join(10)
    assert not node._gpus._thread.is_alive()


def test_node_without_gpus_replies_without_a_driver() -> None:
    resources = Measurements()
    reply = resources.reply(wire.Measure((4, 5), {}, 9), {4: os.getpid()})
    assert (reply.rank, reply.number, list(reply.ranks)) == (4, 9, [4])
    assert reply.ranks[4].gpu == ()
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
def test_processor_time_is_a_rate(
    before: tuple[float, float] | None, now: tuple[float, float], found: float
) -> None:
    assert rate(before, now) == pytest.approx(found, nan_ok=True)
