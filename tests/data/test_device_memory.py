"""Bytes of a GPU's tensors are copied once, where they are sent from, and not at all where nothing is sent."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from skymagic.content import device  # noqa: E402
from skymagic.content.chunks import digest  # noqa: E402
from skymagic.content.store import NodeStore  # noqa: E402
from skymagic.data.bundle import read_parts, write_parts  # noqa: E402
from skymagic.data.values import pickling, shards  # noqa: E402
from skymagic.data.values.contents import contents_hash  # noqa: E402
from skymagic.data.values.forms import form_for  # noqa: E402
from skymagic.wire.values import PackedValue  # noqa: E402
from tests.data.far import Notebook  # noqa: E402
from tests.lab.device_memory import DeviceMemory, device_memory  # noqa: E402


@pytest.fixture
def gpu() -> Iterator[DeviceMemory]:
    with device_memory() as memory:
        yield memory


@pytest.fixture
def store(tmp_path: Path) -> NodeStore:
    return NodeStore(tmp_path / "store")


def travelled(value: Any, store: NodeStore) -> Any:
    """The value after it went through a store's file, as from a rank to the notebook."""
    pickled = pickling.dumps(value, {})
    name, locations = write_parts([*pickled.pieces, *pickled.buffers], store.give)
    count = len(pickled.pieces)
    view = store.take(name) if name is not None else memoryview(b"")
    parts = PackedValue(tuple(locations[:count]), tuple(locations[count:]))
    header, buffers = read_parts(parts, lambda number: view)
    return pickling.loads(header, buffers, {})


def weights(module: Any) -> int:
    return sum(each.nbytes for each in module.parameters())


def test_a_model_is_copied_once_and_not_when_it_is_searched(
    gpu: DeviceMemory, store: NodeStore
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.Linear(500, 500))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    gpu.put_module(model)
    pickling.dumps(model, {}, parts=shards.Search())
    pickling.dumps(model.state_dict(), {})
    assert gpu.since() == 0
    back = travelled(model.state_dict(), store)
    assert gpu.since() == weights(model)
    assert all(torch.equal(back[name], value) for name, value in expected.items())


def test_of_a_flat_buffer_only_the_part_that_is_sent_is_copied(
    gpu: DeviceMemory, store: NodeStore
) -> None:
    flat = torch.randn(4_000_000)
    expected = flat.clone()
    gpu.put(flat)
    quarters = [flat[start : start + 1_000_000] for start in range(0, 4_000_000, 1_000_000)]
    back = travelled(quarters[2], store)
    assert gpu.since() <= quarters[2].nbytes + 16
    assert torch.equal(back, expected[2_000_000:3_000_000])
    together = travelled(quarters, store)
    assert gpu.since() == flat.nbytes
    assert torch.equal(torch.cat(together), expected)
    assert len({each.untyped_storage().data_ptr() for each in together}) == 1


def test_tied_weights_are_copied_once_and_stay_tied(gpu: DeviceMemory, store: NodeStore) -> None:
    one, two = torch.nn.Linear(400, 400), torch.nn.Linear(400, 400)
    two.weight = one.weight
    gpu.put_module(one)
    gpu.put(two.bias)
    back = travelled([one, two], store)
    assert gpu.since() == weights(one) + two.bias.nbytes
    assert back[0].weight is back[1].weight


def test_cloned_device_memory_returns_to_the_device(gpu: DeviceMemory) -> None:
    data = torch.arange(100_000.0)
    expected = data.clone()
    gpu.put(data)
    pickled = pickling.dumps(data, {}, between_ranks=True)
    assert gpu.since() == 0
    assert b"_device_storage" in pickled.header
    assert bytes(pickled.buffers[0]) == expected.numpy().tobytes()


@pytest.mark.parametrize("stage", [8, 1000, 1 << 20])
def test_host_and_device_pieces_keep_their_order(
    gpu: DeviceMemory, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setattr(device, "STAGING_BYTES", stage)
    data = torch.randint(0, 255, (10_000,), dtype=torch.uint8)
    raw = data.numpy().tobytes()
    gpu.put(data)
    pieces: list[bytes | memoryview | device.DeviceBytes] = [
        b"begin", device.DeviceBytes(data[:3333], []), device.DeviceBytes(data[3333:3334], []), b"between",
        memoryview(b"more"), device.DeviceBytes(data[3334:], []), b"end",
    ]  # fmt: skip
    written = b"".join(bytes(each) for each in device.host_pieces(pieces))
    assert written == b"begin" + raw[:3334] + b"betweenmore" + raw[3334:] + b"end"
    assert digest(pieces) == digest([written])


def test_contents_are_the_same_wherever_they_lie(gpu: DeviceMemory) -> None:
    def contents(value: Any) -> str:
        return contents_hash(value, pickling.reducer({}), form_for, lambda memory: None)

    on_host = torch.arange(50_000.0)
    on_device = on_host.clone()
    gpu.put(on_device)
    assert contents(on_device) == contents(on_host)


def test_reading_a_devices_memory_by_mistake_raises(gpu: DeviceMemory) -> None:
    data = torch.zeros(10)
    gpu.put(data)
    with pytest.raises(TypeError):
        memoryview(device.DeviceBytes(data, []))  # type: ignore[arg-type]


NOTEBOOK = "import torch; model = torch.nn.Linear(1000, 1000); order = torch.randperm(300_000)"


@pytest.fixture
def notebook(tmp_path: Path, gpu: DeviceMemory) -> Iterator[Notebook]:
    made = Notebook(tmp_path)
    made.here(NOTEBOOK)
    gpu.put_module(made.namespace["model"])
    gpu.put(made.namespace["order"])
    yield made
    made.close()


def sums(notebook: Notebook) -> list[float]:
    notebook.there("seen = [model.weight.sum().item(), order[:1000].sum().item()]")
    return list(notebook.ranks[0].eval("seen"))


def expected_sums(notebook: Notebook) -> list[float]:
    model, order = notebook.namespace["model"], notebook.namespace["order"]
    return [model.weight.sum().item(), order[:1000].sum().item()]


SMALL_PARTS = 2 * 1000 * 4
"""The bias, which is copied with each cell, once for each hash of it: as fast as asking whether it has changed."""


def test_model_is_copied_if_only_the_notebook_changed_it(
    notebook: Notebook, gpu: DeviceMemory
) -> None:
    nbytes = weights(notebook.namespace["model"]) + notebook.namespace["order"].nbytes
    assert sums(notebook) == expected_sums(notebook)
    assert gpu.since() <= nbytes + SMALL_PARTS
    assert sums(notebook) == expected_sums(notebook)
    assert gpu.since() <= SMALL_PARTS


@pytest.mark.parametrize(
    "change",
    [
        "with torch.no_grad(): model.weight.add_(1)",
        "model.weight.data.mul_(2)",  # torch's version counter does not see it
        "order.data.copy_(order.flip(0))",  # nor this, which leaves the sum of all elements as it is
        "order = torch.randperm(300_000)",
    ],
)
def test_changes_of_a_devices_memory_are_seen(
    notebook: Notebook, gpu: DeviceMemory, change: str
) -> None:
    sums(notebook)
    gpu.since()
    notebook.here(change)
    gpu.put(notebook.namespace["order"])
    assert sums(notebook) == expected_sums(notebook)
    changed = (
        notebook.namespace["model"].weight if "model" in change else notebook.namespace["order"]
    )
    assert gpu.since() <= changed.nbytes + SMALL_PARTS


class Part:
    """Stands for a DTensor: how many of the tensors that it and others were gathered to are alive."""

    made: ClassVar[list[weakref.ref[Any]]] = []
    most: ClassVar[int] = 0
    device_mesh: ClassVar[Any] = SimpleNamespace(device_type="cuda", get_all_groups=list)

    def __init__(self, gpu: DeviceMemory, value: float) -> None:
        self.gpu, self.value, self.grad = gpu, value, None

    def detach(self) -> Part:
        return self

    def full_tensor(self) -> Any:
        whole = torch.full((10, 10), self.value)
        self.gpu.put(whole)
        Part.made.append(weakref.ref(whole))
        Part.most = max(Part.most, sum(each() is not None for each in Part.made))
        return whole


@pytest.mark.parametrize("sender", [True, False])
def test_gpu_holds_one_whole_tensor_of_sharded_values(gpu: DeviceMemory, sender: bool) -> None:
    Part.made, Part.most = [], 0
    parts = [Part(gpu, float(number)) for number in range(5)]
    gathered: dict[int, Any] = {}
    shards._gather([*parts, parts[0]], gathered, keep=sender)
    assert (len(Part.made), Part.most) == (5, 1)
    assert not any(each() is not None for each in Part.made)
    assert gpu.since() == (5 * 400 if sender else 0)
    values = [gathered[id(each)] for each in parts] if sender else []
    assert [(each.shape, each.mean().item(), gpu.has(each)) for each in values] == [
        ((10, 10), float(number), False) for number in range(5 * sender)
    ]
