"""What pools are and what ranks wrote, as objects: text as ``%sky_status`` and ``%sky_logs`` print it, HTML, and values by key; pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeVar

from skymagic.display import text
from skymagic.display.panel import RankUse, folded, use_words
from skymagic.plan.units import count

K = TypeVar("K")
V = TypeVar("V")


class Keyed(Mapping[K, V]):
    """A read-only mapping over one that it holds; a subclass whose values are made when they are asked for has a `__getitem__`."""

    @property
    @abstractmethod
    def _held(self) -> Mapping[K, Any]: ...

    def __getitem__(self, key: K) -> V:
        value: V = self._held[key]
        return value

    def __iter__(self) -> Iterator[K]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _ipython_key_completions_(self) -> list[K]:
        return list(self._held)


@dataclass(frozen=True, repr=False)
class Logs(Keyed[int, str]):
    """By rank the lines that were asked for, a bar as it was last: ``logs[3]`` is rank 3's text.

    Attributes:
        lines: of each rank.
    """

    lines: Mapping[int, Sequence[str]] = field(default_factory=dict)

    @property
    def _held(self) -> Mapping[int, Sequence[str]]:
        return self.lines

    def __getitem__(self, rank: int) -> str:
        return "\n".join(self.lines[rank])

    def _repr_html_(self) -> str:
        return "".join(
            folded(f"rank {rank} · {count(len(some), 'line')}", self[rank], opened=len(self) == 1)
            for rank, some in self.lines.items()
        )

    def __repr__(self) -> str:
        many = len(self) > 1
        return "\n".join(
            f"[{rank}] {line}" if many else line
            for rank, some in self.lines.items()
            for line in some
        )


@dataclass(frozen=True)
class RankStatus:
    """How a rank is.

    Attributes:
        node: its number; host: that node's name; pid: of its process there.
        state: in a word: "ready", "running", "gone".
        use: what it uses; None where nobody has measured it.
    """

    rank: int
    node: object
    host: str
    pid: object
    state: str
    use: RankUse | None = None

    @property
    def row(self) -> tuple[object, ...]:
        """For a table: rank, node, host, process id, state."""
        return self.rank, self.node, self.host, self.pid, self.state


@dataclass(frozen=True, repr=False)
class PoolStatus(Keyed[int, RankStatus]):
    """How a pool is, by rank: ``status["main"][3].state``.

    Attributes:
        about: the pool in a line.
        ranks: all of them.
        panel: its HTML; "" where there is none.
    """

    about: str
    ranks: Mapping[int, RankStatus] = field(default_factory=dict)
    panel: str = ""

    @property
    def _held(self) -> Mapping[int, RankStatus]:
        return self.ranks

    @property
    def table(self) -> str:
        """The pool's ranks as text; many ranks are shown by node."""
        use = {rank: use_words(one.use) for rank, one in self.ranks.items() if one.use is not None}
        return text.status([one.row for one in self.ranks.values()], use)

    def __repr__(self) -> str:
        return f"{self.about}\n{self.table}"

    def _repr_html_(self) -> str | None:
        return self.panel + folded("processes", self.table) if self.panel else None


@dataclass(frozen=True, repr=False)
class PoolStatuses(Keyed[str, PoolStatus]):
    """How pools are, by name: ``%sky_status -o status``, ``status["main"]``.

    Attributes:
        notes: lines on pools that are no more, or are elsewhere.
    """

    pools: Mapping[str, PoolStatus] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def _held(self) -> Mapping[str, PoolStatus]:
        return self.pools

    def __repr__(self) -> str:
        return "\n\n".join([*map(repr, self.pools.values()), *self.notes])

    def _repr_html_(self) -> str | None:
        parts = [(repr(one), one._repr_html_()) for one in self.pools.values()]
        if not any(html for _, html in parts):
            return None
        return "".join(
            html or f"<div>{escape(words)}</div>"
            for words, html in [*parts, *((one, "") for one in self.notes)]
        )
