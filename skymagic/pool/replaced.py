"""What ranks that were started anew lack, in words; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from skymagic.data.capture.names import cell_names
from skymagic.plan.units import rank_words
from skymagic.run.report import Report

if TYPE_CHECKING:
    from skymagic.data.shipping.bindings import Bindings, Manifest


def missing(report: Report, bindings: Bindings, source: str) -> list[str]:
    """A line for each name that ranks missed in a run, and another rank has: how to get it from there.

    Args:
        source: the cell, as plain Python: what else it uses that they lack is copied in one go.
    """
    ranks_by_name: dict[str, list[int]] = {}
    for number, rank in sorted(report.ranks.items()):
        outcome = rank.outcome or {}
        name = outcome.get("missing")
        if name and name not in bindings.names(number):
            ranks_by_name.setdefault(name, []).append(number)
    return [line for name, ranks in ranks_by_name.items() if (line := _missing(name, ranks, bindings, source))]


def _missing(name: str, ranks: list[int], bindings: Bindings, source: str) -> str:
    origin = next((rank for rank in bindings.known() if name in bindings.names(rank)), None)
    if origin is None:
        return ""
    held = frozenset.intersection(*map(bindings.names, ranks))
    used = sorted(cell_names(source).loads - {name}, key=source.find)
    names = [name, *(each for each in used if each not in held and bindings.has_rebound(origin, each))]
    have = f"{'has' if len(ranks) == 1 else 'have'} no {name}"
    if bindings.replaced.issuperset(ranks):
        what = f"{'was' if len(ranks) == 1 else 'were'} replaced and {have}"
    else:
        what = f"{have}, which rank {origin} has"
    return f"{rank_words(ranks)} {what}: {_command(ranks, origin, names)}"


def sent_instead(manifest: Manifest, bindings: Bindings, ranks: Sequence[int]) -> list[str]:
    """A line where replaced ranks get the notebook's value of a name of which the others have their own."""
    new = [rank for rank in ranks if rank in bindings.replaced]
    names: dict[str, list[int]] = {}
    origin = -1
    for bundle in manifest.orders.get("bundles", ()) if new else ():
        for name in bundle["names"]:
            theirs = next((rank for rank in bindings.known() if bindings.has_rebound(rank, name)), None)
            getting = [rank for rank in new if bundle["ranks"] is not None and rank in bundle["ranks"]]
            if theirs is not None and theirs not in (bundle["ranks"] or ranks) and getting:
                names[name], origin = getting, theirs
    if not names:
        return []
    to = sorted(set().union(*names.values()))
    get = "gets" if len(to) == 1 else "get"
    return [
        f"{rank_words(to)} {'was' if len(to) == 1 else 'were'} replaced and {get} the notebook's {', '.join(names)}, where "
        f"rank {origin} has its own: {_command(to, origin, names)}"
    ]


def _command(ranks: Iterable[int], source: int, names: Iterable[str]) -> str:
    return f"%sky_clone {','.join(map(str, ranks))} --from {source} {' '.join(names)}"
