"""Idempotent provisioning of a host: probe it, then install an environment and skymagic's code.

Parts that the host already has are reused. `add` installs more packages into an environment while
ranks run in it, under the environment's lock.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from skymagic.bootstrap import wheel
from skymagic.bootstrap.builds import backend_for, build_constraints, packages
from skymagic.bootstrap.facts import HostFacts, parse
from skymagic.bootstrap.install import (
    FILES,
    UPLOADED,
    WHEELS,
    InstallPlan,
    install_script,
    plan_install,
    script,
    url_of,
)
from skymagic.bootstrap.layers import kept_builds
from skymagic.bootstrap.local_wheels import LocalWheel
from skymagic.bootstrap.messages import (
    InstallFailure,
    advice,
    blames_cache,
    blames_network,
    blames_platform,
    explain_unusable,
    lacks_uv,
)
from skymagic.bootstrap.probe import probe_script
from skymagic.bootstrap.progress import InstallProgress
from skymagic.bootstrap.remote import Installation, RemoteShell, Report, SendByStore, upload
from skymagic.bootstrap.requirements import TORCH, Requirements
from skymagic.bootstrap.wheelhouse import (
    NoWheels,
    PythonUnavailable,
    UvUnavailable,
    Wheelhouse,
    WheelRequest,
    fetch,
    python_for,
    request_for,
    uv_for,
    with_plans,
)
from skymagic.errors import HostError
from skymagic.plan.image import project

logger = logging.getLogger(__name__)

CLOCK_SKEW_SECONDS = 120
"""Clock skew above which a warning is reported."""


@dataclass(frozen=True)
class Supply:
    """Source of a new environment's packages in place of the host's package indexes.

    Attributes:
        house: wheels of this machine, which are sent to the host.
        copied: name of the upload folder that holds another host's wheels; "" for none.
        on_kept: called once the host has all wheels, which stay there to be passed on to others;
            None if they do not stay.
    """

    house: Wheelhouse | None = None
    copied: str = ""
    on_kept: Callable[[], None] | None = None


# -------------------------------------------------------------------------------- probe and set up


def probe(host: RemoteShell, requirements: Requirements) -> HostFacts:
    """Return the facts of a host, without changing anything on it.

    Args:
        host: connection to the host.
        requirements: requirements of the environment.

    Raises:
        HostError: its shell did not run the probe.
    """
    result = host.run(probe_script(requirements), timeout=60.0)
    try:
        return parse(result.out)
    except ValueError as problem:
        output = (result.err.strip() or result.out.strip())[-2000:]
        reason = f"it cannot be inspected: {problem} (exit code {result.status})" + (
            f":\n{output}" if output else ""
        )
        remedy = f"try: ssh {host.label} /bin/sh -c uname, which must print the name of a Unix"
        raise HostError(host.label, reason, remedy, code="setup") from None


def refuse(name: str, facts: HostFacts, requirements: Requirements) -> None:
    """Raise HostError if nothing can be set up on such a host."""
    if problems := explain_unusable(facts, requirements):
        raise HostError(name, "it cannot be set up: " + ";\n  ".join(problems), code="setup")


def setup(
    host: RemoteShell,
    requirements: Requirements,
    report: Report,
    facts: HostFacts | None = None,
    supply: Supply | None = None,
    early: Callable[[Installation], None] = lambda ready: None,
) -> Installation:
    """Make a host ready to run skymagic's modules. A host that is ready costs one round trip.

    Args:
        host: connection to the host.
        requirements: requirements of the environment.
        report: called with the text of each step and with the installers' progress.
        facts: result of `probe` for this host and the same requirements.
        supply: source of its packages; None for its package indexes.
        early: called before the packages are complete, with an installation that can run modules
            without dependencies.

    Raises:
        HostError: the error on the host, its last output and a remedy. A failed installation is
            removed from the host.
    """
    facts = facts or probe(host, requirements)
    skew = round(facts.clock - time.time())
    if facts.clock and abs(skew) > CLOCK_SKEW_SECONDS:
        report(
            f"its clock is {abs(skew) // 60} minutes {'ahead of' if skew > 0 else 'behind'} this "
            "machine's"
        )
    logger.info(
        "host is inspected: host=%s has_code=%s has_environment=%s",
        host.label,
        bool(facts.code),
        bool(facts.ready),
    )
    for url, why in facts.silent:
        report(f"its index {url} does not answer ({why}) and is left out")
    refuse(host.label, facts, requirements)
    if not (facts.code and (facts.ready or requirements.prepared)):
        code = f"{facts.folder}/code/{requirements.code}"
        initial_facts = facts
        facts = _install(
            host,
            requirements,
            facts,
            report,
            supply or Supply(),
            lambda python: early(Installation(python, initial_facts, code, requirements)),
        )
        if not facts.ready:
            # The facts predate the installation. The new environment has the notebook's own
            # distributions, and wheels from this machine if the host reaches no index.
            facts = replace(facts, own=requirements.digests, sent=facts.without_index)
    python = (
        requirements.python
        if requirements.prepared
        else f"{facts.folder}/env/{facts.env}/bin/python"
    )
    ready = Installation(python, facts, f"{facts.folder}/code/{requirements.code}", requirements)
    _renew_own(host, ready, report)
    # All of the notebook's own distributions are up to date now.
    return replace(ready, facts=replace(facts, own=requirements.digests))


def _renew_own(host: RemoteShell, ready: Installation, report: Report) -> None:
    """Reinstall those of the notebook's own distributions whose source has changed since they
    were installed."""
    changed = tuple(
        own_wheel
        for own_wheel in ready.requirements.own
        if ready.facts.own.get(own_wheel.name) != own_wheel.digest
    )
    if changed:
        logger.info(
            "changed distributions are installed: host=%s names=%s",
            host.label,
            [own_wheel.name for own_wheel in changed],
        )
        report(
            "installing "
            f"{', '.join(f'{own_wheel.name} {own_wheel.version}' for own_wheel in changed)} from "
            f"{', '.join(own_wheel.source for own_wheel in changed)}"
        )
        add(
            host,
            ready,
            Addition((), (), ready.requirements.preferences, own=changed),
            lambda line: None,
        )


def _install(
    host: RemoteShell,
    requirements: Requirements,
    facts: HostFacts,
    report: Report,
    supply: Supply,
    on_python_ready: Callable[[str], None],
) -> HostFacts:
    """Install, and return what is known of the host's package indexes afterwards."""
    plan = plan_install(
        requirements, facts, supply.copied or secrets.token_hex(8), wheel.running_wheel()[1]
    )
    plan = replace(
        plan,
        sent=supply.house.pins if supply.house else (),
        copied=bool(supply.copied),
        keeps=supply.on_kept is not None,
    )
    wheels = _in_folder(WHEELS, supply.house.files if supply.house else {})
    on_kept = supply.on_kept or (lambda: None)
    failure = _try_install(host, plan, facts, report, on_python_ready, wheels, on_kept)
    if failure is not None and not facts.without_index and blames_cache(failure):
        logger.warning("installation is tried again without the cache: host=%s", host.label)
        report("its package cache seems damaged; installing without it")
        failure = _try_install(host, replace(plan, cached=False), facts, report, on_python_ready)
    if failure is not None and facts.indexes is None and plan.uv and blames_network(failure):
        # The probe found no program there that could query indexes.
        logger.warning("packages are sent: host=%s", host.label)
        report("it reaches no package index; the packages are fetched here, and sent")
        (facts,) = with_plans([replace(facts, indexes=0, planned=None)], requirements)
        house = _fetch_for(host, request_for(plan.requirements, ("pip",)), facts, report)
        wheels = _in_folder(WHEELS, house.files)
        plan = replace(plan, sent=house.pins)
        failure = _try_install(host, plan, facts, report, on_python_ready, wheels)
    if failure is not None:
        logger.warning("installation failed: host=%s", host.label)
        code = "setup-wheel" if blames_platform(failure) else "setup"
        raise HostError(host.label, failure.reason, failure.remedy(facts), code=code)
    return facts


def _fetch_for(
    host: RemoteShell, request: WheelRequest, facts: HostFacts, report: Report
) -> Wheelhouse:
    """Fetch the wheels for a host that reaches no index."""
    try:
        return fetch(request, facts, report)
    except NoWheels as problem:
        what = ", ".join((*request.packages, *(Path(path).name for path in request.paths)))
        raise HostError(
            host.label,
            f"{what} could not be installed: the host reaches no package index, and the wheels "
            f"could not be fetched here either:\n{problem}",
            code="setup-packages",
        ) from None


def _try_install(
    host: RemoteShell,
    plan: InstallPlan,
    facts: HostFacts,
    report: Report,
    on_python_ready: Callable[[str], None],
    wheels: Mapping[str, Path] | None = None,
    on_kept: Callable[[], None] = lambda: None,
) -> InstallFailure | None:
    """Upload the files, unless another host has sent them, and install.

    Args:
        host: connection to the host.
        plan: the installation.
        facts: the host.
        report: called with the text of each step.
        on_python_ready: called with the interpreter's path as soon as it can run modules of
            skymagic.
        wheels: files to upload besides what every new environment needs.
        on_kept: called once the host has all wheels that others get from it.

    Returns:
        The failure, or None on success.
    """
    if not plan.copied:
        files = {**_files_to_upload(host, plan, facts), **(wheels or {})}
        upload(host, f"{facts.folder}/incoming/{plan.incoming}", files, report)
    sizes = {
        package.name: package.nbytes
        for package in packages(plan.requirements, facts)
        if package.nbytes
    }
    progress = InstallProgress(
        report,
        plan.requirements.hidden,
        sizes=sizes,
        on_python_ready=on_python_ready,
        on_kept=on_kept,
    )
    result = host.run(install_script(plan, facts), lines=progress.feed)
    return (
        None
        if progress.done
        else progress.failure(result.status, result.err, plan.requirements.minor)
    )


def _files_to_upload(
    host: RemoteShell, plan: InstallPlan, facts: HostFacts
) -> dict[str, bytes | Path]:
    """Return the files to upload, by name."""
    uploads = {Path(path).name: Path(path) for path in plan.requirements.uploads if plan.files}
    files: dict[str, bytes | Path] = dict(_in_folder(FILES, uploads))
    if plan.wheel:
        files[plan.wheel] = wheel.running_wheel()[2]
    if plan.env and facts.gets_python:
        try:
            files["python.tar.gz"] = python_for(plan.requirements.minor, facts)
        except (NoWheels, PythonUnavailable) as problem:
            reason = (
                f"it has no Python {plan.requirements.minor} and cannot fetch one, and none could "
                f"be got for it here either:\n{problem}"
            )
            remedy = f"Install Python {plan.requirements.minor} there."
            raise HostError(host.label, reason, remedy, code="setup-python") from None
    if plan.uv == UPLOADED:
        try:
            files["uv.gz"] = uv_for(facts)
        except UvUnavailable as problem:
            raise HostError(
                host.label,
                *lacks_uv(plan.requirements, facts, str(problem)),
                code="setup-python",
            ) from None
    return files


def _in_folder(folder: str, files: Mapping[str, Path]) -> dict[str, Path]:
    return {f"{folder}/{name}": path for name, path in files.items()}


# -- more packages ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Addition:
    """Packages to install into an existing environment.

    Attributes:
        packages: requirements.
        preserved: pins of packages that must not change there, such as ``numpy==2.1.0``.
        preferences: the notebook's versions of the dependencies, as pins. They are used only if all
            of them can be installed together.
        files: wheels of this machine to upload.
        own: wheels of distributions that the notebook has from a folder, a repository or a file.
            They are installed even if the environment has the same version.
        send_by_store: sends large files through the stores of the pool's nodes; None to upload them
            over the host's connection.
    """

    packages: tuple[str, ...]
    preserved: tuple[str, ...] = ()
    preferences: tuple[str, ...] = ()
    files: tuple[Path, ...] = field(default=(), repr=False)
    own: tuple[LocalWheel, ...] = ()
    send_by_store: SendByStore | None = field(default=None, repr=False, compare=False)


def add(
    host: RemoteShell,
    installation: Installation,
    addition: Addition,
    report: Report,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Install more packages into the environment of an installation.

    An environment that already has them is left unchanged.

    Args:
        host: connection to the host.
        installation: skymagic on the host.
        addition: what to install.
        report: called with each line that the installer prints.
        cancelled: polled about once a second; if it returns True, the installer is killed.

    Raises:
        HostError: what failed, with the installer's last lines and a remedy.
        KeyboardInterrupt: it was cancelled.
    """
    requirements, facts, token = installation.requirements, installation.facts, secrets.token_hex(8)
    files = {
        path.name: path
        for path in (*addition.files, *(Path(own_wheel.path) for own_wheel in addition.own))
    }
    wheelhouse = (
        _fetch_wheels(host, installation, addition, report) if facts.without_index else None
    )
    wheels = _in_folder(WHEELS, wheelhouse.files if wheelhouse is not None else {})
    upload(
        host,
        f"{facts.folder}/incoming/{token}",
        {**_in_folder(FILES, files), **wheels},
        report,
        addition.send_by_store,
    )
    progress = InstallProgress(lambda step: None, requirements.hidden, report)

    def feed(line: str) -> None:
        if cancelled():
            raise KeyboardInterrupt
        progress.feed(line)

    result = host.run(
        addition_script(installation, addition, token, wheelhouse is not None), lines=feed
    )
    if not progress.done:
        failure = progress.failure(result.status, result.err, requirements.minor)
        what = ", ".join((*addition.packages, *files))
        output = "\n".join(f"  | {line}" for line in failure.last)
        raise HostError(
            host.label,
            f"{what} could not be installed: {failure.step} failed\n{output}",
            advice(failure, facts),
            code="setup-wheel" if blames_platform(failure) else "setup-packages",
        )


def _fetch_wheels(
    host: RemoteShell, installation: Installation, addition: Addition, report: Report
) -> Wheelhouse:
    """Fetch the wheels of an addition for a host that reaches no index.

    Packages that the host already has are left out.
    """
    requirements = installation.requirements
    paths = [str(path) for path in addition.files if path.suffix == ".whl"] + [
        own_wheel.path for own_wheel in addition.own
    ]
    request = WheelRequest(
        addition.packages,
        requirements.minor,
        addition.preferences,
        addition.preserved,
        requirements.every_index,
        tuple(paths),
        requirements.backend,
    )
    return _fetch_for(host, request, installation.facts, report)


def addition_script(
    installation: Installation, addition: Addition, incoming: str, sent: bool = False
) -> str:
    """Return sh that installs the packages of an addition.

    Args:
        installation: skymagic on the host.
        addition: what to install.
        incoming: name of the upload folder, which exists and is removed at the end.
        sent: whether ``wheels/`` in that folder has everything that the packages need.
    """
    facts, requirements = installation.facts, installation.requirements
    drop = f"{facts.folder}/incoming/{incoming}"
    # If torch is installed already, its index is not needed.
    # a pin of a rank that has imported torch may be the same as that of the image's build
    image_builds = kept_builds(replace(requirements, packages=addition.packages), facts)
    preserved = tuple(dict.fromkeys((*addition.preserved, *image_builds)))
    has_torch = any(project(pin) in TORCH for pin in preserved)
    backend = "" if has_torch else backend_for(requirements, facts)
    files = [path.name for path in addition.files]
    files += [own_wheel.file for own_wheel in addition.own]
    names = {
        "backend": "" if sent else backend,
        "no_cuda": "" if has_torch or facts.accelerated or requirements.any_build else "yes",
        "sent_links": url_of(f"{drop}/{WHEELS}") if sent else "",
        "copied": "",
        "adding": "yes",
        "base": requirements.base,
    }
    pins = (*addition.packages, *addition.preferences)
    lists = {
        "requirements.txt": [
            *addition.packages,
            *(url_of(f"{drop}/{FILES}/{name}") for name in files),
        ],
        "indexes.txt": () if sent else requirements.indexes,
        "kept.txt": preserved,
        "builds.txt": () if sent or has_torch else build_constraints(pins, facts),
        "versions.txt": addition.preferences,
        "own.txt": [f"{own_wheel.name} {own_wheel.digest}" for own_wheel in addition.own],
    }
    return script(facts, facts.env, incoming, names, lists)
