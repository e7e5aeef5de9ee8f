"""What a run asks of the ranks that take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Order:
    """What a run asks of the ranks that take part."""

    source: str
    """What the ranks execute."""
    plain: str
    """The same as plain Python, without IPython's syntax."""
    ranks: tuple[int, ...]
    shown: tuple[int, ...]
    want: tuple[int, ...] = ()
    """Ranks that send back the value of the cell's last expression."""
    gather: tuple[str, ...] = ()
    """Variables that come back."""
    givers: tuple[int, ...] = ()
    """Ranks that send them."""
    push: tuple[str, ...] = ()
    no_push: bool | tuple[str, ...] = False
    fresh: bool = False
    execution_count: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values by name that only this order brings: arguments of a call. The ranks forget them afterwards."""
