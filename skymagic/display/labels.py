"""Text of several ranks on one screen: labelled lines in order, open lines redrawn in place.

::

    rank 0  ──▶ OpenLine ── ended lines ──────────────────▶ the notebook's stdout, stderr
    rank 1  ──▶ OpenLine ── lines open for a while ─▶ LabelBlock: one display, a line per rank,
                                                      until these lines have ended
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from skymagic.display.live import Area, Write
from skymagic.display.terminal import Key, OpenLine

DELAY = 0.2
"""Seconds that a line must be open before it is shown: most lines are complete sooner."""
INTERVAL = 0.1
"""Seconds between two refreshes of open lines."""
MAX_SHOWN_CHARS = 1000
"""Maximum number of characters shown of an open line, from its end."""


@dataclass
class LabelBlock:
    """Lines of ranks that were open at the same time, in rank order; ended lines remain."""

    area: Area = field(default_factory=Area)
    ended: dict[Key, list[str]] = field(default_factory=dict)
    open: dict[Key, str] = field(default_factory=dict)
    """Open lines of the streams that are still in the block; "" for an erased bar."""

    def draw(self) -> None:
        """Show its current state."""
        keys = sorted(self.ended.keys() | self.open.keys())
        lines = [
            line for key in keys for line in [*self.ended.get(key, ()), self.open.get(key, "")]
        ]
        self.area.draw("\n".join(filter(None, lines)))


class Labels:
    """Output of several ranks: ``[rank]`` before each line, lines of different ranks never mixed.

    A line that stays open, such as a progress bar or dots, is shown in a block that is redrawn,
    with a line per rank; once ended, it remains there in its final state. Without such blocks it is
    shown when it ends, or when the run does.

    Args:
        ranks: the displayed ranks; a single rank needs no label, and its text passes unchanged
            except for bars.
        put: receives finished text.
        redraws: True if shown text can be redrawn; open lines are then shown in blocks.
    """

    def __init__(self, ranks: Sequence[int], put: Write, redraws: bool = False) -> None:
        self._put = put
        self._redraws = redraws
        self._labelled = len(ranks) > 1
        self._width = len(str(max(ranks, default=0)))
        self._open: dict[Key, OpenLine] = {}
        self._blocks: dict[Key, LabelBlock] = {}
        """Block that shows each open line."""
        self._newest: LabelBlock | None = None
        self._last_refresh = 0.0

    def text(self, rank: int, name: str, text: str) -> None:
        """Process text of a rank's stream."""
        now = time.monotonic()
        key = (rank, name)
        line = self._open.get(key)
        if not self._labelled and (line is None or line.blank) and not self._is_bar(text):
            self._end([key] if line is not None else [])
            self._put(name, text)
            return
        if line is None:
            line = self._open[key] = OpenLine(now)
        self._write(key, line.feed(text, now))

    def _is_bar(self, text: str) -> bool:
        """Return True if a single rank's text is a bar that has to be redrawn.

        A terminal shows it unchanged.
        """
        return self._redraws and "\r" in text.replace("\r\n", "\n")

    def refresh(self) -> None:
        """Show open lines. Called often."""
        now = time.monotonic()
        if now - self._last_refresh < INTERVAL:
            return
        self._last_refresh = now
        if self._redraws:
            for key in sorted(self._open):
                self._show_in_block(key, self._open[key], now)
            for block in {id(block): block for block in self._blocks.values()}.values():
                block.draw()

    def before_rich(self, rank: int) -> None:
        """End a rank's open lines before its rich output."""
        self._end([key for key in self._open if key[0] == rank])

    def before_note(self) -> None:
        """End open lines that are not in a block before a line of another kind."""
        self._end([key for key in self._open if key not in self._blocks])

    def on_cleared(self) -> None:
        """Forget all blocks after the output was cleared; open lines are shown in new ones."""
        self._blocks.clear()
        self._newest = None

    def finish(self) -> None:
        """Show lines that never ended, once the run is over."""
        self._end(list(self._open))

    def _end(self, keys: Sequence[Key]) -> None:
        for key in sorted(keys):
            self._write(key, self._open.pop(key).end())
            self._leave_block(key)

    def _write(self, key: Key, lines: Sequence[str]) -> None:
        """Write ended lines of a stream; a line that a block shows remains there."""
        rank, name = key
        labelled = [self._line(rank, line) for line in lines]
        if labelled and key in self._blocks:
            self._leave_block(key, labelled.pop(0))
        if labelled:
            self._put(name, "".join(f"{line}\n" for line in labelled))

    def _leave_block(self, key: Key, line: str = "") -> None:
        """End the stream's line in its block, if it has one; it remains there as `line`."""
        block = self._blocks.pop(key, None)
        if block is not None:
            del block.open[key]
            block.ended.setdefault(key, []).append(line)
            block.draw()

    def _show_in_block(self, key: Key, line: OpenLine, now: float) -> None:
        """Show the current text of an open line in its block."""
        text = line.text
        block = self._blocks.get(key)
        if block is None:
            if line.blank or now - line.since < DELAY or len(text) > MAX_SHOWN_CHARS:
                return
            block = self._blocks[key] = self._block_for(key)
        shown = text if len(text) <= MAX_SHOWN_CHARS else f"…{text[-MAX_SHOWN_CHARS:]}"
        block.open[key] = "" if line.blank else self._line(key[0], shown)

    def _block_for(self, key: Key) -> LabelBlock:
        """Return the newest block if it has open lines and none of this stream, else a new one.

        A new block is placed below all output.
        """
        newest = self._newest
        if newest is None or not newest.open or key in newest.ended:
            newest = self._newest = LabelBlock()
        return newest

    def _line(self, rank: int, line: str) -> str:
        return f"[{rank:>{self._width}}] {line}" if self._labelled else line
