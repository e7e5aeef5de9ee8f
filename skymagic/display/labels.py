"""Text of several ranks on one screen: a label before each line, lines in order, and open lines redrawn in their place.

::

    rank 0  ──▶ Terminal ── lines that ended ─────────────▶ the notebook's stdout, stderr
    rank 1  ──▶ Terminal ── lines open for a while ─▶ Block: one display, a line per rank, until these lines have ended

Of many ranks, lines that are the same become one on their way there (`folding`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from skymagic.display.folding import MANY, Folded, Folding
from skymagic.display.live import Write
from skymagic.plan.units import rank_words

CONTROLS = re.compile(r"(\n|\r|\x1b\[A)")
UP = "\x1b[A"
DELAY = 0.2
"""Seconds that a line must be open before it is shown: most lines are whole sooner."""
HOLD = 0.05
"""Seconds without text after which a bar above the cursor has ended: nested bars go down a line and come up again."""
INTERVAL = 0.1
"""Seconds between two looks at what is open."""
LONGEST = 1000
"""Characters of an open line that are shown at most: its end."""
MAX_HELD = 20
"""Lines that wait until a bar above them has ended."""

Key = tuple[int, str]
"""A rank and the name of its stream."""


class Drawable(Protocol):
    """Where a block is shown; see `live.Area`."""

    def draw(self, text: str) -> None:
        """Show this instead of what was shown before."""


@dataclass
class Row:
    """A line on its way."""

    text: str = ""
    redrawn: bool = False
    """It is a bar: written over with a carriage return."""

    @property
    def blank(self) -> bool:
        """Nothing is to be seen of it."""
        return not self.text.strip()


class Terminal:
    """What a terminal would show of the text of one stream that has not ended: rows, and a cursor that bars move. Pure."""

    def __init__(self, now: float) -> None:
        self.rows = [Row()]
        self.since = now
        """When the first row began."""
        self.touched = now
        self.shown = 0
        """How many of the rows a block shows."""
        self._at = 0
        self._over = False
        """The next text replaces what stands in the row."""

    def feed(self, text: str, now: float) -> None:
        """Take text."""
        if not self.open:
            self.since = now
        self.touched = now
        for piece in CONTROLS.split(text):
            row = self.rows[self._at]
            if piece == "\n":
                self._at += 1
                if self._at == len(self.rows):
                    self.rows.append(Row())
                self._over = True
            elif piece == "\r":
                row.redrawn = self._over = True
            elif piece == UP:
                self._at = max(0, self._at - 1)
            elif piece:
                row.text = piece if self._over else row.text + piece
                self._over = False

    def take(self, *, all: bool = False) -> list[str]:
        """The rows that have ended, which are those above the cursor; of bars and what is below them only with `all`."""
        count = self._at
        if not all and count < MAX_HELD:
            count = next((index for index, row in enumerate(self.rows[:count]) if row.redrawn), count)
        taken, self.rows = self.rows[:count], self.rows[count:]
        self._at -= count
        if taken:
            self.since = self.touched
        return [row.text for row in taken]

    def end(self) -> list[str]:
        """All rows, at the end; a bar that was wiped away leaves none."""
        taken, self.rows, self._at = self.rows, [Row()], 0
        while taken and taken[-1].blank and (taken[-1].redrawn or not taken[-1].text):
            taken.pop()
        return [row.text for row in taken]

    def wiped(self) -> str:
        """What makes a terminal that shows these rows show blanks in their place, the cursor at the first."""
        blank = "\n".join(f"\r{' ' * len(row.text)}" for row in self.rows)
        return UP * self._at + blank + UP * (len(self.rows) - 1) + "\r"

    def repainted(self) -> str:
        """What makes a terminal show these rows, and puts its cursor where it is."""
        text = "\n".join(row.text for row in self.rows) + UP * (len(self.rows) - 1 - self._at)
        return text + "\r" * (self._over and self.rows[self._at].redrawn)

    @property
    def waiting(self) -> bool:
        """Rows that may have ended wait for more text."""
        return self._at > 0

    @property
    def open(self) -> list[str]:
        """The rows as they are now."""
        rows = [row.text for row in self.rows]
        while rows and not rows[-1].strip():
            rows.pop()
        return rows


@dataclass
class Block:
    """Lines of ranks that were open at the same time, in the order of ranks; each stays when it has ended."""

    area: Drawable
    ended: dict[Key, list[str]] = field(default_factory=dict)
    open: dict[Key, list[str]] = field(default_factory=dict)
    """Of the keys that are in it still."""

    def draw(self) -> None:
        """Show it as it is now."""
        keys = sorted(self.ended.keys() | self.open.keys())
        lines = [line for key in keys for line in [*self.ended.get(key, ()), *self.open.get(key, ())]]
        self.area.draw("\n".join(lines))


class Labels:
    """Puts ``[rank]`` before each line when several ranks are shown; lines of different ranks never mix.

    A line that stays open, such as a progress bar or dots, is shown in a block that is drawn again and again, a line per rank;
    when it has ended, it stays there in its last state. Without such blocks it is shown when it has ended, or when the run has.

    Args:
        ranks: the ranks that are shown; one alone needs no label, and its text passes unchanged.
        put: where finished text goes.
        area: makes the place of a block; None where nothing can be redrawn.
        noun: what the numbers are of.
    """

    def __init__(
        self, ranks: Sequence[int], put: Write, area: Callable[[], Drawable] | None = None, noun: str = "rank"
    ) -> None:
        self._put = put
        self._area = area
        self._noun = noun
        self._folding = Folding(ranks) if len(ranks) >= MANY else None
        self._labelled = len(ranks) > 1
        self._width = len(str(max(ranks, default=0)))
        self._open: dict[Key, Terminal] = {}
        self._blocks: dict[Key, Block] = {}
        """Where an open line is shown."""
        self._newest: Block | None = None
        self._looked = 0.0

    def text(self, rank: int, name: str, text: str) -> None:
        """Take text of a rank's stream."""
        if not self._labelled:
            self._put(name, text)
            return
        now = time.monotonic()
        key = (rank, name)
        terminal = self._open.get(key)
        if terminal is None:
            terminal = self._open[key] = Terminal(now)
        terminal.feed(text, now)
        self._settle(key, terminal.take())

    def refresh(self) -> None:
        """Show what is open; called often."""
        now = time.monotonic()
        if now - self._looked < INTERVAL:
            return
        self._looked = now
        for key, terminal in self._open.items():
            if terminal.waiting and now - terminal.touched >= HOLD:
                self._settle(key, terminal.take(all=True))
        if self._folding is not None:
            self._write(self._folding.due(now))
        if self._area is not None:
            for key in sorted(self._open):
                self._place(key, self._open[key], now)
            for block in {id(block): block for block in self._blocks.values()}.values():
                block.draw()

    def before_rich(self, rank: int) -> None:
        """Rich output of a rank comes: its open lines go first."""
        self._end([key for key in self._open if key[0] == rank])

    def before_note(self) -> None:
        """A line of another kind comes: text that is not in a block goes first."""
        self._end([key for key in self._open if key not in self._blocks])

    def cleared(self) -> None:
        """All that was shown is gone, blocks too: what is open is shown anew."""
        self._blocks.clear()
        self._newest = None

    def finish(self) -> None:
        """The run is over: show lines that never ended."""
        self._end(list(self._open))

    def label(self, rank: int, text: str) -> str:
        """Text behind its rank's label, where there are several; each of its lines."""
        return "\n".join(self._line(rank, line) for line in text.split("\n")) if self._labelled else text

    def _end(self, keys: Sequence[Key]) -> None:
        for key in sorted(keys):
            self._settle(key, self._open.pop(key).end(), last=True)
        if self._folding is not None:
            self._write(self._folding.all())

    def _settle(self, key: Key, lines: Sequence[str], *, last: bool = False) -> None:
        """These lines of a stream have ended: those that its block shows stay there, others are written."""
        rank, name = key
        labelled = [self._line(rank, line) for line in lines]
        block = self._blocks.get(key)
        if block is not None and (labelled or last):
            terminal = self._open.get(key)
            shown = len(labelled) if terminal is None else terminal.shown
            block.ended.setdefault(key, []).extend(labelled[:shown])
            labelled = labelled[shown:]
            if terminal is not None:
                terminal.shown -= min(shown, len(lines))
            if terminal is None or not terminal.shown:
                del self._blocks[key]
                block.open.pop(key, None)
                block.draw()
        if labelled and self._folding is not None:
            self._write(self._folding.add(key, lines[-len(labelled) :], time.monotonic()))
        elif labelled:
            self._put(name, "".join(f"{line}\n" for line in labelled))

    def _write(self, folded: Sequence[Folded]) -> None:
        """Write lines, each once for all ranks that have it; those of one stream that follow each other in one piece."""
        for name, some in groupby(folded, key=lambda one: one.name):
            self._put(name, "".join(f"{self._folded(one)}\n" for one in some))

    def _folded(self, one: Folded) -> str:
        if len(one.ranks) == 1:
            return self._line(one.ranks[0], one.text)
        return f"{rank_words(one.ranks, self._noun)}: {one.text}"

    def _place(self, key: Key, terminal: Terminal, now: float) -> None:
        """Give an open line its place in a block, and its present text there."""
        rows = terminal.open
        block = self._blocks.get(key)
        if block is None:
            if not rows or now - terminal.since < DELAY or len(rows[0]) > LONGEST:
                return
            block = self._blocks[key] = self._block_for(key)
        terminal.shown = max(len(rows), 1)
        block.open[key] = [self._line(key[0], row if len(row) <= LONGEST else f"…{row[-LONGEST:]}") for row in rows]

    def _block_for(self, key: Key) -> Block:
        """The newest block, if lines in it are open still and none is this stream's; else a new one, below all output."""
        newest = self._newest
        if newest is None or not newest.open or key in newest.ended:
            assert self._area is not None
            newest = self._newest = Block(self._area())
        return newest

    def _line(self, rank: int, line: str) -> str:
        return f"[{rank:>{self._width}}] {line}"
