"""Packages of a pool's nodes: what a run needs and they lack is installed beside the running ranks, before anything is sent."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from skymagic.bootstrap.own import NoWheel, OwnWheel, own_wheel
from skymagic.bootstrap.provision import Addition
from skymagic.bootstrap.requirements import own_names, pinned, preferred
from skymagic.data.capture import installed
from skymagic.data.capture.imports import ModulesNeeded
from skymagic.display.screen import Screen
from skymagic.errors import PackagesError, RequestError
from skymagic.plan import distributions
from skymagic.plan.distributions import Distribution, Environment, canonical, differs, lacks
from skymagic.plan.image import is_place
from skymagic.pool.resources import PoolResources, data_plane
from skymagic.pool.status import SharedStatus
from skymagic.wire.threads import failures, run_all

if TYPE_CHECKING:
    from skymagic.cluster import Node
    from skymagic.files.upload import DataPlane

ANSWER_TIMEOUT = 10.0
"""Seconds in which a rank must tell what is installed."""

ATTEMPTS = 2
"""How often a node is asked."""

Words = Callable[[str, str], None]
"""Gets each line that an installer prints, after the name of its node."""


@dataclass(eq=False, repr=False)
class Packages:
    """Knows what the nodes of one pool have; nothing is asked of them before a run needs it."""

    _status: SharedStatus
    _resources: PoolResources
    _settled: set[str] = field(default_factory=set)
    """Dotted names of modules that the nodes have, or with which nothing can be done."""
    _unknown: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Names that no distribution here has, with the state of this environment when that was looked up."""
    _nodes: dict[int, Environment] = field(default_factory=dict)
    """By index of the machine, what is there."""
    _own: dict[int, dict[str, str]] = field(default_factory=dict)
    """By index of the machine, name → digest of the notebook's own distributions there."""
    _sources: dict[str, object] = field(default_factory=dict)
    """First names of the modules of these → the state of their source when the nodes had it."""
    _noted: set[Distribution] = field(default_factory=set)
    """What the user knows to be of another version there."""
    _imported: set[str] = field(default_factory=set)
    """Modules that ranks had imported when something was installed last."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by who installs."""

    # -- what runs need ----------------------------------------------------------------------------------------------

    def unsettled(self, names: frozenset[str]) -> frozenset[str]:
        """Names of modules that the nodes may lack, among these; microseconds where there are none."""
        if self._sources and self._status.defaults.packages != "off":
            self._settled -= self._changed(names)
        if (
            names <= self._settled
            or not self._status.plan.remote
            or self._status.defaults.packages == "off"
        ):
            return frozenset()
        self._settled |= {
            name for name in names if name.partition(".")[0] in sys.stdlib_module_names
        }
        if names <= self._settled:
            return frozenset()
        now = installed.stamp()
        left = frozenset(name for name in names - self._settled if self._unknown.get(name) != now)
        return frozenset() if left and self._nodes and self._are_there(left) else left

    def _changed(self, names: frozenset[str]) -> set[str]:
        """Names, among these, whose source differs from what the nodes have; a look at each file of it."""
        tops = {name.partition(".")[0] for name in names} & set(self._sources)
        changed = {top for top in tops if installed.source_stamp(top) != self._sources[top]}
        return {name for name in names if name.partition(".")[0] in changed}

    def _are_there(self, names: frozenset[str]) -> bool:
        """Whether all nodes are known to have these, in the notebook's versions: then the run need not be prepared twice."""
        found, unknown = distributions.distributions(names, installed.here())
        if unknown or any(
            lacks(one, there) or differs(one, there)
            for one in found
            for there in self._nodes.values()
        ):
            return False
        if any(one.key in there for one in found for there in self._own.values()):
            return False
        self._settled |= names
        return True

    def settle(self, needed: ModulesNeeded, screen: Screen, cancelled: Callable[[], bool]) -> None:
        """See that all nodes have what a run needs.

        Args:
            screen: where it is said that something is installed, or is of another version there.
            cancelled: whether the user has stopped the run.

        Raises:
            PackagesError: something is missing on a node and cannot be installed, or shall not be; nothing was sent.
        """
        own = {name.partition(".")[0] for name in needed.own}
        foreign = {name for name in needed.names if name.partition(".")[0] not in own}
        found, unknown = distributions.distributions(foreign, installed.here())
        with self._lock:
            if found:
                if silent := self._look():
                    raise PackagesError(unanswered(silent))
                self._provide(found, screen, cancelled)
                self._note_versions(found, screen)
            for one in found:
                if any(one.key in there for there in self._own.values()):
                    top = one.module.partition(".")[0]
                    self._sources[top] = installed.source_stamp(top)
            self._unknown.update(dict.fromkeys(unknown, installed.stamp()))
            self._settled |= needed.names - unknown

    def _look(self, *, again: bool = False) -> list[str]:
        """Ask the nodes of which it is not known what is there, or all of them; the names of those that do not answer."""
        agents = self._resources.agents
        wanted = [index for index in range(len(agents.nodes)) if again or index not in self._nodes]
        ranks = [
            next((rank for rank in agents.ranks_of(index) if agents.ranks[rank].ready), None)
            for index in wanted
        ]
        asked = {rank: index for rank, index in zip(ranks, wanted, strict=True) if rank is not None}
        for _ in range(ATTEMPTS if asked else 0):
            for rank, told in agents.ask(asked, "installed", ANSWER_TIMEOUT).items():
                if told and "versions" in told:
                    index = asked.pop(rank)
                    self._nodes[index] = Environment(
                        told["versions"], dict.fromkeys(told["modules"], ())
                    )
                    self._own.setdefault(index, dict(agents.nodes[index].own))
        return [agents.nodes[index].name for index in sorted(asked.values())]

    def _provide(
        self, found: Sequence[Distribution], screen: Screen, cancelled: Callable[[], bool]
    ) -> None:
        lacking = {
            index: [one for one in found if lacks(one, there)]
            for index, there in sorted(self._nodes.items())
        }
        wheels = self._wheels(found, {index for index, ones in lacking.items() if ones}, screen)
        missing = {index for index, ones in lacking.items() if ones or wheels[index]}
        if not missing:
            return
        every = {each.name: each for index in missing for each in wheels[index]}
        wanted = sorted(
            {str(one) for index in missing for one in lacking[index] if one.key not in every}
        )
        wanted += [f"{each.name} {each.version}" for each in every.values()]
        nodes = [self._resources.agents.nodes[index] for index in sorted(missing)]
        names = [node.name for node in nodes]
        needed = sorted({one for ones in lacking.values() for one in ones})
        if foreign := [node for node in nodes if node.install is None]:
            raise PackagesError(refused(needed, names, [node.python for node in foreign]))
        if self._status.defaults.packages == "ask":
            raise PackagesError(asks(needed or found, names))
        what = f"installing {', '.join(wanted)} on {', '.join(names)} …"
        screen.status(f"[{what}]")
        begun = time.monotonic()
        additions = {
            index: addition(lacking[index], self._nodes[index], wheels[index])
            for index in sorted(missing)
        }
        problems = self._install(additions, lambda node, line: None, cancelled)
        if problems:
            screen.status(f"[{what} failed]", last=True)
            raise PackagesError(
                "\n".join(
                    [f"{', '.join(wanted)} cannot be installed; nothing was sent:", *problems]
                )
            )
        screen.status(f"[{what} {time.monotonic() - begun:.1f} s]", last=True)
        for one in found:
            if one.key in every and one.module.partition(".")[0] in self._imported:
                screen.note(
                    f"[{one.name} has changed since the ranks imported it: %sky_restart loads the new version]\n"
                )
        self._look(again=True)

    def _wheels(
        self, found: Sequence[Distribution], without: set[int], screen: Screen
    ) -> dict[int, list[OwnWheel]]:
        """By node, the notebook's own distributions that it lacks or has of another source; what was put there by hand stays.

        Args:
            without: nodes that lack some of what is needed, and perhaps what that needs in turn.
        """
        wheels: dict[int, list[OwnWheel]] = {index: [] for index in self._nodes}
        for name in own_names([one.name for one in found]):
            lacking = {index for index in self._nodes if name not in self._nodes[index].versions}
            known = {index for index in self._nodes if name in self._own.get(index, {})}
            if not (lacking & without or known):
                continue
            node = self._resources.agents.nodes[min(lacking | known)]
            if node.install is None:
                continue  # the interpreter is used as it is: this is said of all that it lacks
            try:
                wheel = own_wheel(name, lambda words: screen.status(f"[{words}]"))
            except NoWheel as problem:
                raise PackagesError(no_wheel(name, str(problem))) from None
            for index in sorted((lacking & without) | known):
                if self._own.get(index, {}).get(name) != wheel.digest:
                    wheels[index].append(wheel)
        return wheels

    def _note_versions(self, found: Iterable[Distribution], screen: Screen) -> None:
        for one in found:
            others: dict[str, list[str]] = {}
            for index, there in sorted(self._nodes.items()):
                if theirs := differs(one, there):
                    others.setdefault(theirs, []).append(self._resources.agents.nodes[index].name)
            if others and one not in self._noted:
                self._noted.add(one)
                ours = all(node.install is not None for node in self._resources.agents.nodes)
                screen.note(f"[{other_version(one, others, ours=ours)}]\n")

    # -- what users ask for ------------------------------------------------------------------------------------------

    def install(self, packages: Sequence[str], words: Words) -> list[str]:
        """Install packages on all nodes; the ranks can import them at once.

        Args:
            packages: requirements as pip takes them.
            words: gets what the installer prints.

        Returns:
            Sentences on what ranks have imported of another version.

        Raises:
            PackagesError: it could not be done, or is not for skymagic to do; with the command that does it.
        """
        nodes = self._resources.agents.nodes
        if not self._status.plan.remote:
            raise PackagesError(notebooks_own(self._status.name, " ".join(["install", *packages])))
        if named := [node for node in nodes if node.install is None]:
            raise PackagesError(
                named_interpreter([node.name for node in named], named[0].python, packages)
            )
        with self._lock:
            self._look()
            before = dict(self._nodes)
            problems = self._install(
                dict.fromkeys(range(len(nodes)), by_hand(packages)), words, lambda: False
            )
            self._look(again=True)
            self._settled.clear()
            if problems:
                raise PackagesError("\n".join(problems))
            return self._replaced(before)

    def listed(self) -> dict[str, Environment]:
        """By name of node, what is installed there; nodes that do not answer are left out.

        Raises:
            PackagesError: it is the notebook's own environment.
        """
        if not self._status.plan.remote:
            raise PackagesError(notebooks_own(self._status.name, "list"))
        with self._lock:
            self._look(again=True)
            return {
                self._resources.agents.nodes[index].name: there
                for index, there in sorted(self._nodes.items())
            }

    def _install(
        self, additions: Mapping[int, Addition], words: Words, cancelled: Callable[[], bool]
    ) -> list[str]:
        """Install on some nodes, side by side, and let the ranks look again; what went wrong, by node."""
        interrupted = threading.Event()

        def stopped() -> bool:
            return interrupted.is_set() or cancelled()

        plane = data_plane(self._resources) if len(additions) > 1 else None
        carried: list[str] = []

        def carry(plane: DataPlane, node: Node, path: Path) -> list[str]:
            """Bring a file to all nodes, unless another thread has brought one of this content."""

            def progress(sent: int) -> None:
                if stopped():
                    raise KeyboardInterrupt

            carried.append(plane.put([_mapped(path)], progress))
            return plane.places(node, carried[-1])

        def one(node: Node, addition: Addition) -> None:
            assert node.install is not None
            if plane is not None:
                addition = replace(addition, carry=partial(carry, plane, node))
            node.install(addition, partial(words, node.name), stopped)

        agents = self._resources.agents
        try:
            outcomes = run_all(
                [
                    partial(one, agents.nodes[index], addition)
                    for index, addition in additions.items()
                ]
            )
        except BaseException:
            interrupted.set()  # the threads see it within a second
            raise
        finally:
            if plane is not None:
                plane.drop(carried)
        self._imported = self._rescan()
        for (index, addition), outcome in zip(additions.items(), outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                self._own.setdefault(index, {}).update(
                    {each.name: each.digest for each in addition.own}
                )
        problems = failures(outcomes)
        if stop := next(
            (problem for problem in problems if isinstance(problem, KeyboardInterrupt)), None
        ):
            raise stop
        return [str(problem) for problem in problems]

    def _rescan(self) -> set[str]:
        """Let all ranks find what was installed; the names of modules that some rank had imported before."""
        agents = self._resources.agents
        ready = [rank for rank, state in agents.ranks.items() if state.ready]
        return {
            name
            for told in agents.ask(ready, "rescan", ANSWER_TIMEOUT).values()
            for name in told or ()
        }

    def _replaced(self, before: Mapping[int, Environment]) -> list[str]:
        """Sentences on distributions that are of another version now, where ranks have imported the earlier one."""
        modules: dict[str, set[str]] = {}
        for module, names in installed.here().modules.items():
            for name in names:
                modules.setdefault(canonical(name), set()).add(module.partition(".")[0])
        changed = {
            (name, old, self._nodes[index].versions[name])
            for index, there in before.items()
            for name, old in there.versions.items()
            if self._nodes[index].versions.get(name, old) != old
        }
        return [
            f"{name} {old} is imported on the ranks already: {new} takes effect after %sky_restart"
            for name, old, new in sorted(changed)
            if self._imported & modules.get(name, {name.replace("-", "_")})
        ]


def _mapped(path: Path) -> memoryview:
    """A file's bytes, which are not read into memory at once."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


# -- words -----------------------------------------------------------------------------------------------------------


def requirement(needed: Distribution) -> str:
    """What an installer is asked for: the notebook's version, whatever the build."""
    return f"{needed.name}=={needed.version.partition('+')[0]}"


def addition(
    needed: Iterable[Distribution], there: Environment, wheels: Sequence[OwnWheel] = ()
) -> Addition:
    """What a node gets for a run: nothing changes of what is there already, and perhaps imported.

    Args:
        wheels: of the notebook's own distributions, also those that are there and have changed.
    """
    mine = {each.name for each in wheels}
    names = [one.name for one in needed if one.key not in mine]
    kept = [
        f"{name}=={version}" for name, version in sorted(there.versions.items()) if name not in mine
    ]
    preferences = [
        text for text in preferred([*names, *mine]) if text.partition("==")[0] not in there.versions
    ]
    asked = [requirement(one) for one in needed if one.key not in mine]
    return Addition(tuple(asked), tuple(kept), tuple(preferences), own=tuple(wheels))


def by_hand(packages: Sequence[str]) -> Addition:
    """What a user has asked for; names without a version get the notebook's, files go along, and the notebook's own as wheels.

    Raises:
        RequestError: there is no such file.
        PackagesError: no wheel of the notebook's own can be made.
    """
    paths = [Path(text).expanduser() for text in packages if is_place(text) and "://" not in text]
    if lost := [str(path) for path in paths if not path.is_file()]:
        raise RequestError([f"{path} is not a file here" for path in lost])
    names = [text for text in packages if not is_place(text) or "://" in text]
    try:
        wheels = tuple(map(own_wheel, own_names(names)))
    except NoWheel as problem:
        raise PackagesError(str(problem)) from None
    return Addition(pinned(names), (), preferred(names), tuple(paths), wheels)


def refused(needed: Sequence[Distribution], nodes: Sequence[str], pythons: Sequence[str]) -> str:
    """Why a run is not begun whose packages are missing in interpreters that are used as they are; pure."""
    wanted, where = " ".join(map(requirement, needed)), ", ".join(nodes)
    commands = dict.fromkeys(f"{python} -m pip install {wanted}" for python in pythons)
    return (
        f"the cell needs {', '.join(map(str, needed))}, which {where} {'lack' if len(nodes) > 1 else 'lacks'}; nothing was sent.\n"
        f"The interpreter there is used as it is, and skymagic does not change it. Run there: {'; '.join(commands)}\n"
        '(%config SkyMagic.packages = "off" runs the cell anyway)'
    )


def unanswered(nodes: Sequence[str]) -> str:
    """Why a run is not begun when nobody knows what nodes have; pure."""
    have = "have" if len(nodes) > 1 else "has"
    return (
        f"{', '.join(nodes)} {have} not reported within {ATTEMPTS * ANSWER_TIMEOUT:.0f} s what is installed there; nothing was sent.\n"
        "A rank does not answer while native code holds its interpreter (%sky_stacks): run the cell again, or %sky_restart"
    )


def asks(needed: Sequence[Distribution], nodes: Sequence[str]) -> str:
    """Why a run is not begun where the user wants to be asked; pure."""
    return (
        f"the cell needs {', '.join(map(str, needed))}, which {', '.join(nodes)} {'lack' if len(nodes) > 1 else 'lacks'}; "
        f"nothing was sent. Install it with: %sky_pip install {' '.join(map(requirement, needed))}\n"
        '(%config SkyMagic.packages = "sync" installs without asking)'
    )


def no_wheel(name: str, problem: str) -> str:
    """Why a run is not begun that needs one of the notebook's own distributions, of which no wheel can be made; pure."""
    return (
        f"the cell needs {name}, and nothing was sent: {problem}\n"
        f"(send an existing wheel to the nodes with %sky_pip install wheels/{name.replace('-', '_')}-….whl)"
    )


def other_version(needed: Distribution, nodes: Mapping[str, Sequence[str]], *, ours: bool) -> str:
    """A note that a package is of another version on nodes; pure.

    Args:
        nodes: version there → names of nodes.
        ours: whether skymagic may install there.
    """
    there = ", ".join(f"{version} on {', '.join(names)}" for version, names in nodes.items())
    said = f"{needed.name} is {needed.version} here and {there}"
    return (
        f"{said}: %sky_pip install {requirement(needed)}, then %sky_restart, makes them equal"
        if ours
        else said
    )


def notebooks_own(pool: str, command: str) -> str:
    """Why a pool of this machine needs no installation; pure."""
    return f"the ranks of pool {pool!r} run in the notebook's own environment: %pip {command}"


def named_interpreter(nodes: Sequence[str], python: str, packages: Sequence[str]) -> str:
    """Why nothing is installed into an interpreter that the user has named; pure."""
    command = f"{python} -m pip install {' '.join(packages)}"
    return f"{python} on {', '.join(nodes)} is used as it is, and skymagic does not change it. Run there: {command}"
