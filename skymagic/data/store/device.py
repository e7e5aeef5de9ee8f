"""Memory of a GPU on its way into host memory: double buffering with pinned buffers, on a CUDA stream of its own.

While one buffer is written and hashed, the next is filled::

    GPU ──copy on a side stream──▶ pinned buffer 0 ─┐
                                   pinned buffer 1 ─┴─▶ hash, file of a store

torch is never imported here: memory of a GPU has brought it in.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

STAGE = 64 << 20
"""Bytes of each pinned buffer: large enough that the copies run at the bus's full speed."""


class DeviceBytes:
    """Bytes on a device, copied only when somebody reads them. No buffer protocol: reading them by mistake raises.

    Args:
        memory: a one-dimensional uint8 tensor on the device.
        versions: torch's version counters of the tensors that look at this memory; more may be added. None: not counted.
    """

    def __init__(self, memory: Any, versions: list[int | None]) -> None:
        self.memory = memory
        self.versions = versions

    def __len__(self) -> int:
        return int(self.memory.numel())

    def __bytes__(self) -> bytes:
        return bytes(self.read())

    @property
    def place(self) -> tuple[int, int]:
        """Address and length."""
        return int(self.memory.data_ptr()), len(self)

    def read(self) -> memoryview:
        """A copy in host memory."""
        copy = memoryview(bytearray(len(self)))
        done = 0
        for piece in host_pieces([self]):
            copy[done : done + piece.nbytes] = piece
            done += piece.nbytes
        return copy

    @functools.cached_property
    def mark(self) -> tuple[object, ...] | None:
        """When it was asked for first; changes when the contents do, without copying them: address, version counters, and sums that the device makes.

        Version counters miss writes through ``.data`` and by custom kernels. Sums of rows and of columns of the memory as a
        matrix of words see those; sums of rows alone would miss a new permutation. None: it cannot be said.
        """
        torch = sys.modules["torch"]
        words, offset = len(self) // 8, self.memory.storage_offset()
        if None in self.versions or words < 4 or offset % 8:
            return None
        width = math.isqrt(words)
        square = (
            self.memory[: words * 8].view(torch.int64)[: words // width * width].view(-1, width)
        )
        rest = self.memory[square.numel() * 8 :].to(torch.int64)
        sums = torch.cat([square.sum(0), square.sum(1), rest]).cpu()
        address = sums.data_ptr()
        return *self.place, tuple(self.versions), ctypes.string_at(address, sums.numel() * 8)


class _StandIn(bytearray):
    """What a pickle stream refers to in place of a device's bytes."""

    def __init__(self, of: DeviceBytes) -> None:
        super().__init__(1)
        self.of = of


def out_of_band(data: DeviceBytes) -> pickle.PickleBuffer:
    """For the pickler: a buffer from which `behind` finds the device's bytes."""
    return pickle.PickleBuffer(_StandIn(data))


def behind(buffer: memoryview) -> DeviceBytes | None:
    """The device's bytes that a pickled buffer stands for; None for memory of the host."""
    return buffer.obj.of if isinstance(buffer.obj, _StandIn) else None


def host_pieces(
    pieces: Iterable[bytes | bytearray | memoryview | DeviceBytes],
) -> Iterator[memoryview]:
    """All pieces as memory of the host; a piece of a device's is valid until the next one is asked for.

    A chunk's copy begins before the chunk ahead of it is handed out, so that two buffers suffice.
    """
    staging: _Staging | None = None
    waiting: Callable[[], memoryview] | None = None
    try:
        for piece in pieces:
            if not isinstance(piece, DeviceBytes):
                if waiting is not None:
                    yield waiting()
                    waiting = None
                yield memoryview(piece).cast("B")
                continue
            if staging is None or staging.device != piece.memory.device:
                if waiting is not None:
                    yield waiting()
                    waiting = None
                staging = _Staging(piece.memory)
            for start in range(0, len(piece), STAGE):
                begun = staging.begin(piece.memory[start : start + STAGE])
                if waiting is not None:
                    yield waiting()
                waiting = begun
        if waiting is not None:
            yield waiting()
    finally:
        if staging is not None:
            staging.end()  # memory of the device may be freed from here on


class _Staging:
    """Two buffers of the host, filled in turn from one device.

    Pinned, and on a stream of its own, where CUDA is; from any other device a copy is made at once.
    """

    def __init__(self, memory: Any) -> None:
        self._torch = torch = sys.modules["torch"]
        self.device = memory.device
        self._buffers: list[Any] = [None, None]
        self._turn = 0
        self._pinned = self.device.type == "cuda" and torch.cuda.is_available()
        self._stream = torch.cuda.Stream(self.device) if self._pinned else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def begin(self, chunk: Any) -> Callable[[], memoryview]:
        """Start copying a chunk; returns what waits for the copy."""
        self._turn = 1 - self._turn
        nbytes = chunk.numel()
        target = self._buffer(nbytes)[:nbytes]
        with (
            self._torch.cuda.stream(self._stream)
            if self._stream is not None
            else contextlib.nullcontext()
        ):
            target.copy_(chunk, non_blocking=self._pinned)
            event = self._stream.record_event() if self._stream is not None else None

        def finished() -> memoryview:
            if event is not None:
                event.synchronize()
            return memoryview((ctypes.c_ubyte * nbytes).from_address(target.data_ptr())).cast("B")

        return finished

    def end(self) -> None:
        """Wait for what was begun."""
        if self._stream is not None:
            self._stream.synchronize()

    def _buffer(self, nbytes: int) -> Any:
        """This turn's buffer; torch keeps pinned memory that is let go of, and gives it again."""
        if self._buffers[self._turn] is None or self._buffers[self._turn].numel() < nbytes:
            size = min(STAGE, 1 << max(nbytes - 1, 1).bit_length())
            self._buffers[self._turn] = self._torch.empty(
                size, dtype=self._torch.uint8, pin_memory=self._pinned
            )
        return self._buffers[self._turn]
