"""install.sh, the script that changes a host: it creates environments and adds packages to them.

uv does both, under the environment's lock. The script also places skymagic's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from shlex import quote
from urllib.parse import quote as escaped

from skymagic.bootstrap import downloading
from skymagic.bootstrap.builds import backend_for, build_constraints, for_gpus
from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.layers import (
    SHOW_IMAGE,
    SHOWN_PACKAGES,
    kept_builds,
    missing_in_image,
)
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.shell import TELL, UV_SETTINGS, assignments
from skymagic.plan.image import project

UPLOADED = "uploaded"
"""Value of `InstallPlan.uv` for the program that the notebook uploads."""
COPIED = "copied"
"""Folder with another host's files in an upload folder (`content.remote.bare_hosts`)."""
WHEELS = "wheels"
"""Folder with wheels in an upload folder, and below skymagic's folder for other hosts."""
FILES = "files"
"""Folder with requested files and the notebook's own distributions in an upload folder."""


@dataclass(frozen=True)
class InstallPlan:
    """Plan for installing skymagic on one host.

    Attributes:
        requirements: requirements that the host must satisfy.
        env: name of the environment; "" if none is created.
        python: interpreter of the environment, or one that is used unchanged; "" to let uv find or
            fetch one.
        incoming: name of the upload folder, which is removed at the end; never "".
        uv: path of a uv on the host, or `UPLOADED` for the one in `incoming`; "" if the host needs
            none, or has received one with `copied`.
        wheel: file name of skymagic's wheel in `incoming`; "" if the code is already installed.
        files: names of uploaded packages in `FILES`.
        sent: pins of the wheels in `incoming`, the only source of packages then; () if packages
            come from the host's indexes.
        copied: whether another host's wheels, uv and code are in `incoming` instead.
        keeps: whether the wheels stay on the host, to be passed on to others.
        cached: whether uv uses its cache on the host.
    """

    requirements: Requirements
    env: str
    python: str
    incoming: str
    uv: str = ""
    wheel: str = ""
    files: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    copied: bool = False
    keeps: bool = False
    cached: bool = True


_MAIN = r"""
main() {
    umask 077
    cd /  # a home may hold a random.py
    unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV UV_SYSTEM_PYTHON
    half= ticker= beside= drop=$folder/incoming/$incoming made=$folder/env/$env
    received=$drop/$copied/wheels/$env
    trap 'leave 1' HUP INT TERM PIPE
    watch &
    ticker=$!
    status=1 command="mkdir -p $drop"
    folders || fail
    if [ -n "$env" ]; then
        lock
        if [ -n "$adding" ]; then add; else environment; fi
    fi
    if [ -n "$wheel" ]; then code; fi
    tell done
    leave 0
}

folders() {
    mkdir -p "$folder/env" "$folder/code" "$drop" && chmod 700 "$folder" || return
    # uploads of those who never came back
    find "$folder/incoming" "$folder/wheels" -mindepth 1 -maxdepth 1 -mmin +1440 \
        -exec rm -rf {} + 2>/dev/null
    return 0
}

# A step is a command; when it fails, nothing half-made stays.
step() { attempt "$@" || fail; }

attempt() {
    name=$1
    shift
    tell step "$name"
    "$@" </dev/null && return
    status=$?
    command=$*
    return 1
}

fail() {
    tell free "$(df -Pk "$folder" 2>/dev/null | sed -n '2,$s/.* \([0-9][0-9]*\)  *[0-9-]*%.*/\1/p')"
    tell command "$command"
    tell failed "$status"
    leave 1
}

# When the connection is gone, nobody reads the ticks any more. Then end this process group, with
# uv and everything else in it.
watch() {
    trap '' PIPE
    while sleep 1 </dev/null >/dev/null 2>&1; do
        kill -0 $$ 2>/dev/null && tell tick 2>/dev/null || kill -TERM 0
    done
}

leave() {
    trap '' HUP INT TERM PIPE
    if [ -n "$beside" ]; then wait "$beside"; fi
    if [ -n "$half" ]; then rm -rf "$half"; fi
    if [ -n "$base" ]; then hide_image; fi
    rm -rf "$drop"
    if [ -n "$ticker" ]; then kill "$ticker" 2>/dev/null; fi
    exit "$1"
}

# One pool at a time makes this environment. Without flock, or on a file system without locks,
# nobody waits.
lock() {
    exec 9>>"$folder/env/$env.lock"
    told=
    until try_lock; do
        if [ -z "$told" ]; then tell waiting; fi
        told=yes
        sleep 1
    done
}

# flock is silent only if another process has the lock. Its exit status does not help: busybox's is
# 1 for every failure.
try_lock() { problem=$(flock -n 9 2>&1) || [ -n "$problem" ]; }
"""

_ENVIRONMENT = r"""
environment() {
    if [ -f "$made/.ready" ] && "$made/bin/python" -c '' 2>/dev/null; then
        python=$made/bin/python
        return
    fi
    half=$made
    rm -rf "$made"
    prepare
    step "making an environment with Python ${python:-$want}" \
        "$uv" venv --no-project ${base:+--system-site-packages} \
        --python "${python:-$want}" "$made"
    if [ -n "$base" ]; then step "finding the image's packages" show_image "$python"; fi
    begun
    step "placing uv" place_uv
    packages
    wait "$beside"
    # for cells that call it, or people; nothing depends on it
    "$uv" pip install --quiet $only --python "$made/bin/python" pip </dev/null >/dev/null 2>&1 || :
    python=$made/bin/python
    PATH=$made/bin:$PATH VIRTUAL_ENV=$made
    export PATH VIRTUAL_ENV
    commands
    own
    if [ -n "$sent_mark" ]; then : >"$made/.sent"; fi
    step "marking it ready" finish
    half=
}

add() {
    step "looking for uv" find_uv
    prepare
    if [ -n "$base" ]; then step "finding the image's packages" show_image; fi
    packages
    own
}

# The environment's own uv may be a link to one that is gone.
find_uv() {
    for uv in "$made/bin/uv" "$folder"/env/*/bin/uv uv "$HOME/.local/bin/uv"; do
        uv=$(command -v "$uv" 2>/dev/null) && return
    done
    echo "uv is gone: remove $made, and create the pool again"
    return 1
}

# Later packages are installed with the same uv.
place_uv() {
    case $uv in
        "$folder"/incoming/*) mv "$uv" "$made/bin/uv" && uv=$made/bin/uv ;;
        *) ln -s "$uv" "$made/bin/uv" ;;
    esac
}

prepare() {
    if [ ! -w "$HOME" ]; then
        UV_CACHE_DIR=$folder/cache/uv
        export UV_CACHE_DIR
    fi
    step "writing the list of packages" requirements
    if [ -n "$copied" ]; then
        cp "$received/pins.txt" "$drop/builds.txt"
        uv=$received/uv
    elif [ "$uv" = uploaded ]; then
        step "unpacking uv" unpack_uv
        uv=$drop/uv
    fi
    if [ -f "$drop/python.tar.gz" ]; then step "unpacking Python" unpack_python; fi
    uv_settings
}

unpack_python() {
    mkdir -p "$drop/python" "$folder/python" &&
        gzip -dc "$drop/python.tar.gz" | tar -C "$drop/python" -xof - || return
    for one in "$drop"/python/*; do
        [ -d "$folder/python/${one##*/}" ] || mv "$one" "$folder/python" || return
        python=$folder/python/${one##*/}/bin/python$want
    done
}

unpack_uv() { gzip -dc "$drop/uv.gz" >"$drop/uv" && chmod 700 "$drop/uv"; }

# Place skymagic's code while the packages are downloaded: whatever needs no packages can run from
# here on. If that fails, it is tried again afterwards, and then reported.
begun() {
    early &
    beside=$!
}

early() {
    python=$made/bin/python
    step() {
        shift
        "$@" </dev/null >/dev/null 2>&1 || exit 1
    }
    if [ -n "$wheel" ]; then code; fi
    tell runs "$python"
}

finish() { : >"$made/.making" && mv "$made/.making" "$made/.ready"; }

# What an environment has of the notebook's own distributions: a file of each, with its digest.
own() {
    mkdir -p "$made/.own"
    while read -r name digest; do echo "$digest" >"$made/.own/$name"; done <"$drop/own.txt"
}

code() {
    if [ -d "$folder/code/$code" ]; then return; fi
    fresh=$drop/$copied/code/$code
    if [ ! -d "$fresh" ]; then unpack; fi
    # another pool may have been faster; then theirs is as good
    [ -d "$folder/code/$code" ] || step "placing skymagic" mv "$fresh" "$folder/code/$code"
}

unpack() {
    fresh=$drop/code
    step "unpacking skymagic" "$python" -m zipfile -e "$drop/$wheel" "$fresh"
    # only what nodes run: the notebook's part is more than half of the code, and the little of it
    # that nodes import is compiled at its import
    set -- kernels wire runtime content data plan plugins
    for part; do
        set -- "$@" "$fresh/skymagic/$part"
        shift
    done
    step "compiling skymagic" "$python" -m compileall -q "$@"
}
"""

_PACKAGES = r"""
# Packages with an index of their own come first, without their dependencies: nothing else is to
# come from there, and they do not come from elsewhere.
packages() {
    for list in "$drop"/scoped-*.txt; do
        if [ -f "$list" ]; then
            step "installing packages from their own index" \
                env -u UV_DEFAULT_INDEX -u UV_INDEX -u UV_TORCH_BACKEND \
                "$uv" pip install --python "$made/bin/python" --no-deps -r "$list"
        fi
    done
    set -- -c "$drop/kept.txt"
    if [ -n "$backend" ]; then
        if installed "$@"; then return; fi
        if [ ! -s "$drop/builds.txt" ]; then fail; fi
        tell instead  # PyTorch's index may not answer
        unset UV_TORCH_BACKEND
        backend=
    fi
    if [ -s "$drop/builds.txt" ]; then
        if installed "$@" -c "$drop/builds.txt"; then return; fi
        if [ -n "$sent_links" ]; then fail; fi
        tell instead
    fi
    installed "$@" || fail
}

# CONSTRAINTS: install with the notebook's versions if they fit. An environment in use decides by
# itself what it needs, as does one over an image; for another new one, uv replaces only those
# versions that do not fit.
installed() {
    if [ -n "$adding$base" ] || [ -f "$drop/scoped-0.txt" ]; then
        for versions in versions.txt none.txt; do
            if takes_cuda "$uv" pip install --dry-run $only --python "$made/bin/python" \
                -r "$drop/requirements.txt" "$@" -c "$drop/$versions"; then refuse_cuda; fi
            attempt "installing packages with uv" \
                "$uv" pip install $only --python "$made/bin/python" \
                -r "$drop/requirements.txt" "$@" -c "$drop/$versions" && return
            if [ $versions = versions.txt ] && [ -s "$drop/versions.txt" ]; then tell instead; fi
        done
        return 1
    fi
    attempt "choosing versions with uv" \
        "$uv" pip compile --quiet --no-header --no-annotate --python "$made/bin/python" $only \
        "$drop/requirements.txt" "$@" -o "$drop/versions.txt" || return 1
    if takes_cuda cat "$drop/versions.txt"; then refuse_cuda; fi
    set -- "$@" -c "$drop/versions.txt"
    if [ -n "$keeps" ]; then keep "$@"; fi
    step "installing packages with uv" "$uv" pip install $only --python "$made/bin/python" \
        -r "$drop/requirements.txt" "$@"
}

# Whether a host without GPUs would get PyTorch for CUDA, which nobody has agreed to.
takes_cuda() {
    [ -n "$no_cuda" ] && [ -z "$backend" ] || return 1
    "$@" >"$drop/would.txt" 2>&1 </dev/null
    grep -q '^\( + \)*torch==' "$drop/would.txt" &&
        grep -q -e '^\( + \)*nvidia-' -e '^\( + \)*cuda-' "$drop/would.txt"
}

refuse_cuda() {
    tell step "looking for a build of torch without CUDA"
    echo "torch is needed there, the host has no GPU," \
        "and its package indexes have only builds for CUDA"
    command= status=1
    fail
}

# CONSTRAINTS: put the wheels into a folder, from where other hosts get them. If that fails, for
# one without a wheel, every host gets its own.
keep() {
    wheels=$folder/wheels/$env
    rm -rf "$wheels"
    mkdir -p "$wheels" || return 0
    if [ -n "$sent_links" ]; then
        mv "$drop/wheels"/* "$wheels"
        rmdir "$drop/wheels" && ln -s "$wheels" "$drop/wheels"
    elif attempt "choosing wheels with uv" \
        "$uv" pip compile $only --quiet --no-header --format pylock.toml --only-binary :all: \
        --python "$made/bin/python" "$drop/requirements.txt" "$drop/pip.txt" "$@" \
        -o "$drop/pylock.toml" &&
        attempt "downloading wheels" \
            "$made/bin/python" -I -c "$downloading" "$drop/pylock.toml" "$wheels"; then
        UV_FIND_LINKS=$wheels_url UV_OFFLINE=1 UV_NO_CONFIG=1 only=--no-index
        export UV_FIND_LINKS UV_OFFLINE UV_NO_CONFIG
        unset UV_TORCH_BACKEND UV_DEFAULT_INDEX UV_INDEX
    else
        rm -rf "$wheels"
        return 0
    fi
    if [ -d "$drop/files" ]; then cp -r "$drop/files" "$wheels"; fi
    grep -v :// "$drop/versions.txt" >"$wheels/pins.txt"
    wait "$beside"  # skymagic's code goes with them
    cp -L "$made/bin/uv" "$wheels/uv" && tell kept
}
"""


def plan_install(
    requirements: Requirements, facts: HostFacts, incoming: str, wheel: str
) -> InstallPlan:
    """Choose how to create an environment: with the host's uv, or else an uploaded one.

    Args:
        requirements: requirements of the environment.
        facts: the host.
        incoming: name for the upload folder.
        wheel: file name of skymagic's wheel.
    """
    wheel = "" if facts.code else wheel
    if requirements.prepared:
        return InstallPlan(requirements, "", requirements.python, incoming, wheel=wheel)
    if facts.ready:
        return InstallPlan(requirements, facts.env, "", incoming, wheel=wheel)
    requirements = missing_in_image(requirements, facts)
    fitting = facts.interpreters(requirements.minor)
    files = tuple(PurePath(path).name for path in requirements.uploads)
    return InstallPlan(
        requirements,
        facts.env,
        fitting[0].path if fitting else "",
        incoming,
        facts.uv or UPLOADED,
        wheel,
        files,
    )


def install_script(plan: InstallPlan, facts: HostFacts) -> str:
    """Return sh that creates the environment and unpacks skymagic's code.

    It reuses an environment that another pool has created meanwhile.
    """
    requirements = plan.requirements
    sent = plan.sent or plan.copied
    drop = f"{facts.folder}/incoming/{plan.incoming}"
    links = f"{drop}/{COPIED}/{WHEELS}/{plan.env}" if plan.copied else f"{drop}/{WHEELS}"
    files = f"{links if plan.copied else drop}/{FILES}"
    # PyTorch's own index would offer other builds than the image's
    image_builds = kept_builds(requirements, facts)
    names = {
        "want": requirements.python,
        "python": plan.python,
        "uv": plan.uv,
        "wheel": plan.wheel,
        "code": requirements.code,
        "backend": "" if sent or image_builds else backend_for(requirements, facts),
        "no_cuda": "" if image_builds or facts.accelerated or requirements.any_build else "yes",
        "sent_links": url_of(links) if sent else "",
        "sent_mark": "yes" if sent and facts.without_index else "",
        "copied": COPIED if plan.copied else "",
        "keeps": "yes" if plan.keeps else "",
        "downloading": downloading.program() if plan.keeps else "",
        "wheels_url": url_of(f"{facts.folder}/{WHEELS}/{plan.env}"),
        "adding": "",
        "base": requirements.base,
    }
    packages = for_gpus(requirements.packages, facts, requirements.backend)
    lists = {
        "requirements.txt": [*packages, *(url_of(f"{files}/{name}") for name in plan.files)],
        "pip.txt": ["pip"],
        "indexes.txt": () if sent else requirements.indexes,
        "kept.txt": image_builds,
        "builds.txt": _sent_pins(plan, facts) or _builds(requirements, packages, facts),
        "versions.txt": () if sent else requirements.preferences,
        "own.txt": [f"{own_wheel.name} {own_wheel.digest}" for own_wheel in requirements.own],
        **{
            f"scoped-{n}.txt": [f"--index-url {url}", *served]
            for n, (url, served) in enumerate(() if sent else requirements.scoped)
        },
    }
    uncached = [] if plan.cached else ["export UV_NO_CACHE=1"]
    return script(facts, plan.env, plan.incoming, names, lists, [*uncached, _commands(plan)])


def _sent_pins(plan: InstallPlan, facts: HostFacts) -> tuple[str, ...]:
    """Return the pins of the wheels that were sent, without packages that an image has."""
    # the notebook resolves without the image's packages, and so may have chosen other versions of
    # them; pins would make uv replace those that fit
    in_image = facts.packages if plan.requirements.base else ()
    return tuple(pin for pin in plan.sent if project(pin) not in in_image)


def _builds(
    requirements: Requirements, packages: Iterable[str], facts: HostFacts
) -> tuple[str, ...]:
    """Return constraints on PyTorch's builds, except for packages of scoped indexes."""
    served = {project(text) for _, texts in requirements.scoped for text in texts}
    pins = (text for text in (*packages, *requirements.preferences) if project(text) not in served)
    return build_constraints(pins, facts)


def script(
    facts: HostFacts,
    env: str,
    incoming: str,
    names: Mapping[str, str],
    lists: Mapping[str, Iterable[str]],
    more: Iterable[str] = (),
) -> str:
    """Return sh that creates an environment or adds packages to one.

    Args:
        facts: the host.
        env: name of the environment.
        incoming: name of the upload folder, which is removed at the end.
        names: values of the script's variables.
        lists: files that the script writes into the upload folder.
        more: further lines and functions.
    """
    common = {"folder": facts.folder, "env": env, "incoming": incoming}
    common["silent"] = " ".join(url for url, _ in facts.silent)
    if names["base"]:
        common["shown_packages"] = SHOWN_PACKAGES
    files = {"kept.txt": (), "none.txt": (), **lists}
    over_image = SHOW_IMAGE if names["base"] else ""
    functions = [
        _MAIN + _ENVIRONMENT + _PACKAGES + over_image + UV_SETTINGS,
        _writing(files),
        *more,
    ]
    return "\n".join(
        [TELL, *assignments({**common, **names}), *functions, "main </dev/null 2>&1\n"]
    )


def url_of(path: str) -> str:
    """Return the URL of a path on a host: uv splits a path at spaces, but not a URL."""
    return f"file://{escaped(path)}"


def _writing(files: Mapping[str, Iterable[str]]) -> str:
    """Return a shell function that writes files line by line.

    It uses a shell builtin, because other users can see the arguments of a program, and URLs may
    contain passwords.
    """
    text = ["requirements() {"]
    for name, lines in files.items():
        writes = (f"        printf '%s\\n' {quote(line)}" for line in lines)
        text += ["    {", *writes, "        :", f'    }} >"$drop/{name}"']
    return "\n".join([*text, "}"])


def _commands(plan: InstallPlan) -> str:
    """Return a shell function that runs the plugins' commands.

    Each command is run from a file, because it may hold something that other users must not see.
    """
    steps = []
    for command in plan.requirements.commands:
        steps.append(f"    printf '%s\\n' {quote(command)} >\"$drop/command\"")
        steps.append(f'    step {quote("running: " + command)} /bin/sh "$drop/command"')
    return "\n".join(["commands() {", '    cd "$HOME"', *steps, "    cd /", "}"])
