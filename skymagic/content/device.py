"""Copy GPU memory to the host: double buffering with pinned buffers on a separate CUDA stream.

While one buffer is written and hashed, the next one is filled::

    GPU ──copy on a side stream──▶ pinned buffer 0 ─┐
                                   pinned buffer 1 ─┴─▶ hash, file of a store

torch is never imported here: if there is GPU memory, it is loaded already.
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

STAGING_BYTES = 64 << 20
"""Size of each pinned buffer: large enough for copies at full bus speed."""


class DeviceBytes:
    """Bytes on a device that are copied only when they are read.

    They have no buffer protocol, so that reading them by mistake raises.

    Args:
        memory: one-dimensional uint8 tensor on the device.
        versions: torch's version counters of the tensors with this memory; more may be added. None
            stands for a tensor without a counter.
    """

    def __init__(self, memory: Any, versions: list[int | None]) -> None:
        self.memory = memory
        self.versions = versions

    def __len__(self) -> int:
        return int(self.memory.numel())

    def __bytes__(self) -> bytes:
        return bytes(self.read())

    @property
    def address_range(self) -> tuple[int, int]:
        """Address on the device, and length in bytes."""
        return int(self.memory.data_ptr()), len(self)

    def read(self) -> memoryview:
        """Return a copy in host memory."""
        copy = memoryview(bytearray(len(self)))
        done = 0
        for piece in host_pieces([self]):
            copy[done : done + piece.nbytes] = piece
            done += piece.nbytes
        return copy

    @functools.cached_property
    def fingerprint(self) -> tuple[object, ...] | None:
        """Value that changes when the contents do, computed on first access without copying them.

        It consists of the address, version counters, and sums computed by the device. Version
        counters miss writes through `.data` and by custom kernels. Sums of rows and of columns,
        with the memory as a matrix of words, detect those; sums of rows alone would miss some
        permutations. None if it cannot be computed.
        """
        torch = sys.modules["torch"]
        word_count, offset = len(self) // 8, self.memory.storage_offset()
        # Not computable: a tensor without a counter, or memory that is no matrix of aligned words.
        if None in self.versions or word_count < 4 or offset % 8:
            return None
        width = math.isqrt(word_count)
        square = (
            self.memory[: word_count * 8]
            .view(torch.int64)[: word_count // width * width]
            .view(-1, width)
        )
        remainder = self.memory[square.numel() * 8 :].to(torch.int64)
        sums = torch.cat([square.sum(0), square.sum(1), remainder]).cpu()
        address = sums.data_ptr()
        return (
            *self.address_range,
            tuple(self.versions),
            ctypes.string_at(address, sums.numel() * 8),
        )


class _Placeholder(bytearray):
    """Placeholder in a pickle stream for bytes on a device."""

    def __init__(self, data: DeviceBytes) -> None:
        super().__init__(1)
        self.data = data


def placeholder_buffer(data: DeviceBytes) -> pickle.PickleBuffer:
    """Return a buffer for the pickler that stands for a device's bytes; see `device_bytes_of`."""
    return pickle.PickleBuffer(_Placeholder(data))


def device_bytes_of(buffer: memoryview) -> DeviceBytes | None:
    """Return the device's bytes that a pickled buffer stands for, or None for host memory."""
    return buffer.obj.data if isinstance(buffer.obj, _Placeholder) else None


def host_pieces(
    pieces: Iterable[bytes | bytearray | memoryview | DeviceBytes],
) -> Iterator[memoryview]:
    """Iterate over all pieces as host memory.

    A piece from a device is valid until the next one is requested. The copy of a chunk starts
    before the previous chunk is yielded, so two buffers suffice.
    """
    staging: _Staging | None = None
    finish_previous: Callable[[], memoryview] | None = None
    try:
        for piece in pieces:
            if not isinstance(piece, DeviceBytes):
                if finish_previous is not None:
                    yield finish_previous()
                    finish_previous = None
                yield memoryview(piece).cast("B")
                continue
            # Buffers belong to one device; a pickle may hold memory of several.
            if staging is None or staging.device != piece.memory.device:
                if finish_previous is not None:
                    yield finish_previous()
                    finish_previous = None
                staging = _Staging(piece.memory)
            for start in range(0, len(piece), STAGING_BYTES):
                finish = staging.begin(piece.memory[start : start + STAGING_BYTES])
                if finish_previous is not None:
                    yield finish_previous()
                finish_previous = finish
        if finish_previous is not None:
            yield finish_previous()
    finally:
        if staging is not None:
            staging.end()  # the device's memory may be freed after this


class _Staging:
    """Two host buffers that are filled alternately from one device.

    With CUDA they are pinned and filled on a separate stream. From any other device each copy is
    synchronous.
    """

    def __init__(self, memory: Any) -> None:
        self._torch = torch = sys.modules["torch"]
        self.device = memory.device
        self._buffers: list[Any] = [None, None]
        self._turn = 0
        self._pinned = self.device.type == "cuda" and torch.cuda.is_available()
        self._stream = torch.cuda.Stream(self.device) if self._pinned else None
        if self._stream is not None:
            # Kernels that were queued so far may still write to the memory.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def begin(self, chunk: Any) -> Callable[[], memoryview]:
        """Start copying a chunk, and return a function that waits for the copy."""
        # The other buffer may still be read by the caller.
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

        def finish() -> memoryview:
            if event is not None:
                event.synchronize()
            # The view does not keep `target` alive, but `_buffers` does.
            return memoryview((ctypes.c_ubyte * nbytes).from_address(target.data_ptr())).cast("B")

        return finish

    def end(self) -> None:
        """Wait for the copies that were started."""
        if self._stream is not None:
            self._stream.synchronize()

    def _buffer(self, nbytes: int) -> Any:
        """Return the buffer whose turn it is, replaced if it is too small.

        Replacing it is cheap: torch reuses pinned memory that was freed.
        """
        if self._buffers[self._turn] is None or self._buffers[self._turn].numel() < nbytes:
            size = min(STAGING_BYTES, 1 << max(nbytes - 1, 1).bit_length())
            self._buffers[self._turn] = self._torch.empty(
                size, dtype=self._torch.uint8, pin_memory=self._pinned
            )
        return self._buffers[self._turn]
