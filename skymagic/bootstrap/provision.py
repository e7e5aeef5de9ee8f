"""Idempotent provisioning of a host: probe, environment, skymagic's code; what is there is reused."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path

from skymagic.bootstrap import uv, wheel
from skymagic.bootstrap.additions import Addition, add
from skymagic.bootstrap.facts import Facts, parse
from skymagic.bootstrap.install import UPLOADED, InstallPlan, install_script, plan_install, prepare_script
from skymagic.bootstrap.listing import packages
from skymagic.bootstrap.messages import Failure, blames_cache, lacks_python, refusals
from skymagic.bootstrap.own import NoWheel, OwnWheel, own_wheel
from skymagic.bootstrap.probe import probe_script
from skymagic.bootstrap.progress import InstallProgress
from skymagic.bootstrap.remote import Installation, RemoteShell, Report, upload
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.versions import own, pinned, preferred
from skymagic.bootstrap.wheelhouse import Wheelhouse
from skymagic.errors import HostError, RequestError
from skymagic.plan.image import Image, PipIndex, is_place, project
from skymagic.plugins._torch.plugin import DEFAULT_CUDA, WHEELS

RANK_DEPENDENCIES = {
    "ipyparallel": ">=9,<10",
    "ipykernel": ">=6.29",
    "ipython": ">=8.18",
    "cloudpickle": ">=3.1",
    "xxhash": ">=3",
    "packaging": "",
}
"""What ranks need of skymagic's dependencies. A new environment gets the notebook's own versions, for they talk to each
other; an interpreter that is used as it is may have any of these."""

TORCH_BUILD = re.compile(re.escape(WHEELS) + r"(cpu|xpu|cu\d+|rocm[\d.]+)/?")
"""PyTorch's own indexes, each of one build: which of them fits is the node's matter."""
CLOCK_SKEW_SECONDS = 120
"""Clock skew above which it is reported."""


@dataclass(frozen=True)
class Supply:
    """What a new environment is made of in the place of what the host's package indexes have.

    Attributes:
        house: wheels of this machine, which are sent. copied: name of the folder of uploads in which another host's environment
            is; "" for none.
    """

    house: Wheelhouse | None = None
    copied: str = ""


# ------------------------------------------------------------------------------------ what a node must have


def requirements_of(
    image: Image,
    commands: Sequence[str] = (),
    hidden: Collection[str] = (),
    say: Callable[[str], None] = lambda words: None,
) -> Requirements:
    """What `image` means for a node of this notebook; what the notebook has from a folder or a repository is made a wheel.

    Args:
        commands: shell commands of the plugins, run once in a new environment.
        hidden: values that no message may show.
        say: told of each wheel that is built.

    Raises:
        RequestError: the image cannot be, wherever: files among the packages that are not here, and distributions of the
            notebook's own of which no wheel can be made, all at once.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = image.python or here
    prepared = python.startswith("/")
    minor = here if prepared else ".".join(python.split(".")[:2])
    mistakes: list[str] = []
    packages: list[str] = []
    files: list[tuple[str, str]] = []
    for text in image.pip:
        if not is_place(text) or "://" in text:
            packages.append(text)
            continue
        path = Path(text).expanduser()
        if path.is_file():
            with path.open("rb") as file:
                files.append((str(path.resolve()), file_digest(file, "sha256").hexdigest()))
        else:
            kind = "is a folder: build a wheel of it, and name that" if path.is_dir() else "is not a file here"
            mistakes.append(f"pip: {text} {kind}")
    mine = () if prepared else tuple(_own(packages, mistakes, say))
    if mistakes:
        raise RequestError(mistakes)
    given = {project(text) for text in packages}
    if prepared:
        own = [f"{name}{bounds}" for name, bounds in RANK_DEPENDENCIES.items()]
    else:
        own = [name for name in RANK_DEPENDENCIES if name not in given]
    packages = [*own, *packages]
    wanted = tuple(packages) if prepared else pinned(packages)
    return Requirements(
        python=python if prepared else minor,
        minor=minor,
        packages=wanted,
        preferences=() if prepared else preferred(packages),
        indexes=tuple(each for each in image.pip_indexes if isinstance(each, str) and not TORCH_BUILD.fullmatch(each)),
        backend=_backend(each for each in image.pip_indexes if isinstance(each, str)),
        scoped=tuple(_scoped(image.pip_indexes, wanted)),
        files=tuple(files),
        own=mine,
        commands=tuple(commands),
        code=wheel.running()[0],
        folder=image.env.get("SKYMAGIC_HOME"),
        asked=frozenset(filter(None, given)),
        hidden=frozenset(hidden),
    )


def _own(packages: Iterable[str], mistakes: list[str], say: Callable[[str], None]) -> Iterator[OwnWheel]:
    """Wheels of the notebook's own distributions that `packages` come to; of what cannot be built `mistakes` hear."""
    for name in own(packages):
        try:
            yield own_wheel(name, say)
        except NoWheel as problem:
            mistakes.append(str(problem))


def _scoped(indexes: Iterable[str | PipIndex], packages: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(URL, what comes from there) of each index that is for certain packages."""
    for index in indexes:
        served = () if isinstance(index, str) else tuple(filter(index.serves, packages))
        if served:
            yield str(index), served


def _backend(indexes: Iterable[str]) -> str:
    """PyTorch's build that an image names by one of PyTorch's indexes; "" for what its plugin names where nobody has chosen."""
    named = [found[1] for found in map(TORCH_BUILD.fullmatch, indexes) if found]
    return next((each for each in named if each not in ("cpu", DEFAULT_CUDA)), "")


# ------------------------------------------------------------------------------------ looking and making


def probe(host: RemoteShell, requirements: Requirements, sizes: bool = False) -> Facts:
    """The host as it is; changes nothing.

    Args:
        sizes: whether its package indexes are asked for all packages, to list them.

    Raises:
        HostError: its shell did not run the probe.
    """
    done = host.run(probe_script(requirements, sizes), timeout=60.0)
    try:
        return parse(done.out)
    except ValueError as problem:
        said = (done.err.strip() or done.out.strip())[-2000:]
        reason = f"it cannot be looked at: {problem} (exit code {done.status})" + (f":\n{said}" if said else "")
        remedy = f"try: ssh {host.label} /bin/sh -c uname, which must print the name of a Unix"
        raise HostError(host.label, reason, remedy) from None


def refuse(name: str, facts: Facts, requirements: Requirements) -> None:
    """Raise HostError where nothing can be set up on such a host."""
    if problems := refusals(facts, requirements):
        raise HostError(name, "it cannot be set up: " + ";\n  ".join(problems))


def setup(
    host: RemoteShell,
    requirements: Requirements,
    report: Report,
    facts: Facts | None = None,
    supply: Supply | None = None,
    early: Callable[[Installation], None] = lambda ready: None,
) -> Installation:
    """Make a host ready to run skymagic's modules; a host that is ready costs one round trip.

    Args:
        report: called with each step in words, and with installers' progress.
        facts: what `probe` said of this host for the same requirements.
        supply: what its packages come from; None for its package indexes.
        early: called while packages install, with what runs modules that need none of them.

    Raises:
        HostError: what failed on the host, its last lines and what can be done; nothing half-made stays there.
    """
    facts = facts or probe(host, requirements)
    off = round(facts.clock - time.time())
    if facts.clock and abs(off) > CLOCK_SKEW_SECONDS:
        report(f"its clock is {abs(off) // 60} minutes {'ahead of' if off > 0 else 'behind'} this machine's")
    for url, why in facts.silent:
        report(f"its index {url} does not answer ({why}) and is left out")
    refuse(host.label, facts, requirements)
    if not (facts.code and (facts.ready or requirements.prepared)):
        code = f"{facts.folder}/code/{requirements.code}"
        known = facts
        _install(
            host,
            requirements,
            facts,
            report,
            supply or Supply(),
            lambda python: early(Installation(python, known, code, requirements)),
        )
        if not facts.ready:
            facts = replace(facts, own=requirements.digests, sent=supply is not None and facts.without_index)
    python = requirements.python if requirements.prepared else f"{facts.folder}/env/{facts.env}/bin/python"
    ready = Installation(python, facts, f"{facts.folder}/code/{requirements.code}", requirements)
    _renew_own(host, ready, report)
    return replace(ready, facts=replace(facts, own=requirements.digests))


def _renew_own(host: RemoteShell, ready: Installation, report: Report) -> None:
    """Install those of the notebook's own distributions anew whose source has changed since they were."""
    changed = tuple(each for each in ready.requirements.own if ready.facts.own.get(each.name) != each.digest)
    if changed:
        report(
            f"installing {', '.join(f'{each.name} {each.version}' for each in changed)} from {', '.join(each.source for each in changed)}"
        )
        add(host, ready, Addition((), (), ready.requirements.preferences, own=changed), lambda line: None)


def _install(
    host: RemoteShell,
    requirements: Requirements,
    facts: Facts,
    report: Report,
    supply: Supply,
    runs: Callable[[str], None],
) -> None:
    plan = plan_install(requirements, facts, supply.copied or secrets.token_hex(8), wheel.running()[1])
    plan = replace(plan, sent=supply.house.pins if supply.house else (), copied=bool(supply.copied))
    wheels = {f"wheels/{name}": path for name, path in supply.house.files.items()} if supply.house else {}
    failure = _tried(host, plan, facts, report, runs, wheels)
    if failure is not None and not facts.without_index and blames_cache(failure):
        report("its cache of packages seems to be damaged; installing without it")
        failure = _tried(host, replace(plan, cached=False), facts, report, runs)
    if failure is not None:
        raise HostError(host.label, failure.reason, failure.remedy(facts))


def _tried(
    host: RemoteShell,
    plan: InstallPlan,
    facts: Facts,
    report: Report,
    runs: Callable[[str], None],
    wheels: Mapping[str, Path] | None = None,
) -> Failure | None:
    """Upload, unless all of it is there as a copy, and install; what failed.

    Args:
        wheels: what is uploaded beside what every new environment needs.
    """
    if not plan.copied:
        files = {**_files(host, plan, facts), **(wheels or {})}
        upload(host, prepare_script(plan.requirements, plan.incoming), files, report)
    sizes = {each.name: each.nbytes for each in packages(plan.requirements, facts) if each.nbytes}
    progress = InstallProgress(report, plan.requirements.hidden, sizes=sizes, runs=runs)
    done = host.run(install_script(plan, facts), lines=progress.feed)
    return None if progress.done else progress.failure(done.status, done.err, plan.requirements.minor)


def _files(host: RemoteShell, plan: InstallPlan, facts: Facts) -> dict[str, bytes | Path]:
    """What has to be uploaded, by name."""
    files: dict[str, bytes | Path] = {Path(path).name: Path(path) for path in plan.requirements.uploads if plan.files}
    if plan.wheel:
        files[plan.wheel] = wheel.running()[2]
    if plan.uv == UPLOADED:
        try:
            files["uv.gz"] = uv.fetch(facts)
        except uv.UvUnavailable as problem:
            raise HostError(host.label, *lacks_python(plan.requirements, facts, str(problem))) from None
    return files
