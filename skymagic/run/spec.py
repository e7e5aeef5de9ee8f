"""What a run asks of the ranks that take part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunSpec:
    """One run: the source, who executes it, what is shipped before it and gathered after it."""

    source: str
    """What the ranks execute."""
    source_without_magics: str
    """The same as plain Python, without IPython's syntax: what it needs of the notebook is found in it."""
    ranks: tuple[int, ...]
    visible_ranks: tuple[int, ...]
    """Ranks whose output is shown."""
    value_ranks: tuple[int, ...] = ()
    """Ranks that send back the value of the cell's last expression."""
    gather: tuple[str, ...] = ()
    """Variables that come back."""
    gather_ranks: tuple[int, ...] = ()
    """Ranks that send them."""
    push: tuple[str, ...] = ()
    no_push: bool | tuple[str, ...] = False
    fresh: bool = False
    execution_count: int = 1
    compiler_flags: int = 0
    """Of ``__future__``, as the notebook's cells have set them."""
    waits: bool = True
    """Whether it waits for other runs on its ranks; else it is refused."""
    widgets: str = ""
    """`RunCell.widgets`."""
    job: str = "cell"
    """What it is: a cell, a ``script``, or a ``call``."""
    output: str = ""
    """The variable that takes the values of the last expression."""
    head: bool = False
    """Whether the variables take the first rank's values alone."""
    beside: bool = False
    """The notebook does not wait for it, and the user has a handle."""
    taken: Callable[[], object] = field(default=lambda: None, compare=False)
    """Called once all that it needs of the notebook is in the store, or while it waits for other runs."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values by name that only this run brings: arguments of a call. The ranks forget them afterwards."""
