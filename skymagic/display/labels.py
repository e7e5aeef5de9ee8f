"""Text of several ranks on one screen: a label before each line, lines in order, and open lines redrawn in their place.

::

    rank 0  ──▶ Terminal ── lines that ended ─────────────▶ the notebook's stdout, stderr
    rank 1  ──▶ Terminal ── lines open for a while ─▶ LabelBlock: one display, a line per rank, until these lines have ended

Equal lines of many ranks become one on their way there: "ranks 0–63: epoch 3". A line waits for the same line of other ranks: a moment, and
somewhat longer for one that has come and stands behind another line of its rank. A rank's own lines stay in their order.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from skymagic.display.live import Area, Write
from skymagic.display.terminal import HIDE, HOLD, Key, Terminal
from skymagic.plan.units import rank_words

MANY = 8
"""Ranks that are shown from which equal lines are one; those of fewer have a line each, as soon as it has ended."""
WAIT, LONGEST_WAIT = 0.3, 1.0
"""Seconds that a line waits for those that have not come, and for those that have."""

NEVER, ANY = float("-inf"), float("inf")

Stream = tuple[int, str]
"""A rank and the name of its stream."""
Line = tuple[str, str]
"""The name of a stream, and a line of it."""


@dataclass(frozen=True)
class Folded:
    """A line, and the ranks that have written it, in order."""

    name: str
    ranks: tuple[int, ...]
    text: str


@dataclass
class _EqualLines:
    """Ranks whose next line is the same."""

    ranks: list[int] = field(default_factory=list)
    since: float = float("inf")
    """When the first of them came."""


class Folding:
    """Lines of several ranks, of which equal ones leave together.

    Args:
        ranks: those that are shown; a line that all of them have written waits no longer.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = len(ranks)
        self._waiting: dict[Stream, deque[tuple[str, float]]] = {}
        self._come: dict[Line, Counter[int]] = {}
        """Who has such a line waiting, how often."""
        self._groups: dict[Line, _EqualLines] = {}
        """By the next line of each stream."""

    def add(self, stream: Stream, lines: Sequence[str], now: float) -> list[Folded]:
        """Lines of a stream have ended; what all ranks have written by now."""
        rank, name = stream
        waiting = self._waiting.setdefault(stream, deque())
        first = not waiting
        waiting.extend((line, now) for line in lines)
        for line in lines:
            self._come.setdefault((name, line), Counter())[rank] += 1
        return self._leave([self._next(stream)], NEVER, NEVER) if first and waiting else []

    def due(self, now: float) -> list[Folded]:
        """What has waited long enough."""
        return self._leave(list(self._groups), now - WAIT, now - LONGEST_WAIT)

    def all(self) -> list[Folded]:
        """What waits, now that something else follows."""
        left = self._leave(list(self._groups), ANY, NEVER)
        while self._groups:  # they wait for each other
            left += self._leave([next(iter(self._groups))], ANY, ANY)
            left += self._leave(list(self._groups), ANY, NEVER)
        return left

    def _next(self, stream: Stream) -> Line:
        """Put a stream's next line to those that are the same."""
        rank, name = stream
        text, since = self._waiting[stream][0]
        group = self._groups.setdefault((name, text), _EqualLines())
        group.ranks.append(rank)
        group.since = min(group.since, since)
        return name, text

    def _leave(self, lines: Collection[Line], alone: float, before: float) -> list[Folded]:
        """Take the lines that all ranks have written, and then the lines that come next.

        Args:
            alone: and what came before this time, where nobody else has it waiting. before: where somebody has.
        """
        todo, left = deque(lines), list[Folded]()
        while todo:
            group = self._groups.get(line := todo.popleft())
            if group is None:
                continue
            more = len(self._come[line]) > len(group.ranks)
            if len(group.ranks) == self._ranks or group.since <= (before if more else alone):
                del self._groups[line]
                left.append(Folded(line[0], tuple(sorted(group.ranks)), line[1]))
                todo.extend(self._after(line, group.ranks))
        return left

    def _after(self, line: Line, ranks: Collection[int]) -> list[Line]:
        """The next lines of streams whose last one leaves."""
        come = self._come[line]
        for rank in ranks:
            self._waiting[rank, line[0]].popleft()
            come[rank] -= 1
            if not come[rank]:
                del come[rank]
        if not come:
            del self._come[line]
        return [self._next((rank, line[0])) for rank in ranks if self._waiting[rank, line[0]]]


DELAY = 0.2
"""Seconds that a line must be open before it is shown: most lines are whole sooner."""
INTERVAL = 0.1
"""Seconds between two looks at what is open."""
LONGEST = 1000
"""Characters of an open line that are shown at most: its end."""


@dataclass
class LabelBlock:
    """Lines of ranks that were open at the same time, in the order of ranks; each stays when it has ended."""

    area: Area = field(default_factory=Area)
    ended: dict[Key, list[str]] = field(default_factory=dict)
    open: dict[Key, list[str]] = field(default_factory=dict)
    """Open lines of the keys that are still in the block."""

    def draw(self) -> None:
        """Show it as it is now."""
        keys = sorted(self.ended.keys() | self.open.keys())
        lines = [
            line for key in keys for line in [*self.ended.get(key, ()), *self.open.get(key, ())]
        ]
        self.area.draw("\n".join(lines))


class Labels:
    """Puts ``[rank]`` before each line when several ranks are shown; lines of different ranks never mix.

    A line that stays open, such as a progress bar or dots, is shown in a block that is drawn again and again, a line per rank;
    when it has ended, it stays there in its last state. Without such blocks it is shown when it has ended, or when the run has.

    Args:
        ranks: the ranks that are shown; one alone needs no label, and its text passes unchanged but for bars.
        put: where finished text goes.
        redraws: whether what was shown can be drawn again, in blocks.
        noun: what the numbers are of.
    """

    def __init__(
        self, ranks: Sequence[int], put: Write, redraws: bool = False, noun: str = "rank"
    ) -> None:
        self._put = put
        self._redraws = redraws
        self._noun = noun
        self._folding = Folding(ranks) if len(ranks) >= MANY else None
        self._labelled = len(ranks) > 1
        self._width = len(str(max(ranks, default=0)))
        self._open: dict[Key, Terminal] = {}
        self._blocks: dict[Key, LabelBlock] = {}
        """Where an open line is shown."""
        self._newest: LabelBlock | None = None
        self._looked = 0.0

    def text(self, rank: int, name: str, text: str) -> None:
        """Take text of a rank's stream."""
        now = time.monotonic()
        key = (rank, name)
        for other, written in self._open.items():
            # it was written before this text, so that a bar above its cursor has ended
            if other != key and other[0] == rank and written.waiting:
                self._settle(other, written.take(all=True))
        terminal = self._open.get(key)
        if not self._labelled and (terminal is None or not terminal.open) and not self._moves(text):
            self._open.pop(key, None)
            self._put(name, text)
            return
        if terminal is None:
            terminal = self._open[key] = Terminal(now)
        terminal.feed(text, now)
        self._settle(key, terminal.take())

    def _moves(self, text: str) -> bool:
        """Whether text of one rank alone is a bar that a notebook cannot show as it is: it goes down a line, and up again. A terminal can."""
        return self._redraws and ("\r" in text.replace("\r\n", "\n") or HIDE in text)

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
        if self._redraws:
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

    def _end(self, keys: Sequence[Key]) -> None:
        for key in sorted(keys):
            terminal = self._open.pop(key)
            moving = len(terminal.moving)
            self._settle(key, terminal.end(), moving)
        if self._folding is not None:
            self._write(self._folding.all())

    def _settle(self, key: Key, lines: Sequence[str], moving: int | None = None) -> None:
        """Take lines of a stream that have ended: lines that its block shows stay there, others are written.

        Args:
            moving: the stream itself has ended, and so many of the lines belong into the block.
        """
        rank, name = key
        labelled = [self._line(rank, line) for line in lines]
        block = self._blocks.get(key)
        if block is not None and (labelled or moving is not None):
            terminal = self._open.get(key)
            shown = (moving or 0) if terminal is None else terminal.shown
            block.ended.setdefault(key, []).extend(labelled[:shown])
            labelled = labelled[shown:]
            if terminal is not None:
                # rows that were wiped away are no reason to stay: what comes next stands below other output
                terminal.shown -= min(shown, len(lines)) if terminal.open else terminal.shown
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
        rows = terminal.moving
        block = self._blocks.get(key)
        if block is None:
            if not rows or now - terminal.since < DELAY or len(rows[0]) > LONGEST:
                return
            block = self._blocks[key] = self._block_for(key)
        terminal.shown = max(len(rows), 1)
        block.open[key] = [
            self._line(key[0], row if len(row) <= LONGEST else f"…{row[-LONGEST:]}") for row in rows
        ]

    def _block_for(self, key: Key) -> LabelBlock:
        """The newest block, if lines in it are open still and none is this stream's; else a new one, below all output."""
        newest = self._newest
        if newest is None or not newest.open or key in newest.ended:
            newest = self._newest = LabelBlock()
        return newest

    def _line(self, rank: int, line: str) -> str:
        return f"[{rank:>{self._width}}] {line}" if self._labelled else line
