"""The single error of a failed run: each rank's report, the losses, and hints."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
import types
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from skymagic.data.capture.modules import in_packages, locate
from skymagic.data.capture.names import is_interactive_name
from skymagic.data.namespace import Namespace
from skymagic.display import text
from skymagic.errors import RunError, RunInterrupted, RunTimeout
from skymagic.plan.masking import without_colours
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import rank_words, verb_form
from skymagic.pool import Pool, messages
from skymagic.pool.status import State
from skymagic.run.results import KILLED, RankFailure, error_of
from skymagic.run.state import Limits, Report
from skymagic.wire.outcome import Failure
from skymagic.wire.processes import describe

NO_GROUP = (
    "Default process group has not been initialized",
    "is not compatible with an interactive environment",
)
"""Messages of torch for ``DDP(…)`` and ``dist.all_reduce(…)``, and of Lightning for a Trainer.

Lightning's comes from ``Trainer(strategy="ddp")``.
"""
FSDP_ON_CPUS = "The strategy `fsdp` requires a GPU accelerator"
"""Message of Lightning."""
NO_NAME = re.compile(r"name '(\w+)' is not defined")
NO_MODULE = re.compile(r"No module named '([\w.]+)")
NO_MAGIC = re.compile(r"(?:Line|Cell) magic(?: function)? `(%+\w+)` not found")


def hints(
    failures: Sequence[RankFailure],
    plugins: Collection[str],
    names: Collection[str] = (),
    magics: Collection[str] = (),
    *,
    remote: bool = True,
    own_modules: Collection[str] = (),
    own_packages: Collection[str] = (),
) -> list[str]:
    """Return lines to show below an error.

    Args:
        plugins: names of the pool's plugins.
        names: names that the ranks or the notebook have.
        magics: the notebook's magics, with their percent signs.
        remote: True if the ranks run on other machines, in their own environments.
        own_modules: missing modules that the notebook has as its own files.
        own_packages: top-level names of missing modules that belong to the notebook's own files.
    """
    modules = missing_modules(failures)
    if own := sorted(modules.intersection(own_modules)):
        statement = f"import {', '.join(own)}"
        return [
            f"{', '.join(own)}: the notebook's own code, which is sent with a cell that imports "
            "it: "
            f"write `{statement}` in the cell"
        ]
    # a module that the notebook's own package lacks is no package to install
    if packages := sorted({name.partition(".")[0] for name in modules}.difference(own_packages)):
        location = "the machines of this pool" if remote else "this notebook's environment"
        return [
            f"{location} may be missing a package: {'%sky_pip' if remote else '%pip'} install "
            f"{' '.join(packages)}, if that is its name"
        ]
    if local_magics := {
        match[1]
        for failure in failures
        if (match := NO_MAGIC.match(failure.evalue)) and match[1] in magics
    }:
        return [
            f"{', '.join(sorted(local_magics))} is a magic of the notebook, and magics do not "
            "travel: define or %load_ext it in a "
            "%%sky_broadcast cell, or call the function behind it"
        ]
    missing = dict.fromkeys(
        match[1]
        for failure in failures
        if failure.ename == "NameError" and (match := NO_NAME.match(failure.evalue))
    )
    if unimported := [
        name for name in missing if name not in names and name in sys.stdlib_module_names
    ]:
        # the wording of Python 3.12 and later
        return [f"did you forget to import {name!r}?" for name in unimported]
    if automagic := [
        name
        for name in missing
        if name not in names and f"%{name}" in magics and _is_command(name, failures)
    ]:
        return [f"automagic works in plain cells only: write %{name}" for name in automagic]
    # another line covers names that the notebook has exactly
    if nearest := [
        suggestion
        for name in missing
        if name not in names and (suggestion := did_you_mean(name, names))
    ]:
        return [suggestion.removeprefix("; ") for suggestion in nearest]
    if any(failure.ename == "SystemExit" for failure in failures):
        return [
            "exit() ends the cell on its rank: the rank keeps running, with its variables; "
            "%sky_down ends the pool"
        ]
    if "torch" not in plugins and any(
        phrase in failure.evalue for failure in failures for phrase in NO_GROUP
    ):
        return [
            "this pool was made without a process group: end it (%sky_down), and make it with "
            "--plugin torch"
        ]
    if any(FSDP_ON_CPUS in failure.evalue for failure in failures):
        return [
            "without GPUs, shard with torch's fully_shard in configure_model, and "
            "strategy=ModelParallelStrategy(…)"
        ]
    return []


def missing_modules(failures: Sequence[RankFailure]) -> set[str]:
    """Return the names of the modules that ranks could not import."""
    matches = (NO_MODULE.match(failure.evalue) for failure in failures)
    return {match[1] for match in matches if match}


def _is_own_module(name: str, pool: Pool) -> bool:
    """Return True if the notebook has this module as a file that can be shipped."""
    located = locate(name, pool.shipper.folder)
    # any folder can be a namespace package, such as the one that wandb writes its runs to
    return located is not None and (located[0].endswith(".py") or name in sys.modules)


def _is_command(name: str, failures: Sequence[RankFailure]) -> bool:
    """Return True if the failed line looks like ``ls /tmp`` or ``cd -x``, arithmetic to Python."""
    command = re.compile(rf"^-+> *\d+ +{re.escape(name)} +[-/.~]\S*$", re.MULTILINE)
    return any(
        command.search(without_colours("\n".join(failure.traceback))) for failure in failures
    )


def failures_of(report: Report, pool: Pool) -> list[RankFailure]:
    """Return the failure of each rank that did not succeed, in rank order."""
    failures_by_rank = []
    for number, rank in sorted(report.ranks.items()):
        host = pool.agents.ranks[number].hostname
        if rank.died is not None and not rank.killed:
            status, tail = rank.died.status, rank.died.tail
            death, tail = (tail, "") if status is None else (describe(rank.died), tail)
            failures_by_rank.append(
                RankFailure(number, host, "", "", died=death, status=status, tail=tail)
            )
        elif rank.died is not None:
            failures_by_rank.append(
                RankFailure(number, host, KILLED, "it could not be stopped otherwise", freed=True)
            )
        elif (failure := rank.failure) is not None:
            failures_by_rank.append(
                RankFailure(
                    number,
                    host,
                    failure.ename,
                    failure.evalue,
                    failure.traceback,
                    exception_of(failure, pool),
                    freed=failure.freed or (rank.stopped and rank.interrupted),
                )
            )
    return failures_by_rank


def exception_of(failure: Failure, pool: Pool) -> BaseException | None:
    """Return the exception that a rank raised, or None if it cannot be rebuilt here."""
    packed = failure.exception
    if packed is None or packed.error:
        return None
    try:
        problem = pool.shipper.unpack(packed)
    except Exception:
        return None
    return problem if isinstance(problem, BaseException) else None


def failure(report: Report, pool: Pool, limits: Limits, *, task: bool = False) -> RunError:
    """Create the single error of a failed run."""
    failures = failures_of(report, pool)
    notes = [*lost_notes(report, pool), *report.notes, *missing_notes(report, pool, task)]
    notes += file_notes(report, pool, task)
    names = {*pool.shipper.names(), *pool.namespace}
    missing = missing_modules(failures)
    packages = {name.partition(".")[0] for name in missing}
    magics = magic_names(pool.namespace)
    notes += hints(
        failures,
        {plugin.name for plugin in pool.plugins},
        names,
        magics,
        remote=pool.plan.remote,
        own_modules=[name for name in missing if _is_own_module(name, pool)],
        own_packages=[name for name in packages if _is_own_module(name, pool)],
    )
    root_causes = [item for item in failures if not item.is_secondary]
    if pool.ended is not None and any(item.died == pool.ended for item in failures):
        earlier = [
            f"rank {item.rank}: {item.summary}" for item in root_causes if item.died != pool.ended
        ]
        error: RunError = RunError("\n".join([f"{pool.ended}: {pool.remedy}", *earlier]))
        error.failures = tuple(failures)
        return error
    if report.interrupted and not any(item.died for item in root_causes):
        stopped = {number: rank.stopped_at for number, rank in report.ranks.items() if rank.stopped}
        positions = text.positions(stopped)
        heading = f"interrupted on {rank_words(list(stopped))}" if stopped else "interrupted"
        return RunInterrupted("\n".join([heading, *([positions] if positions else []), *notes]))
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


def magic_names(namespace: Namespace) -> set[str]:
    """Return the notebook's magics as users write them: ``%time``, ``%%time``."""
    get_shell: Any = namespace.get("get_ipython", lambda: None)
    shell = get_shell()
    by_type = shell.magics_manager.magics if shell is not None else {}
    return {
        f"{'%' if type_ == 'line' else '%%'}{name}"
        for type_, names in by_type.items()
        for name in names
    }


def missing_notes(report: Report, pool: Pool, task: bool) -> list[str]:
    """Return a line for each name that a rank missed and the notebook has.

    The cell's text did not show that it needs the name.
    """
    names = {rank.failure.missing for rank in report.ranks.values() if rank.failure is not None}
    space = pool.shipper.namespace
    available = sorted(
        name for name in names if name in space and not is_interactive_name(name, space[name])
    )
    return [
        f"the notebook has {name}: {'pass it as an argument' if task else f'--push {name}'}"
        for name in available
    ]


def file_notes(report: Report, pool: Pool, task: bool) -> list[str]:
    """Return a line on a file that a rank lacks and the notebook has.

    The two work in different folders or on different machines.
    """
    try:
        cwd = Path.cwd()
    except OSError:  # the folder was deleted
        return []
    for number, rank in sorted(report.ranks.items()):
        missing = rank.failure.missing_files if rank.failure is not None else None
        if missing is None:
            continue
        folder = Path(missing.folder)
        local_file = next((path for path in missing.paths if _exists(cwd / path)), "")
        if not local_file:
            continue
        if pool.plan.remote:
            host = pool.agents.ranks[number].hostname
            origin = (
                "on the notebook's machine"
                if Path(local_file).is_absolute()
                else "in the notebook's folder"
            )
            folder_text, target = (
                _abbreviate_home(path, missing.home) for path in (folder, folder / local_file)
            )
            return [
                f"{local_file} is {origin}, and rank {number} works in {folder_text} on {host}: "
                "copy it with "
                f"`%sky_put {_quote(local_file)} {_quote(target)}`, or use an absolute path if "
                f"{host} shares that folder"
            ]
        if Path(local_file).is_absolute() or (folder.is_dir() and folder.samefile(cwd)):
            continue
        remedy = "" if task else f"write `%cd {cwd}` in a broadcast cell, or "
        return [
            f"the ranks work in {folder}, and the notebook in {cwd}, which has {local_file}: "
            f"{remedy}use an absolute path"
        ]
    return []


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # not a valid path: the name is too long, or has a null byte
        return False


def _abbreviate_home(path: Path, home: str) -> str:
    """Return a path on a host as a user writes it; `~` also works where the home folder differs."""
    absolute = os.path.normpath(path)
    return f"~{absolute.removeprefix(home)}" if Path(absolute).is_relative_to(home) else absolute


def _quote(path: str) -> str:
    """Quote a path for a magic's line; `~` needs no quotes."""
    return (
        path if shlex.quote(path.replace("~", "")) == path.replace("~", "") else shlex.quote(path)
    )


def lost_notes(report: Report, pool: Pool) -> list[str]:
    """Return lines that list the values lost in the failure."""
    dead = [number for number, rank in report.ranks.items() if rank.died is not None]
    if not dead:
        return []
    if pool.ended is not None:
        return [f"{pool.ended}: {pool.remedy}"]
    if pool.state is State.LOST and not pool.replacement.lost:
        return [messages.suggest_after_loss(pool.name)]
    if lost_nodes := range(len(pool.plan.hosts)) if pool.state is State.LOST else pool.agents.gone:
        lost = [rank for index in lost_nodes for rank in pool.agents.ranks_of(index)]
        return messages.suggestions_without_ranks(
            lost, pool.world_size, replaced=pool.plan.request.replace
        )
    if pool.inseparable:
        names = ", ".join(pool.inseparable)
        return [
            f"all ranks are being restarted, without variables: {names} cannot continue with some "
            "of them"
        ]
    others_text = "; the others keep theirs" if len(dead) < pool.world_size else ""
    restarted = (
        f"{rank_words(dead)} {verb_form(len(dead), 'is', 'are')} being restarted without "
        f"variables{others_text}"
    )
    killed = [number for number in dead if report.ranks[number].killed]
    unresponsive = (
        [f"{rank_words(killed)} did not stop and {verb_form(len(killed), 'was', 'were')} killed"]
        if killed
        else []
    )
    return [*unresponsive, restarted, *clone_notes(dead, pool)]


def _is_package(name: str) -> bool:
    """Return True if a name is an installed package, as ``import torch`` binds it.

    The next import restores it, so it is not lost.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and in_packages(spec.origin or "")


MOST_CLONED = 12
"""Maximum number of names in the line that copies lost variables."""


def clone_notes(dead: Sequence[int], pool: Pool) -> list[str]:
    """Return a line with the command that copies the variables of dead ranks from a live rank."""
    bindings = pool.shipper.bindings
    lost_names = frozenset[str]().union(*(bindings.bound_by_cells(rank) for rank in dead))
    space = pool.shipper.namespace
    lost_names -= {
        name
        for name in lost_names
        if name.startswith("_")
        or name in sys.stdlib_module_names
        or _is_package(name)
        or isinstance(space.get(name), types.ModuleType)
    }
    names_by_rank = {
        rank: lost_names & bindings.bound_by_cells(rank)
        for rank in range(pool.world_size)
        if rank not in dead
    }
    source = max(names_by_rank, key=lambda rank: (len(names_by_rank[rank]), -rank), default=None)
    if source is None or not names_by_rank[source]:
        return []
    names = sorted(names_by_rank[source])
    command = messages.clone_command(dead, source, names[:MOST_CLONED])
    # put the command at the end of the line, where it is easy to copy
    limit_note = f" (the first {MOST_CLONED} of {len(names)})" if len(names) > MOST_CLONED else ""
    return [f"copy rank {source}'s variables to {rank_words(dead)}{limit_note}: {command}"]
