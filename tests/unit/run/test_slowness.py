"""Why a run is slow, in words: decided from what ranks say of themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.run.metrics import Metrics, Usage, causes_over_run, current_causes
from skymagic.run.stall import LAST_SAMPLES, Stall, deserted_text, diverged_text
from skymagic.run.state import RankRun, Report, failed_ranks
from skymagic.runtime import usage
from skymagic.wire.metrics import FIXED, USAGE, packed
from skymagic.wire.outcome import Failure, Outcome
from skymagic.wire.queries import Stack, StackFrame
from tests.lab.golden import Golden


def loader(share: float, seconds: int = 12, step: float = 1.0) -> list[Usage]:
    """A rank that waits for batches so much of its steps."""
    return [
        Usage(float(second), 0, share * step * second, step * second)
        for second in range(1, seconds)
    ]


def gpus(use: Sequence[float], memory: float = 0.5) -> list[Usage]:
    """A rank with a GPU, a sample each second."""
    return [
        Usage(float(second), gpu_memory=memory, gpu_use=share) for second, share in enumerate(use)
    ]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, []),
        ({0: loader(0.05), 1: loader(0.15)}, []),
        ({0: loader(0.05), 1: loader(0.45)}, ["rank 1 spends 45% of its steps loading data"]),
        ({0: loader(0.3), 1: loader(0.45)}, ["ranks 0, 1 spend 30–45% of their steps loading data"]),
        ({0: loader(0.9, step=0.01)}, []),  # a tenth of a second of steps says nothing
        ({0: [Usage(1.0, 0, 40.0, 50.0), Usage(20.0, 0, 40.5, 70.0)]}, []),  # it was slow, and is not
        ({0: [Usage(1.0, memory=0.96, held=0.1)], 1: [Usage(1.0, memory=0.97, held=0.6)]}, ["memory is 97% full, rank 1 holds the most (60%)"]),
        ({0: [Usage(1.0, 0, memory=0.5)], 1: [Usage(1.0, 3, memory=0.97, held=0.6)]}, ["memory of node 3 is 97% full, rank 1 holds the most (60%)"]),
        ({2: gpus([0.0] * 12)}, ["the GPU of rank 2 is idle"]),
        ({2: gpus([0.0] * 6 + [0.9] + [0.0] * 6)}, []),
        ({2: gpus([0.0] * 5)}, []),
        ({2: gpus([math.nan] * 12)}, []),
        ({0: gpus([0.9], 0.99), 1: gpus([0.9], 0.97)}, ["the GPUs of ranks 0, 1 have their memory full"]),
    ],
)  # fmt: skip
def test_progress_text_during_a_run(told: dict[int, list[Usage]], said: list[str]) -> None:
    assert current_causes(told) == said
    assert current_causes(told, ended=list(told)) == []


def test_final_line_of_a_run(golden: Golden) -> None:
    told = {0: loader(0.05), 1: [*loader(0.45), Usage(12.0, 0, 5.0, 11.0, memory=0.96, held=0.5)]}
    golden(causes_over_run(told))


def test_time_left_is_not_reported_as_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    usage.begin(node=2)
    usage.loading.step(0.5, 1.0)
    assert usage.sample() == {}, "not old enough"
    monkeypatch.setattr(usage, "_sampled", time.perf_counter() - usage.INTERVAL)
    rows = usage.sample()
    assert len(rows[USAGE]) == FIXED + len(USAGE)
    metrics = Metrics()
    metrics.add(1, packed(rows))
    assert not metrics
    assert metrics.progress() is None
    (told,) = metrics.usage()[1]
    assert (told.node, told.waited, told.stepped) == (2, 0.5, 1.0)
    assert 0 < told.held < told.memory < 1


def test_the_memory_that_is_nearest_its_limit_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "cgroups/job/memory.max": "1000000000",
        "cgroups/job/memory.current": "900000000",
        "cgroups/job/memory.stat": "inactive_file 100000000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    told = usage.memory_limits(tmp_path / "proc", tmp_path / "cgroups")
    assert told == [(9_216_000_000, 8_192_000_000), (1_000_000_000, 200_000_000)]


# ------------------------------------------------------------------------------------------ always last in a collective


AT_WORK = StackFrame("<module>", 2, cell=3)


def sample(count: int, behind: int | None, ranks: int = 4) -> dict[int, Stack]:
    """Stacks of ranks that are in an all_reduce, but for one that has begun one less."""
    inside = StackFrame("all_reduce", 1, "/lib/torch/distributed/distributed_c10d.py")
    return {
        rank: Stack(
            True,
            (AT_WORK,) if rank == behind else (AT_WORK, inside),
            collectives=count - (rank == behind),
            cpu=float(count),
        )
        for rank in range(ranks)
    }


def last_of(samples: list[dict[int, Stack]]) -> list[int]:
    stall = Stall(30.0, 0.0)
    for number, stacks in enumerate(samples):
        stall.observe([], stacks, 6.0 * number)
    return stall.constant_stragglers


def test_constant_straggler_is_found() -> None:
    assert last_of([sample(10 * n, 2) for n in range(1, LAST_SAMPLES + 2)]) == [2]
    assert last_of([sample(10 * n, 2) for n in range(1, LAST_SAMPLES)]) == [], "not for long enough"
    assert last_of([sample(10 * n, n % 4) for n in range(1, 12)]) == [], "each time another"
    assert last_of([sample(10 * n, 2 if n != 9 else None) for n in range(1, 12)]) == [], (
        "not each time"
    )
    assert last_of([sample(10, 2) for _ in range(11)]) == [], "it does not go on: that is a stall"
    busy = [
        {rank: replace(stack, frames=(AT_WORK,)) for rank, stack in sample(10 * n, 2).items()}
        for n in range(1, 12)
    ]
    assert last_of(busy) == [], "the others work too"


# ------------------------------------------------------------------------------------------ ranks that others have left


def test_rank_alone_in_a_collective_is_named_soon() -> None:
    stall = Stall(30.0, 0.0)
    stall.sample_soon(10.0)  # rank 1 has ended
    assert stall.due is not None
    assert stall.due <= 10.5
    alone = {0: sample(5, None)[0]}
    stall.observe([1], alone, 10.5)
    assert stall.deserted == {}, "it may be on its way through"
    assert stall.due <= 11.5
    stall.observe([1], alone, 11.5)
    assert stall.deserted == {"all_reduce": [0]}
    stall.observe([1], {0: sample(6, None)[0]}, 12.5)
    assert stall.deserted == {}, "a group of its own"


DDP_FORWARD = StackFrame(
    "_distributed_broadcast_coalesced", 2363, "/lib/torch/nn/parallel/distributed.py"
)
BACKWARD = StackFrame("_engine_run_backward", 9, "/lib/torch/autograd/graph.py")


@pytest.mark.parametrize(
    ("frame", "name"),
    [(DDP_FORWARD, "the forward pass of DDP"), (BACKWARD, "a backward pass")],
    ids=["forward", "backward"],
)
def test_a_rank_in_a_pass_of_ddp_that_another_has_left(frame: StackFrame, name: str) -> None:
    stall = Stall(30.0, 0.0)
    alone = {0: Stack(True, (AT_WORK, frame), collectives=5, cpu=1.0)}
    stall.observe([1], alone, 10.5)
    assert stall.deserted == {}
    stall.observe([1], alone, 11.5)
    assert stall.deserted == {name: [0]}
    busy = {0: replace(alone[0], cpu=1.9)}
    stall.observe([1], busy, 12.5)
    assert stall.deserted == ({name: [0]} if frame is DDP_FORWARD else {}), "a pass that computes"


def in_collectives(*names: str) -> dict[int, Stack]:
    """Stacks of ranks that are in these collectives; "" for one that computes."""
    file = "/lib/torch/distributed/distributed_c10d.py"
    return {
        rank: Stack(
            True,
            (
                StackFrame("<module>", 4 + rank, cell=3),
                *([StackFrame(name, 1, file)] if name else []),
            ),
            collectives=7,
            cpu=1.0,
        )
        for rank, name in enumerate(names)
    }


def test_ranks_in_different_collectives_are_named_soon(golden: Golden) -> None:
    stall = Stall(30.0, 0.0)
    apart = in_collectives("all_reduce", "broadcast", "all_reduce")
    stall.observe([], apart, 1.0)
    assert stall.apart == {}, "they may be on their way through"
    assert stall.due == 2.0
    stall.observe([], apart, 2.0)
    assert stall.apart == {"all_reduce": [0, 2], "broadcast": [1]}
    golden(diverged_text(stall.apart))
    stall.observe([], in_collectives("all_reduce", "all_reduce", "all_reduce"), 3.0)
    assert stall.apart == {}, "they go on"
    for one in (
        in_collectives("all_reduce", "broadcast", ""),
        in_collectives("barrier", "barrier"),
    ):
        stall.observe([], one, 4.0)
        stall.observe([], one, 5.0)
        assert stall.apart == {}, "one is on its way, or all are in the same"


def test_ranks_that_wait_for_those_that_have_ended_in_words(golden: Golden) -> None:
    golden(deserted_text({"all_reduce": [0]}, [1]))
    assert (
        deserted_text({"barrier": [0, 2, 3]}, [1, 4])
        == "ranks 0, 2, 3 wait in barrier, ranks 1, 4 have ended"
    )
    assert deserted_text({"barrier": [0]}, [0, 1]) == ""
    assert deserted_text({}, [1]) == ""


def failed(*, interrupted: bool = False, freed: bool = False) -> Outcome:
    return Outcome(failure=Failure("ValueError", "", freed=freed), interrupted=interrupted)


def test_own_failures_are_distinguished_from_stopped_ranks() -> None:
    ranks = {
        0: RankRun(outcome=failed()),
        1: RankRun(
            outcome=failed(), stopped=True
        ),  # its own error was on its way when it was interrupted
        2: RankRun(outcome=failed(interrupted=True), stopped=True),
        3: RankRun(outcome=failed(freed=True), stopped=True),
        4: RankRun(outcome=Outcome()),
    }
    assert failed_ranks(Report(ranks)) == (0, 1)
