"""Packages of a pool's nodes: install what a run needs and a node lacks before anything is sent.

The installation runs in parallel with the running ranks.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from skymagic.bootstrap.local_wheels import LocalWheel, NoWheel, local_wheel
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
from skymagic.wire import queries
from skymagic.wire.threads import failures, run_all

if TYPE_CHECKING:
    from skymagic.cluster import Node
    from skymagic.content.files.upload import DataPlane

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT = 10.0
"""Seconds for a rank to report which packages are installed."""

ATTEMPTS = 2
"""Number of attempts to query a node."""

Words = Callable[[str, str], None]
"""Called with a node's name and each line that its installer prints."""


@dataclass(eq=False, repr=False)
class Packages:
    """Packages on the nodes of one pool; nodes are queried only when a run needs it."""

    _status: SharedStatus
    _resources: PoolResources
    _settled: set[str] = field(default_factory=set)
    """Dotted names of modules that the nodes have, or that cannot be provided."""
    _unknown: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Names that no local distribution provides → stamp of this environment at that time."""
    _nodes: dict[int, Environment] = field(default_factory=dict)
    """Index of a machine → packages installed there."""
    _own: dict[int, dict[str, str]] = field(default_factory=dict)
    """Index of a machine → name → digest of the notebook's own distributions installed there."""
    _sources: dict[str, object] = field(default_factory=dict)
    """Top-level modules of the notebook's own distributions → stamp of the source on the nodes."""
    _noted: set[Distribution] = field(default_factory=set)
    """Distributions whose other version on the nodes was reported to the user."""
    _imported: set[str] = field(default_factory=set)
    """Modules that ranks had already imported at the time of the last installation."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during an installation."""

    # -- before a run -----------------------------------------------------------------------------

    def unsettled(self, names: frozenset[str]) -> frozenset[str]:
        """Filter the names of modules that the nodes may lack; takes microseconds for none."""
        # The user edits these sources between cells: look at their times, and ask for another wheel
        # if they differ. Distributions from an index do not change by themselves.
        if self._sources and self._status.defaults.packages != "off":
            self._settled -= self._changed_modules(names)
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
        # A name that no distribution provided may belong to one that was installed here since; the
        # stamp changes with each installation, and is the only reason to search again.
        now = installed.stamp()
        open_names = frozenset(
            name for name in names - self._settled if self._unknown.get(name) != now
        )
        return (
            frozenset()
            if open_names and self._nodes and self._are_installed(open_names)
            else open_names
        )

    def _changed_modules(self, names: frozenset[str]) -> set[str]:
        """Filter the names whose source files differ from what the nodes have."""
        tops = {name.partition(".")[0] for name in names} & set(self._sources)
        changed = {top for top in tops if installed.source_stamp(top) != self._sources[top]}
        return {name for name in names if name.partition(".")[0] in changed}

    def _are_installed(self, names: frozenset[str]) -> bool:
        """Return True if all nodes are known to have these modules in the notebook's versions.

        In that case the run need not be prepared twice.
        """
        needed, unknown = distributions.distributions(names, installed.current_environment())
        if unknown or any(
            lacks(distribution, environment) or differs(distribution, environment)
            for distribution in needed
            for environment in self._nodes.values()
        ):
            return False
        # the same version does not mean the same source for the notebook's own distributions
        if any(
            distribution.key in environment
            for distribution in needed
            for environment in self._own.values()
        ):
            return False
        self._settled |= names
        return True

    def settle(self, needed: ModulesNeeded, screen: Screen, cancelled: Callable[[], bool]) -> None:
        """Provide all nodes with the packages that a run needs.

        Args:
            screen: shows installations, and packages that a node has in another version.
            cancelled: returns True once the user has stopped the run.

        Raises:
            PackagesError: a package is missing on a node and cannot or must not be installed;
                nothing was sent.
        """
        # modules that travel as source with the run need no distribution
        own = {name.partition(".")[0] for name in needed.own}
        foreign = {name for name in needed.names if name.partition(".")[0] not in own}
        distributions_needed, unknown = distributions.distributions(
            foreign, installed.current_environment()
        )
        # One run at a time: another run that needs the same packages waits, and then finds them.
        with self._lock:
            if distributions_needed:
                # Without an answer nothing is sent: a guess would fail in the middle of the cell.
                if silent := self._ask_nodes():
                    raise PackagesError(
                        explain_unanswered(silent), code="packages-unknown", names=silent
                    )
                self._provide(distributions_needed, screen, cancelled)
                self._note_versions(distributions_needed, screen)
            for distribution in distributions_needed:
                if any(distribution.key in digests for digests in self._own.values()):
                    top = distribution.module.partition(".")[0]
                    self._sources[top] = installed.source_stamp(top)
            self._unknown.update(dict.fromkeys(unknown, installed.stamp()))
            self._settled |= needed.names - unknown

    def _ask_nodes(self, *, again: bool = False) -> list[str]:
        """Ask the nodes what is installed: those not known yet, or all if `again`.

        Returns:
            The names of the nodes that do not answer.
        """
        agents = self._resources.agents
        indexes = [index for index in range(len(agents.nodes)) if again or index not in self._nodes]
        # one rank of each machine: all of them use the same environment
        ranks = [
            next((rank for rank in agents.ranks_of(index) if agents.ranks[rank].ready), None)
            for index in indexes
        ]
        pending = {
            rank: index for rank, index in zip(ranks, indexes, strict=True) if rank is not None
        }
        for _ in range(ATTEMPTS if pending else 0):
            for rank, reply in agents.ask(pending, queries.INSTALLED, ANSWER_TIMEOUT).items():
                if reply is not None:
                    index = pending.pop(rank)
                    self._nodes[index] = Environment(
                        reply.versions, dict.fromkeys(reply.modules, ())
                    )
                    self._own.setdefault(index, dict(agents.nodes[index].own))
        return [agents.nodes[index].name for index in sorted(pending.values())]

    def _provide(
        self, distributions: Sequence[Distribution], screen: Screen, cancelled: Callable[[], bool]
    ) -> None:
        lacking = {
            index: [
                distribution for distribution in distributions if lacks(distribution, environment)
            ]
            for index, environment in sorted(self._nodes.items())
        }
        wheels = self._wheels(
            distributions,
            {index for index, distributions in lacking.items() if distributions},
            screen,
        )
        missing = {
            index for index, distributions in lacking.items() if distributions or wheels[index]
        }
        if not missing:
            return
        own_wheels = {wheel.name: wheel for index in missing for wheel in wheels[index]}
        labels = sorted(
            {
                str(distribution)
                for index in missing
                for distribution in lacking[index]
                if distribution.key not in own_wheels
            }
        )
        labels += [f"{wheel.name} {wheel.version}" for wheel in own_wheels.values()]
        nodes = [self._resources.agents.nodes[index] for index in sorted(missing)]
        names = [node.name for node in nodes]
        needed = sorted(
            {distribution for distributions in lacking.values() for distribution in distributions}
        )
        # All nodes are checked before the first one is changed.
        if foreign := [node for node in nodes if node.install is None]:
            raise PackagesError(
                explain_refusal(needed, names, [node.python for node in foreign]),
                code="packages-missing",
                names=names,
            )
        if self._status.defaults.packages == "ask":
            raise PackagesError(
                install_question(needed or distributions, names),
                code="packages-missing",
                names=names,
            )
        message = f"installing {', '.join(labels)} on {', '.join(names)} …"
        screen.status(f"[{message}]")
        started = time.monotonic()
        additions = {
            index: addition(lacking[index], self._nodes[index], wheels[index])
            for index in sorted(missing)
        }
        problems = self._install(additions, lambda node, line: None, cancelled)
        if problems:
            screen.status(f"[{message} failed]", last=True)
            raise PackagesError(
                "\n".join(
                    [f"{', '.join(labels)} cannot be installed; nothing was sent:", *problems]
                ),
                code="packages-missing",
                names=labels,
            )
        screen.status(f"[{message} {time.monotonic() - started:.1f} s]", last=True)
        # Python does not load a module again; the ranks' objects keep their old classes.
        for distribution in distributions:
            if (
                distribution.key in own_wheels
                and distribution.module.partition(".")[0] in self._imported
            ):
                screen.note(
                    f"[{distribution.name} has changed since the ranks imported it: %sky_restart "
                    "loads the new version]\n"
                )
        self._ask_nodes(again=True)

    def _wheels(
        self, distributions: Sequence[Distribution], without: set[int], screen: Screen
    ) -> dict[int, list[LocalWheel]]:
        """Build the wheels of the notebook's own distributions for nodes that need them.

        A node needs a wheel if it lacks the distribution or has it from another source. Packages
        that were installed on a node by hand are left alone.

        Args:
            without: nodes that lack some of what is needed, and so perhaps its dependencies.

        Returns:
            The wheels by node.
        """
        wheels: dict[int, list[LocalWheel]] = {index: [] for index in self._nodes}
        for name in own_names([distribution.name for distribution in distributions]):
            lacking = {index for index in self._nodes if name not in self._nodes[index].versions}
            installed_by_us = {index for index in self._nodes if name in self._own.get(index, {})}
            if not (lacking & without or installed_by_us):
                continue
            node = self._resources.agents.nodes[min(lacking | installed_by_us)]
            if node.install is None:
                continue  # skymagic does not change it: one message lists everything that it lacks
            try:
                wheel = local_wheel(name, lambda message: screen.status(f"[{message}]"))
            except NoWheel as problem:
                raise PackagesError(
                    no_wheel(name, str(problem)), code="no-wheel", names=[name]
                ) from None
            for index in sorted((lacking & without) | installed_by_us):
                # by the digest of the source: the version of a project is rarely changed with its
                # code
                if self._own.get(index, {}).get(name) != wheel.digest:
                    wheels[index].append(wheel)
        return wheels

    def _note_versions(self, distributions: Iterable[Distribution], screen: Screen) -> None:
        for distribution in distributions:
            nodes_by_version: dict[str, list[str]] = {}
            for index, environment in sorted(self._nodes.items()):
                if version := differs(distribution, environment):
                    nodes_by_version.setdefault(version, []).append(
                        self._resources.agents.nodes[index].name
                    )
            if nodes_by_version and distribution not in self._noted:
                self._noted.add(distribution)
                may_install = all(node.install is not None for node in self._resources.agents.nodes)
                screen.note(
                    f"[{other_version(distribution, nodes_by_version, in_notebook=may_install)}]\n"
                )

    # -- %sky_pip ---------------------------------------------------------------------------------

    def install(self, packages: Sequence[str], report: Words) -> list[str]:
        """Install packages on all nodes; ranks can import them at once.

        Args:
            packages: requirements in pip's syntax.
            report: called with the installer's output.

        Returns:
            Sentences on packages that ranks have imported in another version.

        Raises:
            PackagesError: the installation failed or is not skymagic's to do; the message names the
                command that does it.
        """
        nodes = self._resources.agents.nodes
        if not self._status.plan.remote:
            raise PackagesError(
                notebooks_own(self._status.name, " ".join(["install", *packages])),
                code="notebook-environment",
                names=packages,
            )
        if fixed_nodes := [node for node in nodes if node.install is None]:
            raise PackagesError(
                named_interpreter(
                    [node.name for node in fixed_nodes], fixed_nodes[0].python, packages
                ),
                code="named-interpreter",
                names=packages,
            )
        with self._lock:
            self._ask_nodes()
            before = dict(self._nodes)
            problems = self._install(
                dict.fromkeys(range(len(nodes)), manual_addition(packages)), report, lambda: False
            )
            # also after a failure: some nodes may have the packages by now, in whatever version
            self._ask_nodes(again=True)
            self._settled.clear()
            if problems:
                raise PackagesError("\n".join(problems))
            return self._replaced_while_imported(before)

    def environments(self) -> dict[str, Environment]:
        """Return the packages installed on each node, by name of the node.

        Nodes that do not answer are omitted.

        Raises:
            PackagesError: the pool runs in the notebook's own environment.
        """
        if not self._status.plan.remote:
            raise PackagesError(
                notebooks_own(self._status.name, "list"), code="notebook-environment"
            )
        with self._lock:
            self._ask_nodes(again=True)
            return {
                self._resources.agents.nodes[index].name: environment
                for index, environment in sorted(self._nodes.items())
            }

    def _install(
        self, additions: Mapping[int, Addition], report: Words, cancelled: Callable[[], bool]
    ) -> list[str]:
        """Install on some nodes in parallel, and let the ranks rescan.

        Returns:
            The errors.
        """
        interrupted = threading.Event()

        logger.info("packages are installed: nodes=%s", len(self._resources.agents.nodes))

        # An interrupt reaches the main thread only, and the installers run on threads of their own.
        def stopped() -> bool:
            return interrupted.is_set() or cancelled()

        # several nodes get files from each other: the notebook uploads each of them once
        plane = data_plane(self._resources) if len(additions) > 1 else None
        uploads: list[str] = []

        def send_by_store(plane: DataPlane, node: Node, path: Path) -> list[str]:
            """Send a file to the stores of all nodes, unless another thread has sent it."""

            def progress(sent: int) -> None:
                if stopped():
                    raise KeyboardInterrupt

            uploads.append(plane.put([_map_file(path)], progress))
            return plane.paths(node, uploads[-1])

        def install(node: Node, addition: Addition) -> None:
            assert node.install is not None
            if plane is not None:
                addition = replace(addition, send_by_store=partial(send_by_store, plane, node))
            node.install(addition, partial(report, node.name), stopped)

        agents = self._resources.agents
        try:
            outcomes = run_all(
                [
                    partial(install, agents.nodes[index], addition)
                    for index, addition in additions.items()
                ]
            )
        except BaseException:
            interrupted.set()  # the threads notice within a second
            raise
        finally:
            if plane is not None:
                plane.drop(uploads)
        # also after failures on some nodes: on the others, ranks must not see the old listings that
        # Python's import system has cached
        self._imported = self._rescan()
        for (index, addition), outcome in zip(additions.items(), outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                self._own.setdefault(index, {}).update(
                    {wheel.name: wheel.digest for wheel in addition.own}
                )
        problems = failures(outcomes)
        # an installer that was stopped reports an interrupt, which is no failure of a node
        if interrupt := next(
            (problem for problem in problems if isinstance(problem, KeyboardInterrupt)), None
        ):
            raise interrupt
        return [str(problem) for problem in problems]

    def _rescan(self) -> set[str]:
        """Let all ranks find the installed packages.

        Returns:
            The modules that any rank had imported before.
        """
        agents = self._resources.agents
        ready = [rank for rank, state in agents.ranks.items() if state.ready]
        return {
            name
            for modules in agents.ask(ready, queries.RESCAN, ANSWER_TIMEOUT).values()
            for name in modules or ()
        }

    def _replaced_while_imported(self, before: Mapping[int, Environment]) -> list[str]:
        """Describe distributions that changed version while ranks have the earlier one imported."""
        modules: dict[str, set[str]] = {}
        for module, names in installed.current_environment().modules.items():
            for name in names:
                modules.setdefault(canonical(name), set()).add(module.partition(".")[0])
        changed = {
            (name, old, self._nodes[index].versions[name])
            for index, environment in before.items()
            for name, old in environment.versions.items()
            if self._nodes[index].versions.get(name, old) != old
        }
        return [
            f"{name} {old} is imported on the ranks already: {new} takes effect after %sky_restart"
            for name, old, new in sorted(changed)
            if self._imported & modules.get(name, {name.replace("-", "_")})
        ]


def _map_file(path: Path) -> memoryview:
    """Map a file into memory without reading it at once."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


# -- requirements and messages --------------------------------------------------------------------


def requirement(needed: Distribution) -> str:
    """Return the requirement for the notebook's version of a distribution, for any build."""
    # without the local version, as in 2.8.0+cpu: the node may need another build
    return f"{needed.name}=={needed.version.partition('+')[0]}"


def addition(
    needed: Iterable[Distribution], environment: Environment, wheels: Sequence[LocalWheel] = ()
) -> Addition:
    """Build what a node gets for a run.

    Installed packages stay unchanged, because ranks may have imported them.

    Args:
        wheels: wheels of the notebook's own distributions, including installed ones that have
            changed.
    """
    own_wheel_names = {wheel.name for wheel in wheels}
    names = [
        distribution.name for distribution in needed if distribution.key not in own_wheel_names
    ]
    # Nothing that is installed there may change: ranks have imported it, and a second version on
    # disk would mix with the loaded one.
    constraints = [
        f"{name}=={version}"
        for name, version in sorted(environment.versions.items())
        if name not in own_wheel_names
    ]
    preferences = [
        text
        for text in preferred([*names, *own_wheel_names])
        if text.partition("==")[0] not in environment.versions
    ]
    requirements = [
        requirement(distribution)
        for distribution in needed
        if distribution.key not in own_wheel_names
    ]
    return Addition(tuple(requirements), tuple(constraints), tuple(preferences), own=tuple(wheels))


def manual_addition(packages: Sequence[str]) -> Addition:
    """Build what a user has asked to install.

    Names without a version get the notebook's version, files are uploaded, and the notebook's own
    distributions are sent as wheels.

    Raises:
        RequestError: a file does not exist.
        PackagesError: a wheel of one of the notebook's own distributions cannot be built.
    """
    paths = [Path(text).expanduser() for text in packages if is_place(text) and "://" not in text]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise RequestError([f"{path} is not a file here" for path in missing])
    names = [text for text in packages if not is_place(text) or "://" in text]
    try:
        wheels = tuple(map(local_wheel, own_names(names)))
    except NoWheel as problem:
        raise PackagesError(str(problem)) from None
    return Addition(pinned(names), (), preferred(names), tuple(paths), wheels)


def explain_refusal(
    needed: Sequence[Distribution], nodes: Sequence[str], pythons: Sequence[str]
) -> str:
    """Explain that packages are missing in an interpreter that skymagic does not change; pure."""
    requirements, hosts = " ".join(map(requirement, needed)), ", ".join(nodes)
    commands = dict.fromkeys(f"{python} -m pip install {requirements}" for python in pythons)
    return (
        f"the cell needs {', '.join(map(str, needed))}, which {hosts} "
        f"{'lack' if len(nodes) > 1 else 'lacks'}; nothing was sent.\n"
        "The interpreter there is used as it is, and skymagic does not change it. Run there: "
        f"{'; '.join(commands)}\n"
        '(%config SkyMagic.packages = "off" runs the cell anyway)'
    )


def explain_unanswered(nodes: Sequence[str]) -> str:
    """Explain that nodes did not report their packages; pure."""
    have = "have" if len(nodes) > 1 else "has"
    return (
        f"{', '.join(nodes)} {have} not reported within {ATTEMPTS * ANSWER_TIMEOUT:.0f} s what is "
        "installed there; nothing was sent.\n"
        "A rank does not answer while native code holds its interpreter (%sky_stacks): run the "
        "cell again, or %sky_restart"
    )


def install_question(needed: Sequence[Distribution], nodes: Sequence[str]) -> str:
    """Explain that the user must install missing packages (`packages = "ask"`); pure."""
    return (
        f"the cell needs {', '.join(map(str, needed))}, which {', '.join(nodes)} "
        f"{'lack' if len(nodes) > 1 else 'lacks'}; "
        "nothing was sent. Install it with: %sky_pip install "
        f"{' '.join(map(requirement, needed))}\n"
        '(%config SkyMagic.packages = "sync" installs without asking)'
    )


def no_wheel(name: str, problem: str) -> str:
    """Explain that no wheel can be built of one of the notebook's own distributions; pure."""
    return (
        f"the cell needs {name}, and nothing was sent: {problem}\n"
        "(send an existing wheel to the nodes with %sky_pip install "
        f"wheels/{name.replace('-', '_')}-….whl)"
    )


def other_version(
    needed: Distribution, nodes: Mapping[str, Sequence[str]], *, in_notebook: bool
) -> str:
    """Note that nodes have another version of a package; pure.

    Args:
        nodes: version on the node → names of the nodes.
        in_notebook: True if skymagic may install there.
    """
    versions = ", ".join(f"{version} on {', '.join(names)}" for version, names in nodes.items())
    message = f"{needed.name} is {needed.version} here and {versions}"
    return (
        f"{message}: %sky_pip install {requirement(needed)}, then %sky_restart, makes them equal"
        if in_notebook
        else message
    )


def notebooks_own(pool: str, command: str) -> str:
    """Explain that a pool on this machine shares the notebook's packages; pure."""
    return f"the ranks of pool {pool!r} run in the notebook's own environment: %pip {command}"


def named_interpreter(nodes: Sequence[str], python: str, packages: Sequence[str]) -> str:
    """Explain that nothing is installed into an interpreter that the user has named; pure."""
    command = f"{python} -m pip install {' '.join(packages)}"
    return (
        f"{python} on {', '.join(nodes)} is used as it is, and skymagic does not change it. Run "
        f"there: {command}"
    )
