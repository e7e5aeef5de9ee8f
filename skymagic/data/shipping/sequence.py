"""In which order values are rebuilt: what runs code of the notebook comes after all that this code may use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence


def rebuild_order(
    units: Sequence[Collection[str]], active: Sequence[bool], uses: Mapping[str, Iterable[str]]
) -> list[int]:
    """Indices of units (values that are rebuilt as one) in the order in which they can be.

    Functions and classes call nothing while they are rebuilt, so they come first. Of two others the one that the other reaches
    comes first: it reaches less, unless they reach each other, and then there is no order for them.

    Args:
        units: the names of each.
        active: for each, whether it may run code of the notebook.
        uses: name → names that its code uses, also of names that do not travel.
    """
    return sorted(range(len(units)), key=lambda index: len(_reached(units[index], uses)) if active[index] else 0)


def _reached(names: Iterable[str], uses: Mapping[str, Iterable[str]]) -> set[str]:
    """These names, and all that their code uses in turn."""
    reached: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += uses.get(name, ())
    return reached
