"""The scripts that change a host: make the folder; make an environment and put skymagic's code there, under a lock."""

from __future__ import annotations

from dataclasses import dataclass

from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.probe import folder_line
from skymagic.bootstrap.shell import TELL, quote
from skymagic.bootstrap.wanted import Wanted


@dataclass(frozen=True)
class Recipe:
    """What an installation does on one host.

    Attributes:
        wanted: what is to be there.
        env: name of the environment; "" when none is made.
        python: the interpreter that makes the environment, or that is used as it is; "" to let uv find or fetch one.
        uv: path of a uv on the host, ``"uploaded"`` for the one in `incoming`, or None for venv and pip.
        incoming: name of the folder where uploads are, which is removed at the end.
        wheel: file name of skymagic's wheel in it; "" when its code is there already.
        files: names of uploaded packages in it.
        environ: variables for the installer.
    """

    wanted: Wanted
    env: str
    python: str
    uv: str | None = None
    incoming: str = ""
    wheel: str = ""
    files: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()


_COMMON = r"""
# A step is a command; when it fails, nothing half-made stays.
step() {
    name=$1
    shift
    tell step "$name"
    "$@" </dev/null && return
    status=$?
    tell free "$(df -Pk "$folder" 2>/dev/null | sed -n '2,$s/.* \([0-9][0-9]*\)  *[0-9-]*%.*/\1/p')"
    tell command "$*"
    tell failed "$status"
    leave 1
}
"""

_PREPARE = r"""
main() {
    umask 077
    if mkdir -p "$folder/env" "$folder/code" "$folder/incoming/$token" && chmod 700 "$folder"; then
        # uploads of those who never came back
        find "$folder/incoming" -mindepth 1 -maxdepth 1 -mmin +1440 -exec rm -rf {} + 2>/dev/null
        tell prepared "$folder/incoming/$token"
    fi
}
main </dev/null 2>&1
"""

_INSTALL = r"""
main() {
    umask 077
    unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV
    PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
    export PIP_NO_INPUT PIP_DISABLE_PIP_VERSION_CHECK
    half= ticker= held=
    trap 'leave 1' HUP INT TERM PIPE
    watch &
    ticker=$!
    if [ -n "$env" ]; then
        lock
        environment
    fi
    if [ -n "$wheel" ]; then code; fi
    tell done
    leave 0
}

# Nobody listens any more when the connection is gone: then this process group ends, with pip and all.
watch() {
    trap '' PIPE
    while sleep 1 </dev/null >/dev/null 2>&1; do tell tick 2>/dev/null || kill -TERM 0; done
}

leave() {
    trap '' HUP INT TERM PIPE
    if [ -n "$half" ]; then rm -rf "$half"; fi
    if [ -n "$held" ]; then rm -rf "$held"; fi
    if [ -n "$incoming" ]; then rm -rf "$folder/incoming/$incoming"; fi
    if [ -n "$ticker" ]; then kill "$ticker" 2>/dev/null; fi
    exit "$1"
}

# One at a time makes this environment. Where flock is missing or its file system has none, a folder is the lock.
lock() {
    exec 9>>"$folder/env/$env.lock"
    told=
    until try_lock; do
        if [ -z "$told" ]; then tell waiting; fi
        told=yes
        sleep 1
    done
}

try_lock() {
    if command -v flock >/dev/null 2>&1; then
        flock -n 9 2>/dev/null
        case $? in
            0) return 0 ;;
            1) return 1 ;;
        esac
    fi
    if mkdir "$folder/env/$env.held" 2>/dev/null; then
        held=$folder/env/$env.held
        echo "$(uname -n) $$" >"$held/by"
        return 0
    fi
    read -r host pid 2>/dev/null <"$folder/env/$env.held/by" || return 1
    if [ "$host" = "$(uname -n)" ] && ! kill -0 "$pid" 2>/dev/null; then rm -rf "$folder/env/$env.held"; fi
    return 1
}

environment() {
    made=$folder/env/$env
    if [ -f "$made/.ready" ] && "$made/bin/python" -c '' 2>/dev/null; then
        python=$made/bin/python
        return
    fi
    half=$made
    rm -rf "$made"
    if [ -n "$uv" ]; then with_uv; else with_pip; fi
    python=$made/bin/python
    PATH=$made/bin:$PATH VIRTUAL_ENV=$made
    export PATH VIRTUAL_ENV
    commands
    # what a power cut could take back must not be called ready
    sync -f "$made" 2>/dev/null || sync
    step "marking it ready" finish
    half=
}

finish() { : >"$made/.making" && mv "$made/.making" "$made/.ready"; }

with_pip() {
    step "making an environment with $python" "$python" -m venv "$made"
    step "writing the list of packages" requirements
    step "installing packages with pip" "$made/bin/python" -m pip install --progress-bar off -r "$made/requirements.txt"
}

with_uv() {
    if [ "$uv" = uploaded ]; then
        step "unpacking uv" unpack_uv
        uv=$folder/incoming/$incoming/uv
    fi
    UV_PYTHON_INSTALL_DIR=$folder/python UV_NO_PROGRESS=1
    export UV_PYTHON_INSTALL_DIR UV_NO_PROGRESS
    step "making an environment with Python ${python:-$want}" "$uv" venv --no-project --python "${python:-$want}" "$made"
    step "writing the list of packages" requirements
    step "installing packages with uv" \
        "$uv" pip install --index-strategy unsafe-best-match --python "$made/bin/python" -r "$made/requirements.txt"
}

unpack_uv() {
    gzip -dc "$folder/incoming/$incoming/uv.gz" >"$folder/incoming/$incoming/uv" && chmod 700 "$folder/incoming/$incoming/uv"
}

code() {
    fresh=$folder/incoming/$incoming/code
    step "unpacking skymagic" "$python" -m zipfile -e "$folder/incoming/$incoming/$wheel" "$fresh"
    step "compiling skymagic" "$python" -m compileall -q "$fresh"
    # another pool may have been faster; then theirs is as good
    mv "$fresh" "$folder/code/$code" 2>/dev/null || [ -d "$folder/code/$code" ] || step "placing skymagic" false
}
"""


def prepare_script(wanted: Wanted, token: str) -> str:
    """sh that makes the folders and says where to upload to."""
    return "\n".join([TELL, folder_line(wanted), f"token={quote(token)}"]) + _PREPARE


def install_script(recipe: Recipe, facts: Facts) -> str:
    """sh that makes the environment, unless somebody else has meanwhile, and unpacks skymagic's code."""
    names = {
        "folder": facts.folder,
        "want": recipe.wanted.python,
        "env": recipe.env,
        "python": recipe.python,
        "uv": recipe.uv or "",
        "incoming": recipe.incoming,
        "wheel": recipe.wheel,
        "code": recipe.wanted.code,
    }
    head = [f"{name}={quote(value)}" for name, value in names.items()]
    exports = [f"export {name}={quote(value)}" for name, value in recipe.environ]
    return "\n".join(
        [
            TELL,
            *head,
            *exports,
            _COMMON + _INSTALL,
            _requirements(recipe, facts),
            _commands(recipe),
            "main </dev/null 2>&1\n",
        ]
    )


def _requirements(recipe: Recipe, facts: Facts) -> str:
    """A shell function that writes the list of packages; passwords in URLs are on no command line."""
    wanted = recipe.wanted
    uploaded = [f"{facts.folder}/incoming/{recipe.incoming}/{name}" for name in recipe.files]
    lines = [*(f"--extra-index-url {url}" for url in wanted.indexes), *wanted.packages]
    writes = [f"    printf '%s\\n' {quote(line)}" for line in [*lines, *map(_local, uploaded)]]
    return "\n".join(["requirements() {", "    {", *writes, "    :", '    } >"$made/requirements.txt"', "}"])


def _local(path: str) -> str:
    """A path as a requirement; pip and uv split at spaces, but not in a URL."""
    from urllib.parse import quote as escaped

    return f"file://{escaped(path)}"


def _commands(recipe: Recipe) -> str:
    """A shell function that runs the plugins' commands."""
    steps = [
        f"    step {quote('running: ' + command)} /bin/sh -c {quote(command)}"
        for command in recipe.wanted.commands
    ]
    return "\n".join(["commands() {", *steps, "    :", "}"])
