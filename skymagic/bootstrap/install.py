"""install.sh, the script that changes a host.

It creates an environment and installs skymagic's code, under a lock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from shlex import quote
from urllib.parse import quote as escaped

from skymagic.bootstrap.builds import TORCH_INDEX, Builds, choose, for_gpus
from skymagic.bootstrap.copying import COPIED
from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.layers import OVER_IMAGE, kept_builds, missing_in_image
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.shell import PACKAGES, PIP_SETTINGS, TELL, assignments

UPLOADED = "uploaded"


@dataclass(frozen=True)
class InstallPlan:
    """Plan for installing skymagic on one host.

    Attributes:
        requirements: requirements that the host must satisfy.
        env: name of the environment; "" if none is created.
        python: interpreter that creates the environment, or that is used unchanged; "" to let uv
            find or fetch one.
        incoming: name of the upload folder, which is removed at the end; never "".
        pip: whether `python` can create an environment with pip.
        uv: path of a uv on the host, ``"uploaded"`` for the one in `incoming`, or None.
        wheel: file name of skymagic's wheel in `incoming`; "" if the code is already installed.
        files: names of uploaded packages in `incoming`.
        builds: which builds of PyTorch's packages fit.
        silent: URLs of indexes that do not answer.
        sent: pins of the wheels in `incoming`, the only source of packages then; () if packages
            come from the host's indexes.
        copied: whether another host's environment and code are in `incoming` instead.
        cached: whether uv and pip use their caches on the host.
    """

    requirements: Requirements
    env: str
    python: str
    incoming: str
    pip: bool = False
    uv: str | None = None
    wheel: str = ""
    files: tuple[str, ...] = ()
    builds: Builds = field(default_factory=lambda: Builds("auto"))
    silent: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    copied: bool = False
    cached: bool = True


COMMON = r"""
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

folders() {
    mkdir -p "$folder/env" "$folder/code" "$drop" && chmod 700 "$folder" || return
    # uploads of those who never came back
    find "$folder/incoming" -mindepth 1 -maxdepth 1 -mmin +1440 -exec rm -rf {} + 2>/dev/null
    return 0
}
"""

OWN = r"""
# What an environment has of the notebook's own distributions: a file of each, with its digest.
own() {
    mkdir -p "$made/.own"
    while read -r name digest; do echo "$digest" >"$made/.own/$name"; done <"$drop/own.txt"
}
"""

BEGIN = r"""
main() {
    umask 077
    cd /  # a home may hold a random.py
    unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV
    unset PIP_TARGET PIP_PREFIX UV_SYSTEM_PYTHON
    PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0
    export PIP_NO_INPUT PIP_DISABLE_PIP_VERSION_CHECK PIP_USER
    half= ticker= beside= bundled= drop=$folder/incoming/$incoming
    trap 'leave 1' HUP INT TERM PIPE
    watch &
    ticker=$!
    status=1 command="mkdir -p $drop"
    folders || fail
"""
"""Common start of the scripts that create or change environments.

It hides the user's own settings of Python and pip, and starts the watchdog.
"""

_MAIN = r"""    if [ -n "$env" ]; then
        lock
        environment
    fi
    if [ -n "$wheel" ]; then code; fi
    tell done
    leave 0
}
"""

WATCHED = r"""
# When the connection is gone, nobody reads the ticks any more. Then end this process group, with
# pip and everything else in it.
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

_INSTALL = r"""
environment() {
    made=$folder/env/$env
    if [ -f "$made/.ready" ] && "$made/bin/python" -c '' 2>/dev/null; then
        python=$made/bin/python
        return
    fi
    half=$made
    rm -rf "$made"
    if [ ! -w "$HOME" ]; then
        UV_CACHE_DIR=$folder/cache/uv PIP_CACHE_DIR=$folder/cache/pip
        export UV_CACHE_DIR PIP_CACHE_DIR
    fi
    step "writing the list of packages" requirements
    answering
    if [ -n "$sent_links" ]; then sent_alone; fi
    if [ -n "$copied" ]; then by_copy || fail
    elif [ -n "$base" ]; then over_image || fail
    else with_uv || with_pip || fail; fi
    wait "$beside"
    python=$made/bin/python
    PATH=$made/bin:$PATH VIRTUAL_ENV=$made
    export PATH VIRTUAL_ENV
    commands
    own
    if [ -n "$sent_mark" ]; then : >"$made/.sent"; fi
    step "marking it ready" finish
    half=
}

# Place skymagic's code while the packages are downloaded: whatever needs no packages can run from
# here on. If that fails, it is tried again afterwards, and then reported.
begun() {
    if [ -n "$beside" ]; then wait "$beside"; fi
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
    set -- kernels wire runtime data plan plugins files
    for part; do
        set -- "$@" "$fresh/skymagic/$part"
        shift
    done
    step "compiling skymagic" "$python" -m compileall -q "$@"
}
"""


def plan_install(
    requirements: Requirements, facts: HostFacts, incoming: str, wheel: str
) -> InstallPlan:
    """Choose how to create an environment: with the host's Python, its uv, or else an uploaded uv.

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
    fitting = facts.interpreters(requirements.minor)
    pip = bool(fitting) and fitting[0].venv and fitting[0].pip
    uv = facts.uv or (None if pip else UPLOADED)
    files = tuple(PurePath(path).name for path in requirements.uploads)
    python, silent = fitting[0].path if fitting else "", tuple(url for url, _ in facts.silent)
    requirements = missing_in_image(requirements, facts)
    builds = choose(requirements, facts)
    # uv would install the image's packages again: it does not see them
    if requirements.base:
        python, pip, uv = facts.pythons[0].path, True, None
        builds = replace(builds, constraints=kept_builds(requirements, facts))
    return InstallPlan(
        requirements, facts.env, python, incoming, pip, uv, wheel, files, builds, silent
    )


def install_script(plan: InstallPlan, facts: HostFacts) -> str:
    """Return sh that creates the environment and unpacks skymagic's code.

    It reuses an environment that another pool has created meanwhile.
    """
    names = {
        "folder": facts.folder,
        "want": plan.requirements.python,
        "env": plan.env,
        "python": plan.python,
        "pip": "yes" if plan.pip else "",
        "uv": plan.uv or "",
        "incoming": plan.incoming,
        "wheel": plan.wheel,
        "code": plan.requirements.code,
        "backend": plan.builds.backend,
        "torch_index": TORCH_INDEX,
        "no_cuda": "" if facts.accelerated or plan.builds.only_cuda else "yes",
        "silent": " ".join(plan.silent),
        "sent_links": links(facts, plan.incoming) if plan.sent else "",
        "sent_mark": "yes" if (plan.sent or plan.copied) and facts.without_index else "",
        "copied": COPIED if plan.copied else "",
        "base": plan.requirements.base,
    }
    functions = [
        COMMON + OWN + BEGIN + _MAIN + WATCHED + _INSTALL + PIP_SETTINGS + PACKAGES + OVER_IMAGE,
        requirements_function(plan, facts),
        _commands(plan),
    ]
    uncached = [] if plan.cached else ["export UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1"]
    return "\n".join([TELL, *assignments(names), *uncached, *functions, "main </dev/null 2>&1\n"])


def requirements_function(plan: InstallPlan, facts: HostFacts) -> str:
    """Return a shell function that writes the package lists.

    Passwords in URLs therefore never appear on a command line.
    """
    requirements = plan.requirements
    # pip and uv split a path at spaces, but not a URL
    uploaded = [
        f"file://{escaped(f'{facts.folder}/incoming/{plan.incoming}/{name}')}"
        for name in plan.files
    ]
    # a probe names an index without what stands before its @
    bare = {url: re.sub(r"(?<=://)[^/]*@", "", url).rstrip("/") for url in requirements.indexes}
    indexes = [
        f"--extra-index-url {url}" for url in requirements.indexes if bare[url] not in plan.silent
    ]
    indexes, scoped = ([], ()) if plan.sent else (indexes, requirements.scoped)
    files = {
        "requirements.txt": [
            *indexes,
            *for_gpus(requirements.packages, facts, plan.builds.backend),
            *uploaded,
        ],
        "builds.txt": plan.sent or plan.builds.constraints,
        "versions.txt": () if plan.sent else requirements.preferences,
        "own.txt": [f"{own_wheel.name} {own_wheel.digest}" for own_wheel in requirements.own],
        **{
            f"scoped-{n}.txt": [f"--index-url {url}", *served]
            for n, (url, served) in enumerate(scoped)
        },
    }
    return writing(files)


def links(facts: HostFacts, incoming: str) -> str:
    """Return the URL of the folder that holds the wheels sent by the notebook."""
    return f"file://{escaped(f'{facts.folder}/incoming/{incoming}/wheels')}"


def writing(files: Mapping[str, Iterable[str]]) -> str:
    """Return a shell function that writes files line by line.

    It uses a shell builtin, because other users can see the arguments of a program.
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
