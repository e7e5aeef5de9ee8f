"""The one error of a run that did not end well: what each rank reports, what it costs, and what may help."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from skymagic.data.capture.modules import in_packages, locate
from skymagic.data.capture.names import interactive
from skymagic.display import text
from skymagic.errors import RunError, RunInterrupted, RunTimeout
from skymagic.plan.masking import without_colours
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import agreeing, rank_words
from skymagic.pool import Pool, messages
from skymagic.pool.status import State
from skymagic.run.report import Limits, Report
from skymagic.run.results import RankFailure, error_of
from skymagic.wire.processes import describe

NO_GROUP = (
    "Default process group has not been initialized",
    "is not compatible with an interactive environment",
)
"""How torch says it, in ``DDP(…)`` as in ``dist.all_reduce(…)``; and Lightning, in ``Trainer(strategy="ddp")``."""
FSDP_ON_CPUS = "The strategy `fsdp` requires a GPU accelerator"
"""Lightning's refusal."""
NO_NAME = re.compile(r"name '(\w+)' is not defined")
NO_MODULE = re.compile(r"No module named '(\w+)")
NO_MAGIC = re.compile(r"(?:Line|Cell) magic(?: function)? `(%+\w+)` not found")


def hints(
    failures: Sequence[RankFailure],
    plugins: Collection[str],
    names: Collection[str] = (),
    magics: Collection[str] = (),
    *,
    remote: bool = True,
    own_modules: Collection[str] = (),
) -> list[str]:
    """Lines to show below an error.

    Args:
        plugins: names of those that the pool has.
        names: that the ranks or the notebook have.
        magics: that the notebook has, with their per cent signs.
        remote: whether its ranks run on other machines, in environments of their own.
        own_modules: missing modules that the notebook has as files of its own.
    """
    modules = missing_modules(failures)
    if own := sorted(modules.intersection(own_modules)):
        statement = f"import {', '.join(own)}"
        return [
            f"{', '.join(own)}: the notebook's own code, which is sent with a cell that imports it: "
            f"write `{statement}` in the cell"
        ]
    if modules:
        packages = " ".join(sorted(modules))
        where = "the machines of this pool" if remote else "this notebook's environment"
        return [
            f"{where} may be missing a package: {'%sky_pip' if remote else '%pip'} install {packages}, if that is its name"
        ]
    if mine := {
        match[1] for one in failures if (match := NO_MAGIC.match(one.evalue)) and match[1] in magics
    }:
        return [
            f"{', '.join(sorted(mine))} is a magic of the notebook, and magics do not travel: define or %load_ext it in a "
            "%%sky_broadcast cell, or call the function behind it"
        ]
    missing = dict.fromkeys(
        match[1]
        for one in failures
        if one.ename == "NameError" and (match := NO_NAME.match(one.evalue))
    )
    if forgotten := [
        name for name in missing if name not in names and name in sys.stdlib_module_names
    ]:
        return [
            f"did you forget to import {name!r}?" for name in forgotten
        ]  # as Python says from 3.12 on
    if automagic := [
        name
        for name in missing
        if name not in names and f"%{name}" in magics and _is_command(name, failures)
    ]:
        return [f"automagic works in plain cells only: write %{name}" for name in automagic]
    # what the notebook has under that very name is told by another line
    if nearest := [
        words for name in missing if name not in names and (words := did_you_mean(name, names))
    ]:
        return [words.removeprefix("; ") for words in nearest]
    if any(one.ename == "SystemExit" for one in failures):
        return [
            "exit() ends the cell on its rank: the rank keeps running, with its variables; %sky_down ends the pool"
        ]
    if "torch" not in plugins and any(
        words in one.evalue for one in failures for words in NO_GROUP
    ):
        return [
            "this pool was made without a process group: end it (%sky_down), and make it with --plugin torch"
        ]
    if any(FSDP_ON_CPUS in one.evalue for one in failures):
        return [
            "without GPUs, shard with torch's fully_shard in configure_model, and strategy=ModelParallelStrategy(…)"
        ]
    return []


def missing_modules(failures: Sequence[RankFailure]) -> set[str]:
    """Return the top-level names of the modules that ranks could not import."""
    matches = (NO_MODULE.match(failure.evalue) for failure in failures)
    return {match[1] for match in matches if match}


def _is_own_module(name: str, pool: Pool) -> bool:
    """Return True if the notebook has this module as a file that travels."""
    located = locate(name, pool.shipper.folder)
    # any folder would do as a namespace package, such as the one in which wandb writes its runs
    return located is not None and (located[0].endswith(".py") or name in sys.modules)


def _is_command(name: str, failures: Sequence[RankFailure]) -> bool:
    """Whether the line that failed is like ``ls /tmp`` or ``cd -x``, which Python takes for a calculation."""
    command = re.compile(rf"^-+> *\d+ +{re.escape(name)} +[-/.~]\S*$", re.MULTILINE)
    return any(command.search(without_colours("\n".join(one.traceback))) for one in failures)


def failures_of(report: Report, pool: Pool) -> list[RankFailure]:
    """What each rank that did not end well reports, causes first in the order of ranks."""
    found = []
    for number, rank in sorted(report.ranks.items()):
        host = pool.agents.ranks[number].hostname
        outcome = rank.outcome or {}
        if rank.died is not None and not rank.killed:
            status, tail = rank.died.status, rank.died.tail
            how, tail = (tail, "") if status is None else (describe(rank.died), tail)
            found.append(RankFailure(number, host, "", "", died=how, status=status, tail=tail))
        elif rank.died is not None:
            found.append(
                RankFailure(number, host, "Killed", "it could not be stopped otherwise", freed=True)
            )
        elif rank.failed:
            found.append(
                RankFailure(
                    number, host, outcome["ename"], outcome["evalue"], tuple(outcome["traceback"]),
                    exception_of(outcome, pool), freed=bool(outcome.get("freed")) or (rank.stopped and bool(outcome.get("interrupted"))),
                )
            )  # fmt: skip
    return found


def exception_of(outcome: Mapping[str, Any], pool: Pool) -> BaseException | None:
    """The exception that a rank raised, where it can be rebuilt here."""
    ref = outcome.get("exception") or {}
    if "error" in ref or not ref:
        return None
    try:
        problem = pool.shipper.unpack(ref)
    except Exception:
        return None
    return problem if isinstance(problem, BaseException) else None


def failure(report: Report, pool: Pool, limits: Limits, *, task: bool = False) -> RunError:
    """The one error of a run that did not end well."""
    failures = failures_of(report, pool)
    notes = [*lost_notes(report, pool), *report.notes, *missing_notes(report, pool, task)]
    notes += file_notes(report, pool, task)
    known = {*pool.shipper.names(), *pool.namespace}
    magics = magics_of(pool.namespace)
    notes += hints(
        failures,
        {plugin.name for plugin in pool.plugins},
        known,
        magics,
        remote=pool.plan.remote,
        own_modules=[name for name in missing_modules(failures) if _is_own_module(name, pool)],
    )
    causes = [one for one in failures if not one.secondary]
    if pool.ended is not None and any(one.died == pool.ended for one in failures):
        before = [f"rank {one.rank}: {one.words}" for one in causes if one.died != pool.ended]
        error: RunError = RunError("\n".join([f"{pool.ended}: {pool.remedy}", *before]))
        error.failures = tuple(failures)
        return error
    if report.interrupted and not any(one.died for one in causes):
        stopped = {number: rank.stopped_at for number, rank in report.ranks.items() if rank.stopped}
        where = text.places(stopped)
        said = f"interrupted on {rank_words(list(stopped))}" if stopped else "interrupted"
        return RunInterrupted("\n".join([said, *([where] if where else []), *notes]))
    if report.timed_out:
        lines = [
            f"the cell took longer than {limits.timeout:g} s and was stopped",
            text.stacks(report.stacks),
            *notes,
        ]
        error = RunTimeout("\n".join(lines))
        error.failures = tuple(failures)
        return error
    return error_of(failures, pool.world_size, notes)


def magics_of(namespace: Mapping[str, Any]) -> set[str]:
    """The magics of the notebook with these names, as they are written: ``%time``, ``%%time``."""
    shell = namespace["get_ipython"]() if "get_ipython" in namespace else None
    by_type = shell.magics_manager.magics if shell is not None else {}
    return {
        f"{'%' if type_ == 'line' else '%%'}{name}"
        for type_, names in by_type.items()
        for name in names
    }


def missing_notes(report: Report, pool: Pool, task: bool) -> list[str]:
    """Return a line for each name that a rank has missed and the notebook has: nothing in the cell's text said that it needs them."""
    names = {str((rank.outcome or {}).get("missing") or "") for rank in report.ranks.values()}
    space = pool.shipper.namespace
    held = sorted(name for name in names if name in space and not interactive(name, space[name]))
    return [
        f"the notebook has {name}: {'pass it as an argument' if task else f'--push {name}'}"
        for name in held
    ]


def file_notes(report: Report, pool: Pool, task: bool) -> list[str]:
    """Return a line on a file that a rank lacks and the notebook has, because they work in different folders or on different machines."""
    try:
        here = Path.cwd()
    except OSError:  # it was deleted
        return []
    for number, rank in sorted(report.ranks.items()):
        lacking = (rank.outcome or {}).get("missing_files")
        if not lacking:
            continue
        folder = Path(lacking["folder"])
        held = next((path for path in lacking["paths"] if _exists(here / path)), "")
        if not held:
            continue
        if pool.plan.remote:
            host = pool.agents.ranks[number].hostname
            where = (
                "on the notebook's machine"
                if Path(held).is_absolute()
                else "in the notebook's folder"
            )
            place, target = (_from_home(path, lacking["home"]) for path in (folder, folder / held))
            return [
                f"{held} is {where}, and rank {number} works in {place} on {host}: copy it with "
                f"`%sky_put {_quoted(held)} {_quoted(target)}`, or use an absolute path if {host} shares that folder"
            ]
        if Path(held).is_absolute() or (folder.is_dir() and folder.samefile(here)):
            continue
        remedy = "" if task else f"write `%cd {here}` in a broadcast cell, or "
        return [
            f"the ranks work in {folder}, and the notebook in {here}, which has {held}: {remedy}use an absolute path"
        ]
    return []


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a name, or with a null byte: no path at all
        return False


def _from_home(path: Path, home: str) -> str:
    """Return a path on a host as a user writes it: `~` also means the right folder on hosts with another home."""
    absolute = os.path.normpath(path)
    return f"~{absolute.removeprefix(home)}" if Path(absolute).is_relative_to(home) else absolute


def _quoted(path: str) -> str:
    """Return a path as a word of a magic's line; `~` needs no quotes."""
    return (
        path if shlex.quote(path.replace("~", "")) == path.replace("~", "") else shlex.quote(path)
    )


def lost_notes(report: Report, pool: Pool) -> list[str]:
    """Lines on what the failure costs."""
    dead = [number for number, rank in report.ranks.items() if rank.died is not None]
    if not dead:
        return []
    if pool.ended is not None:
        return [f"{pool.ended}: {pool.remedy}"]
    if pool.state is State.LOST and not pool.replacement.lost:
        return [messages.lost(pool.name)]
    if gone := range(len(pool.plan.hosts)) if pool.state is State.LOST else pool.agents.gone:
        lost = [rank for index in gone for rank in pool.agents.ranks_of(index)]
        return messages.ways_without(lost, pool.world_size, replaced=pool.plan.request.replace)
    if pool.inseparable:
        names = ", ".join(pool.inseparable)
        return [
            f"all ranks are being restarted, without variables: {names} cannot continue with some of them"
        ]
    others = "; the others keep theirs" if len(dead) < pool.world_size else ""
    restarted = f"{rank_words(dead)} {agreeing(len(dead), 'is', 'are')} being restarted without variables{others}"
    return [restarted, *clone_notes(dead, pool)]


def _is_package(name: str) -> bool:
    """Whether a name is that of an installed package, as ``import torch`` binds it: the next import brings it back."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and in_packages(spec.origin or "")


MOST_CLONED = 12
"""Names in the line that copies what a rank has lost."""


def clone_notes(dead: Sequence[int], pool: Pool) -> list[str]:
    """A line with the command that copies from a rank that lives what the dead ranks had made."""
    bindings = pool.shipper.bindings
    lost = frozenset[str]().union(*(bindings.bound_by_cells(rank) for rank in dead))
    space = pool.shipper.namespace
    lost -= {
        name
        for name in lost
        if name.startswith("_")
        or name in sys.stdlib_module_names
        or _is_package(name)
        or isinstance(space.get(name), types.ModuleType)
    }
    held = {
        rank: lost & bindings.bound_by_cells(rank)
        for rank in range(pool.world_size)
        if rank not in dead
    }
    source = max(held, key=lambda rank: (len(held[rank]), -rank), default=None)
    if source is None or not held[source]:
        return []
    names = sorted(held[source])
    command = messages.clone_command(dead, source, names[:MOST_CLONED])
    # the command ends the line, so that it can be copied
    chosen = f" (the first {MOST_CLONED} of {len(names)})" if len(names) > MOST_CLONED else ""
    return [f"copy rank {source}'s variables to {rank_words(dead)}{chosen}: {command}"]
