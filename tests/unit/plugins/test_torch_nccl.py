"""NCCL's side of a failure, with stand-ins for its communicators: variables, the order of what is freed, what is compared."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from skymagic.wire.queries import Stack, StackFrame

torch = pytest.importorskip("torch")

from skymagic.display import text  # noqa: E402
from skymagic.kernels.rank import gpu  # noqa: E402
from skymagic.plugins._torch import carryover, groups, membership, unblock  # noqa: E402
from skymagic.runtime import rendezvous  # noqa: E402
from tests.lab.golden import Golden  # noqa: E402


class Communicator:
    """Notes what is done to it, and on which thread."""

    def __init__(
        self,
        name: str,
        events: list[str],
        fails: bool = False,
        until: threading.Event | None = None,
    ) -> None:
        self.name, self.events, self.fails, self.until = name, events, fails, until

    def _group_start(self) -> None:
        self.events.append("start")

    def _group_end(self) -> None:
        self.events.append("end")

    def abort(self) -> None:
        if self.until is not None:
            self.until.wait(30)
        self.events.append(f"abort {self.name}")
        if self.fails:
            raise RuntimeError("unhandled system error")


def test_all_communicators_are_aborted_as_one_operation() -> None:
    events: list[str] = []
    unblock.abort_all([Communicator("a", events, fails=True), Communicator("b", events)])
    assert events == ["start", "abort a", "abort b", "end"]


def test_abort_is_awaited_only_to_form_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    done = threading.Event()
    monkeypatch.setattr(unblock, "_backends", lambda: [Communicator("a", events, until=done)])
    group = groups.Group(None)
    started = group._aborts.begin

    def begin() -> int:
        events.append("begin")
        return started()

    monkeypatch.setattr(group._aborts, "begin", begin)
    monkeypatch.setattr(
        group._connections, "shut_down", lambda: len(events.__iadd__(["sockets"])[:2])
    )
    assert group.free() == 3
    assert group.free() == 3
    ours = [event for event in events if event in ("begin", "sockets")]
    assert ours == ["begin", "sockets"] * 2
    assert "abort a" not in events
    waiting = threading.Thread(target=group._aborts.wait)
    waiting.start()
    while not rendezvous.is_waiting():  # a slow abort is not a rank that hangs
        pass
    done.set()
    waiting.join()
    assert [event for event in events if event not in ours] == ["start", "abort a", "end"]  # once


def test_variables_that_the_user_has_not_set() -> None:
    environment = {"TORCH_NCCL_ENABLE_MONITORING": "1", "NCCL_ASYNC_ERROR_HANDLING": "1"}
    unblock.set_variables(environment, "2.13.0+cpu")
    assert environment == {
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    plain: dict[str, str] = {}
    unblock.set_variables(plain)
    assert plain["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.13.0+cu126", "TORCH_FR_BUFFER_SIZE"),
        ("2.11.0", "TORCH_FR_BUFFER_SIZE"),
        ("3.0.0a0+git1a2b3c", "TORCH_FR_BUFFER_SIZE"),
        ("2.10.1", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("2.4.0+cpu", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    ],
)
def test_flight_recorder_is_set_by_the_name_that_torch_reads(version: str, name: str) -> None:
    environment: dict[str, str] = {}
    unblock.set_variables(environment, version)
    recorder = {key for key in environment if key.endswith("BUFFER_SIZE")}
    assert recorder == {name}
    for own in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        chosen = {own: "5"}
        unblock.set_variables(chosen, version)
        assert {key: value for key, value in chosen.items() if key.endswith("SIZE")} == {own: "5"}


def test_models_are_compared_in_pieces(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(pairs: Any) -> list[dict[int, int]]:
        row = {membership.digest(name): membership.digest(value) for name, value in pairs}
        return [row, before or row]

    made: list[int] = []
    double = torch.Tensor.double

    def counted(tensor: Any) -> Any:
        made.append(tensor.numel() * 8)
        return double(tensor)

    monkeypatch.setattr(membership, "all_gather_pairs", told)
    monkeypatch.setattr(torch.Tensor, "double", counted)
    model = torch.nn.Linear(2000, 2000).bfloat16()
    before: dict[int, int] = {}
    assert carryover.differing([model]) == []
    assert max(made) <= 8 << 20 < 2000 * 2000 * 8
    before = told([("Linear", "something else")])[0]
    golden(carryover.differing([model])[0])


def test_where_a_rank_waits_for_a_collective_on_its_gpu(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [
        {"profiling_name": "nccl:broadcast", "state": "completed", "collective_seq_id": 6},
        {"profiling_name": "nccl:all_reduce", "state": "started", "collective_seq_id": 7},
        {"profiling_name": "nccl:all_gather", "state": "scheduled", "collective_seq_id": 8},
    ]

    def dump(includeCollectives: bool, onlyActive: bool) -> str:
        return json.dumps({"entries": entries})

    stack = Stack(True, (StackFrame("<module>", 5, cell=3, code="loss.item()"),))
    assert gpu.with_collective(stack) == stack
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C._distributed_c10d, gpu.RECORDED, dump, raising=False)
    golden(text.positions({0: gpu.with_collective(stack).frames}))
    entries.clear()
    assert gpu.with_collective(stack) == stack
