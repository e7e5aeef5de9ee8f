"""More packages for an environment that is in use: installed beside the ranks that run in it, under its lock."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote as escaped

from skymagic.bootstrap.install import BEGIN, COMMON, OWN, WATCHED, links, prepare_script, written
from skymagic.bootstrap.messages import advice
from skymagic.bootstrap.own import OwnWheel, misfit
from skymagic.bootstrap.packages import PACKAGES
from skymagic.bootstrap.pip_settings import PIP_SETTINGS
from skymagic.bootstrap.progress import InstallProgress
from skymagic.bootstrap.quoting import TELL, assignments
from skymagic.bootstrap.remote import Carry, Installation, RemoteShell, upload
from skymagic.bootstrap.requirements import TORCH
from skymagic.bootstrap.wheelhouse import NoWheels, Wanted, Wheelhouse, fetch
from skymagic.errors import HostError
from skymagic.plan.image import project

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

# What cannot be had, pip would not find either, and takes longer.
install() {
    if find_uv; then
        as_pip
        attempt "installing with uv" shown "$uv" pip install --python "$made/bin/python" "$@" && return
        if grep -q "No solution found" "$drop/said"; then return 1; fi
        tell instead
    fi
    guard_pip
    attempt "installing with pip" "$made/bin/python" -m pip install --progress-bar off "$@" || return 1
    if [ -s "$drop/renewed.txt" ]; then  # pip leaves what has this version as it is
        attempt "installing anew with pip" "$made/bin/python" -m pip install --force-reinstall --no-deps -r "$drop/renewed.txt"
    fi
}

shown() {
    { "$@" 2>&1; echo $? >"$drop/status"; } | tee "$drop/said"
    return "$(cat "$drop/status")"
}

find_uv() {
    for one in "$made/bin/uv" uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        uv=$(command -v "$one" 2>/dev/null) && "$uv" --version >/dev/null 2>&1 && return
    done
    uv=
    return 1
}
"""


Words = Callable[[str], None]


@dataclass(frozen=True)
class Addition:
    """Packages to be installed into an environment that is there.

    Attributes:
        packages: requirements.
        kept: what must stay as it is there: ``numpy==2.1.0``.
        preferences: the notebook's versions of what the packages need; they hold where all of them can.
        files: wheels of this machine that go along.
        own: wheels of the notebook's own distributions; they are installed also where there is one of their version.
        carry: brings files to the host by another way than its own connection; None where there is none.
    """

    packages: tuple[str, ...]
    kept: tuple[str, ...] = ()
    preferences: tuple[str, ...] = ()
    files: tuple[Path, ...] = field(default=(), repr=False)
    own: tuple[OwnWheel, ...] = ()
    carry: Carry | None = field(default=None, repr=False, compare=False)


def add(
    host: RemoteShell,
    installation: Installation,
    addition: Addition,
    words: Words,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Install more packages into the environment of an installation; one that has them already is left as it is.

    Args:
        words: called with each line that the installer prints.
        cancelled: asked about once a second; then the installer is killed.

    Raises:
        HostError: what failed, with the installer's last lines and what can be done.
        KeyboardInterrupt: it was cancelled.
    """
    requirements, facts, token = installation.requirements, installation.facts, secrets.token_hex(8)
    files = {path.name: path for path in (*addition.files, *(Path(each.path) for each in addition.own))}
    for file in files:
        if file.endswith(".whl") and (why := misfit(file, facts, requirements.minor)):
            raise HostError(host.label, f"{file} cannot be installed: {why}")
    house = _fetched(host, installation, addition, words) if facts.without_index else None
    wheels = {f"wheels/{name}": path for name, path in house.files.items()} if house is not None else {}
    upload(host, prepare_script(requirements, token), {**files, **wheels}, words, addition.carry)
    progress = InstallProgress(lambda step: None, requirements.hidden, words)

    def feed(line: str) -> None:
        if cancelled():
            raise KeyboardInterrupt
        progress.feed(line)

    done = host.run(addition_script(installation, addition, token, house is not None), lines=feed)
    if not progress.done:
        failure = progress.failure(done.status, done.err, requirements.minor)
        what = ", ".join((*addition.packages, *files))
        said = "\n".join(f"  | {line}" for line in failure.last)
        raise HostError(
            host.label, f"{what} could not be installed: {failure.step} failed\n{said}", advice(failure, facts)
        )


def _fetched(host: RemoteShell, installation: Installation, addition: Addition, words: Words) -> Wheelhouse:
    """The wheels of an addition for a host that reaches no index, beside what is there already."""
    requirements = installation.requirements
    paths = [str(path) for path in addition.files if path.suffix == ".whl"] + [each.path for each in addition.own]
    wanted = Wanted(
        addition.packages, requirements.minor, addition.preferences, addition.kept, requirements.every_index, tuple(paths),
        requirements.backend,
    )  # fmt: skip
    try:
        return fetch(wanted, installation.facts, words)
    except NoWheels as problem:
        what = ", ".join((*addition.packages, *(Path(path).name for path in paths)))
        raise HostError(
            host.label, f"{what} could not be installed: it reaches no package index, and here\n{problem}"
        ) from None


def addition_script(installation: Installation, addition: Addition, incoming: str, sent: bool = False) -> str:
    """sh that installs them.

    Args:
        sent: whether all that they need is in ``wheels/`` there.
        incoming: name of the folder of uploads, which is there, and is removed at the end.
    """
    facts, requirements = installation.facts, installation.requirements
    backend = (requirements.backend or "auto") if facts.accelerated else "cpu"
    there = any(project(pin) in TORCH for pin in addition.kept)
    names = {
        "folder": facts.folder,
        "env": facts.env,
        "incoming": incoming,
        "backend": "" if there else backend,  # its index need not answer for what is there
        "no_cuda": "" if there or facts.accelerated else "yes",
        "sent_links": links(facts, incoming) if sent else "",
    }
    functions = [
        COMMON + OWN + BEGIN + _ADD + WATCHED + PIP_SETTINGS + PACKAGES,
        _lists(addition, () if sent else requirements.indexes, f"{facts.folder}/incoming/{incoming}"),
    ]
    return "\n".join([TELL, *assignments(names), *functions, "main </dev/null 2>&1\n"])


def _lists(addition: Addition, indexes: tuple[str, ...], place: str) -> str:
    """A shell function that writes both lists; passwords in URLs are on no command line."""
    own = [_url(place, each.file) for each in addition.own]
    uploaded = [_url(place, path.name) for path in addition.files]
    wanted = [*(f"--extra-index-url {url}" for url in indexes), *addition.packages, *uploaded, *own]
    files = {
        "requirements.txt": wanted,
        "builds.txt": (),
        "kept.txt": addition.kept,
        "versions.txt": addition.preferences,
        "renewed.txt": own,
        "own.txt": [f"{each.name} {each.digest}" for each in addition.own],
    }
    return "\n".join(
        ["requirements() {", *(line for name, lines in files.items() for line in written(name, lines)), "}"]
    )


def _url(place: str, name: str) -> str:
    return f"file://{escaped(f'{place}/{name}')}"
