"""Pools and logs as objects, with text, HTML and values by key; pure.

The text is that of ``%sky_status`` and ``%sky_logs``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeVar

from skymagic.display import text
from skymagic.display.panel import RankUse, folded, usage_text
from skymagic.plan.units import count

K = TypeVar("K")
V = TypeVar("V")


class Keyed(Mapping[K, V]):
    """Read-only mapping over an inner one.

    Subclasses that compute their values on access override `__getitem__`.
    """

    @property
    @abstractmethod
    def _items(self) -> Mapping[K, Any]: ...

    def __getitem__(self, key: K) -> V:
        value: V = self._items[key]
        return value

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def _ipython_key_completions_(self) -> list[K]:
        return list(self._items)


@dataclass(frozen=True, repr=False)
class Logs(Keyed[int, str]):
    """Requested log lines by rank: ``logs[3]`` is rank 3's text.

    Of a redrawn progress bar, they contain the final state.

    Attributes:
        lines: lines of each rank.
    """

    lines: Mapping[int, Sequence[str]] = field(default_factory=dict)

    @property
    def _items(self) -> Mapping[int, Sequence[str]]:
        return self.lines

    def __getitem__(self, rank: int) -> str:
        return "\n".join(self.lines[rank])

    def _repr_html_(self) -> str:
        return "".join(
            folded(
                f"rank {rank} · {count(len(rank_lines), 'line')}", self[rank], opened=len(self) == 1
            )
            for rank, rank_lines in self.lines.items()
        )

    def __repr__(self) -> str:
        labelled = len(self) > 1
        return "\n".join(
            f"[{rank}] {line}" if labelled else line
            for rank, rank_lines in self.lines.items()
            for line in rank_lines
        )


@dataclass(frozen=True)
class RankStatus:
    """State of a rank.

    Attributes:
        node: number of its node.
        host: name of its node.
        pid: its process id on the node.
        state: its state in a word: "ready", "running", "gone".
        use: its resource use; None if it was not measured.
    """

    rank: int
    node: object
    host: str
    pid: object
    state: str
    use: RankUse | None = None

    @property
    def row(self) -> tuple[object, ...]:
        """Row for a table: rank, node, host, process id, state."""
        return self.rank, self.node, self.host, self.pid, self.state


@dataclass(frozen=True, repr=False)
class PoolStatus(Keyed[int, RankStatus]):
    """State of a pool, by rank: ``status["main"][3].state``.

    Attributes:
        about: the pool in a line.
        ranks: all of its ranks.
        panel: its HTML, or "".
    """

    about: str
    ranks: Mapping[int, RankStatus] = field(default_factory=dict)
    panel: str = ""

    @property
    def _items(self) -> Mapping[int, RankStatus]:
        return self.ranks

    @property
    def table(self) -> str:
        """The pool's ranks as text; many ranks are grouped by node."""
        use = {
            rank: usage_text(status.use)
            for rank, status in self.ranks.items()
            if status.use is not None
        }
        return text.status([status.row for status in self.ranks.values()], use)

    def __repr__(self) -> str:
        return f"{self.about}\n{self.table}"

    def _repr_html_(self) -> str | None:
        return self.panel + folded("processes", self.table) if self.panel else None


@dataclass(frozen=True, repr=False)
class PoolStatuses(Keyed[str, PoolStatus]):
    """State of pools, by name: ``%sky_status -o status``, ``status["main"]``.

    Attributes:
        notes: lines on pools that are gone, or are elsewhere.
    """

    pools: Mapping[str, PoolStatus] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def _items(self) -> Mapping[str, PoolStatus]:
        return self.pools

    def __repr__(self) -> str:
        return "\n\n".join([*map(repr, self.pools.values()), *self.notes])

    def _repr_html_(self) -> str | None:
        parts = [(repr(pool), pool._repr_html_()) for pool in self.pools.values()]
        if not any(html for _, html in parts):
            return None
        return "".join(
            html or f"<div>{escape(plain)}</div>"
            for plain, html in [*parts, *((note, "") for note in self.notes)]
        )
