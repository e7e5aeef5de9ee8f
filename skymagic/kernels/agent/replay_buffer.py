"""Bounded buffers of a rank's output and metrics, for a notebook that is away or takes over.

Of the last run's output, the beginning and the end of what the notebook has not acknowledged are
kept. While the notebook is away, displays and metrics may never end (a live plot), so only the
newest are kept.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from skymagic.wire import agent as wire
from skymagic.wire import metrics
from skymagic.wire.output import (
    Output,
    OutputComplete,
    OutputDisplay,
    OutputRepeated,
    OutputSuppressed,
    OutputText,
)

FIRST_BYTES = 64 << 10
"""Bytes kept of the oldest output that was not acknowledged."""
LAST_BYTES = 1 << 20  # bytes kept of the newest output; a larger display is kept alone


def size_of(output: Output) -> int:
    """Return the size of a piece of output in bytes."""
    return len(output.text) if isinstance(output, OutputText) else len(wire.encode(output))


def cost_of(output: Output, nbytes: int) -> int:
    """Return the credit that a piece of output takes; its end is free."""
    return 0 if isinstance(output, OutputComplete) else nbytes + wire.OUTPUT_COST


class RunBuffer:
    """The output of one request that was sent to a notebook, numbered from 1.

    Args:
        rank: the rank whose output it is.
        request: identity of the request, which all the output carries.

    Attributes:
        count: number of the last piece.
        shown: number of the last piece that a notebook has acknowledged.
    """

    def __init__(self, rank: int, request: str = "") -> None:
        self._rank, self._request = rank, request
        self.count = self.shown = 0
        self._first: deque[tuple[Output, int]] = deque()  # each with its size in bytes
        self._room = FIRST_BYTES
        self._last: deque[tuple[Output, int]] = deque()
        self._nbytes = 0
        self._dropped = self._dropped_bytes = 0
        self.end: OutputComplete | None = None

    def add(self, output: Output) -> Output:
        """Keep a piece of output, and return it with its request, its number and its cost."""
        self.count += 1
        nbytes = size_of(output)
        output = replace(
            output, request=self._request, seq=self.count, cost=cost_of(output, nbytes)
        )
        if isinstance(output, OutputComplete):
            self.end = output
        # once a piece did not fit, all later ones belong to the end
        if not self._last and nbytes <= self._room:
            self._first.append((output, nbytes))
            self._room -= nbytes
            return output
        self._last.append((output, nbytes))
        self._nbytes += nbytes
        while self._nbytes > LAST_BYTES and len(self._last) > 1:
            dropped = self._last.popleft()[1]
            self._nbytes -= dropped
            self._dropped += 1
            self._dropped_bytes += dropped
        return output

    def acknowledge(self, shown: int) -> None:
        """Forget the output up to this number: the user has seen it."""
        # Messages of a notebook that was replaced may arrive late, and are older then.
        self.shown = max(self.shown, shown)
        while self._first and self._first[0][0].seq <= shown:
            self._room += self._first.popleft()[1]
        while self._last and self._last[0][0].seq <= shown:
            self._nbytes -= self._last.popleft()[1]

    def unacknowledged(self, sent: int) -> Iterator[Output]:
        """Yield the output that no notebook has acknowledged.

        Dropped pieces are replaced by a note of their size.

        Args:
            sent: number of the last piece that an earlier notebook has received. Its output up to
                there may have been shown, which the first piece says.
        """
        outputs = [output for output, _ in (*self._first, *self._last)]
        yield from self._warning([output for output in outputs if output.seq <= sent])
        before, displays = self.shown, set[str]()
        for output in outputs:
            if gap := output.seq - before - 1:  # some of what was dropped may have been shown
                nbytes = self._dropped_bytes * gap // self._dropped
                yield OutputSuppressed(
                    self._rank, nbytes, request=self._request, seq=output.seq - 1
                )
            before = output.seq
            yield _with_new_display(output, displays)

    def _warning(self, outputs: list[Output]) -> Iterator[Output]:
        """Yield a warning if any of this output would be visible twice."""
        # a bar that is drawn again replaces itself
        text = "".join(
            output.text
            for output in outputs
            if isinstance(output, OutputText) and ("\r" not in output.text or "\n" in output.text)
        )
        displays = sum(
            isinstance(output, OutputDisplay) and output.kind == "display_data"
            for output in outputs
        )
        if text or displays:
            lines = len(text.splitlines())
            yield OutputRepeated(self._rank, lines, displays, request=self._request)


def _with_new_display(output: Output, displays: set[str]) -> Output:
    """Turn the first update of a display that the notebook does not know into a new display.

    `displays` holds the ids that it knows.
    """
    if not isinstance(output, OutputDisplay):
        return output
    if output.kind == "update_display_data" and output.display_id not in displays:
        output = replace(output, kind="display_data")
    if output.display_id:
        displays.add(output.display_id)
    return output


MAX_DISPLAYS = 20
MAX_DISPLAY_BYTES = 8 << 20
MAX_NUMBERS_BYTES = 4 << 20


class DisplayBuffer:
    """The newest displays of one rank, each in its latest state.

    Attributes:
        missed: displays that were dropped without having been shown.
    """

    def __init__(self) -> None:
        # the oldest first, each with its size in bytes
        self._kept: list[tuple[OutputDisplay, int]] = []
        # ids of dropped displays, which the notebook does not know
        self._unknown: set[str] = set()
        self.missed = 0

    def add(self, display: OutputDisplay) -> None:
        """Keep a display that would have been shown."""
        if display.kind == "clear_output":
            self._kept.clear()
        ident = display.display_id
        older = next(
            (i for i, (kept, _) in enumerate(self._kept) if ident and kept.display_id == ident),
            None,
        )
        if older is not None:  # keeps its position and its kind
            display = replace(display, kind=self._kept[older][0].kind)
            self._kept[older] = display, len(wire.encode(display))
        else:
            if ident in self._unknown and display.kind == "update_display_data":
                display = replace(display, kind="display_data")
            self._kept.append((display, len(wire.encode(display))))
        while len(self._kept) > MAX_DISPLAYS or (
            len(self._kept) > 1 and sum(nbytes for _, nbytes in self._kept) > MAX_DISPLAY_BYTES
        ):
            dropped, _ = self._kept.pop(0)
            self.missed += dropped.kind != "clear_output"
            if dropped.kind == "display_data":
                self._unknown.add(dropped.display_id)

    def take(self) -> list[OutputDisplay]:
        """Return all kept displays and forget them."""
        displays, self._kept = [display for display, _ in self._kept], []
        return displays


class MetricsBuffer:
    """The newest metrics of one rank, at most `MAX_NUMBERS_BYTES` of them.

    Attributes:
        dropped: number of oldest rows that were dropped.
    """

    def __init__(self) -> None:
        self._rows: metrics.Rows = {}
        self.dropped = 0

    def add(self, batches: Iterable[metrics.MetricBatch]) -> None:
        """Keep rows that the notebook would have received."""
        for names, rows in metrics.unpacked(batches):
            if metrics.imported_module(names) is not None:
                continue  # it describes the rank's present state only
            if names == metrics.USAGE:  # each row sums up those before it
                self._rows[names] = rows
            else:
                self._rows.setdefault(names, array("d")).extend(rows)
        while (excess := self._nbytes() - MAX_NUMBERS_BYTES) > 0:
            self._drop_oldest(excess)

    def _nbytes(self) -> int:
        return sum(rows.itemsize * len(rows) for rows in self._rows.values())

    def _drop_oldest(self, nbytes: int) -> None:
        """Drop the oldest rows of the longest table; slowly growing tables stay complete."""
        names, rows = max(self._rows.items(), key=lambda item: len(item[1]))
        width = metrics.FIXED + len(names)
        count = min(-(-nbytes // (rows.itemsize * width)), len(rows) // width)
        del rows[: count * width]
        self.dropped += count
        if not rows:
            del self._rows[names]

    @property
    def batches(self) -> tuple[metrics.MetricBatch, ...]:
        """Kept rows, packed for the wire."""
        return metrics.packed(self._rows)
