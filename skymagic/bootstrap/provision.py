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
from urllib.parse import quote as escaped

from skymagic.bootstrap import wheel
from skymagic.bootstrap.builds import incompatibility, packages
from skymagic.bootstrap.facts import HostFacts, parse
from skymagic.bootstrap.install import (
    BEGIN,
    COMMON,
    OWN,
    UPLOADED,
    WATCHED,
    InstallPlan,
    install_script,
    links,
    plan_install,
    writing,
)
from skymagic.bootstrap.local_wheels import LocalWheel
from skymagic.bootstrap.messages import (
    InstallFailure,
    advice,
    blames_cache,
    explain_unusable,
    lacks_python,
)
from skymagic.bootstrap.probe import probe_script
from skymagic.bootstrap.progress import InstallProgress
from skymagic.bootstrap.remote import Installation, RemoteShell, Report, SendByStore, upload
from skymagic.bootstrap.requirements import TORCH, Requirements
from skymagic.bootstrap.shell import PACKAGES, PIP_SETTINGS, TELL, assignments
from skymagic.bootstrap.wheelhouse import (
    NoWheels,
    UvUnavailable,
    Wheelhouse,
    WheelRequest,
    fetch,
    uv_for,
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
        copied: name of the upload folder that holds another host's environment; "" for none.
    """

    house: Wheelhouse | None = None
    copied: str = ""


# -------------------------------------------------------------------------------- probe and set up


def probe(host: RemoteShell, requirements: Requirements, sizes: bool = False) -> HostFacts:
    """Return the facts of a host, without changing anything on it.

    Args:
        host: connection to the host.
        requirements: requirements of the environment.
        sizes: also query its package indexes for the sizes of all packages, to list them.

    Raises:
        HostError: its shell did not run the probe.
    """
    result = host.run(probe_script(requirements, sizes), timeout=60.0)
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
        _install(
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
            facts = replace(
                facts, own=requirements.digests, sent=supply is not None and facts.without_index
            )
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
) -> None:
    plan = plan_install(
        requirements, facts, supply.copied or secrets.token_hex(8), wheel.running_wheel()[1]
    )
    plan = replace(plan, sent=supply.house.pins if supply.house else (), copied=bool(supply.copied))
    wheels = (
        {f"wheels/{name}": path for name, path in supply.house.files.items()}
        if supply.house
        else {}
    )
    failure = _try_install(host, plan, facts, report, on_python_ready, wheels)
    if failure is not None and not facts.without_index and blames_cache(failure):
        logger.warning("installation is tried again without the cache: host=%s", host.label)
        report("its package cache seems damaged; installing without it")
        failure = _try_install(host, replace(plan, cached=False), facts, report, on_python_ready)
    if failure is not None:
        logger.warning("installation failed: host=%s", host.label)
        raise HostError(host.label, failure.reason, failure.remedy(facts), code="setup")


def _try_install(
    host: RemoteShell,
    plan: InstallPlan,
    facts: HostFacts,
    report: Report,
    on_python_ready: Callable[[str], None],
    wheels: Mapping[str, Path] | None = None,
) -> InstallFailure | None:
    """Upload the files, unless a copy of the environment is there, and install.

    Args:
        host: connection to the host.
        plan: the installation.
        facts: the host.
        report: called with the text of each step.
        on_python_ready: called with the interpreter's path as soon as it can run modules of
            skymagic.
        wheels: files to upload besides what every new environment needs.

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
        report, plan.requirements.hidden, sizes=sizes, on_python_ready=on_python_ready
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
    files: dict[str, bytes | Path] = {
        Path(path).name: Path(path) for path in plan.requirements.uploads if plan.files
    }
    if plan.wheel:
        files[plan.wheel] = wheel.running_wheel()[2]
    if plan.uv == UPLOADED:
        try:
            files["uv.gz"] = uv_for(facts)
        except UvUnavailable as problem:
            raise HostError(
                host.label,
                *lacks_python(plan.requirements, facts, str(problem)),
                code="setup-python",
            ) from None
    return files


# -- more packages ---------------------------------------------------------------------------------


_ADD = r"""    lock
    made=$folder/env/$env
    if [ ! -w "$HOME" ]; then
        UV_CACHE_DIR=$folder/cache/uv PIP_CACHE_DIR=$folder/cache/pip
        export UV_CACHE_DIR PIP_CACHE_DIR
    fi
    step "writing the list of packages" requirements
    if [ -n "$sent_links" ]; then sent_alone; fi
    set -- -r "$drop/requirements.txt" -c "$drop/kept.txt"
    install "$@" -c "$drop/versions.txt" || install "$@" || fail
    own
    tell done
    leave 0
}

# If uv finds no solution, pip would find none either, only later.
install() {
    if find_uv; then
        as_pip
        attempt "installing with uv" \
            shown "$uv" pip install --python "$made/bin/python" "$@" && return
        if grep -q "No solution found" "$drop/said"; then return 1; fi
        tell instead
    fi
    guard_pip
    attempt "installing with pip" \
        "$made/bin/python" -m pip install --progress-bar off "$@" || return 1
    if [ -s "$drop/renewed.txt" ]; then  # pip does not reinstall a version that is there
        attempt "reinstalling with pip" \
            "$made/bin/python" -m pip install --force-reinstall --no-deps -r "$drop/renewed.txt"
    fi
}

shown() {
    { "$@" 2>&1; echo $? >"$drop/status"; } | tee "$drop/said"
    return "$(cat "$drop/status")"
}

find_uv() {
    # uv does not see the packages of an image below the environment, and would install them again
    if grep -q '^include-system-site-packages *= *true' "$made/pyvenv.cfg"; then
        uv=
        return 1
    fi
    for one in "$made/bin/uv" uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        uv=$(command -v "$one" 2>/dev/null) && "$uv" --version >/dev/null 2>&1 && return
    done
    uv=
    return 1
}
"""
"""Rest of the function `main` that `BEGIN` opens, and its functions: add packages (`add`).

- `addition_script` sets the variables: ``folder`` is skymagic's folder on the host, ``env`` the
  environment's name, ``drop`` (set by `BEGIN`) the upload folder with the lists that
  `_package_lists` writes. ``lock`` keeps other pools out, and is released when the script ends.
- A read-only home cannot hold the caches of uv and pip, so they go to skymagic's folder.
- At most two attempts are made: with the notebook's versions of the dependencies
  (``versions.txt``), and without, if these do not fit together. Both keep the pins of ``kept.txt``,
  because ranks may have imported these packages.
- ``install`` tries uv, then pip, which reads more kinds of configuration. ``as_pip`` passes pip's
  settings to uv; ``guard_pip`` refuses a build of torch for CUDA on a host without it.
- uv replaces a wheel of the same version if its URL differs. pip does not, so the wheels in
  ``renewed.txt`` are installed once more.
- ``shown`` runs a command, prints its output and stores it for ``grep``. The status of a pipeline
  is that of ``tee``, so the command's own status goes through a file.
- ``own`` records the digests of the wheels in `Addition.own`, for the next comparison.
"""


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
    for file in files:
        if file.endswith(".whl") and (why := incompatibility(file, facts, requirements.minor)):
            raise HostError(host.label, f"{file} cannot be installed: {why}", code="setup-wheel")
    wheelhouse = (
        _fetch_wheels(host, installation, addition, report) if facts.without_index else None
    )
    wheels = (
        {f"wheels/{name}": path for name, path in wheelhouse.files.items()}
        if wheelhouse is not None
        else {}
    )
    upload(
        host,
        f"{facts.folder}/incoming/{token}",
        {**files, **wheels},
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
            code="setup-packages",
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
    try:
        return fetch(request, installation.facts, report)
    except NoWheels as problem:
        what = ", ".join((*addition.packages, *(Path(path).name for path in paths)))
        raise HostError(
            host.label,
            f"{what} could not be installed: the host reaches no package index, and the wheels "
            f"could not be fetched here either:\n{problem}",
            code="setup-packages",
        ) from None


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
    backend = (requirements.backend or "auto") if facts.accelerated else "cpu"
    has_torch = any(project(pin) in TORCH for pin in addition.preserved)
    names = {
        "folder": facts.folder,
        "env": facts.env,
        "incoming": incoming,
        # torch is installed already, so its index is not needed.
        "backend": "" if has_torch else backend,
        "no_cuda": "" if has_torch or facts.accelerated else "yes",
        "sent_links": links(facts, incoming) if sent else "",
    }
    functions = [
        COMMON + OWN + BEGIN + _ADD + WATCHED + PIP_SETTINGS + PACKAGES,
        _package_lists(
            addition, () if sent else requirements.indexes, f"{facts.folder}/incoming/{incoming}"
        ),
    ]
    return "\n".join([TELL, *assignments(names), *functions, "main </dev/null 2>&1\n"])


def _package_lists(addition: Addition, indexes: tuple[str, ...], index: str) -> str:
    """Return a shell function that writes the package lists.

    Passwords in URLs therefore never appear on a command line.
    """
    own = [_url(index, own_wheel.file) for own_wheel in addition.own]
    uploaded = [_url(index, path.name) for path in addition.files]
    lines = [*(f"--extra-index-url {url}" for url in indexes), *addition.packages, *uploaded, *own]
    files = {
        "requirements.txt": lines,
        "builds.txt": (),  # must exist, because the functions of `PACKAGES` read it
        "kept.txt": addition.preserved,
        "versions.txt": addition.preferences,
        "renewed.txt": own,
        "own.txt": [f"{own_wheel.name} {own_wheel.digest}" for own_wheel in addition.own],
    }
    return writing(files)


def _url(location: str, name: str) -> str:
    return f"file://{escaped(f'{location}/{name}')}"
