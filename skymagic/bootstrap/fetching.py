"""The script by which one host resolves and downloads what several of its kind need: wheels, each told as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.install import BEGIN, COMMON, WATCHED, InstallPlan, requirements_function
from skymagic.bootstrap.packages import PACKAGES
from skymagic.bootstrap.pip_settings import PIP_SETTINGS
from skymagic.bootstrap.progress import InstallProgress
from skymagic.bootstrap.quoting import MARK, TELL, assignments
from skymagic.bootstrap.requirements import Requirements

_PACK = """
import csv, filecmp, glob, os, sys, xxhash, zipfile
source, cache, target, nonce = sys.argv[1:]
os.makedirs(target, mode=0o700, exist_ok=True)
for info in sorted(os.listdir(source)):
    if not info.endswith('.dist-info'):
        continue
    own, name = os.path.join(source, info), info[:-10] + '-py3-none-any.whl'
    kept = glob.glob(os.path.join(glob.escape(cache), '*', '*', info))
    same = [path for path in kept if not any(filecmp.cmpfiles(own, path, ('METADATA', 'WHEEL'), shallow=False)[1:])]
    if not same:
        sys.exit('uv keeps ' + info + ' not in ' + cache)
    root, half = os.path.dirname(same[0]), os.path.join(target, '.' + info)
    with open(os.path.join(same[0], 'RECORD'), newline='') as record:
        for path, _, nbytes in csv.reader(record):
            if nbytes and os.path.getsize(os.path.join(root, path)) != int(nbytes):
                sys.exit(os.path.join(root, path) + ' in the cache of uv is damaged')
    with zipfile.ZipFile(half, 'w', strict_timestamps=False) as archive:
        for folder, _, files in os.walk(root):
            for file in files:
                path = os.path.join(folder, file)
                archive.write(path, os.path.relpath(path, root))
    state = xxhash.xxh3_128()
    with open(half, 'rb') as file:
        while data := file.read(1 << 20):
            state.update(data)
    stored = nonce + '-' + state.hexdigest()
    nbytes = os.path.getsize(half)
    os.rename(half, os.path.join(target, stored))
    print('@sky wheel', stored, nbytes, name, flush=True)
"""
"""Run by a Python that has xxhash: what uv has installed goes as wheels into a value server's store, by the hash of what they hold.

uv keeps no wheels, but what was in them, ``KIND/ID/…`` in its cache. They are not compressed, for that would take longer than most networks
between hosts, and their names have no platform, for who gets them is of the same."""

_FETCH = r"""    if [ ! -w "$HOME" ]; then
        UV_CACHE_DIR=$folder/cache/uv PIP_CACHE_DIR=$folder/cache/pip
        export UV_CACHE_DIR PIP_CACHE_DIR
    fi
    made=$drop/tools
    step "writing the list of packages" requirements
    answering
    step "making room for a download" tools
    step "choosing versions with uv" "$uv" pip compile --quiet --no-header --no-annotate --python "$made/bin/python" \
        "$drop/requirements.txt" -c "$drop/builds.txt" -o "$drop/versions.txt"
    if takes_cuda "$drop/versions.txt"; then refuse_cuda; fi
    unset UV_COMPILE_BYTECODE
    divide
    step "fetching what passes them on" unpacked carriers
    step "keeping it" pack "$("$made/bin/python" -c "$purelib")"
    tell step "fetching packages"
    for part in 0 1 2 3; do
        fetch_part "part-$part" &
        fetching="${fetching-} $!"
    done
    set --
    if [ -d "$drop/uv" ]; then set -- "$drop"/uv/*.whl; fi
    fetch_part more "$@"
    wait $fetching
    for each in "$drop"/*.failed; do
        if [ -f "$each" ]; then
            sed 's/^/  /' "$each"
            drop= command="uv pip install" status=1  # a value server may have begun there: who has asked removes it
            fail
        fi
    done
    tell done
    kill "$ticker" 2>/dev/null
    rm -rf "$made" "$drop/pip" "$drop"/in-* "$drop"/*.list
    exit 0
}

# A host without uv gets it by pip, and passes it on like the rest.
tools() {
    if [ -z "$uv" ]; then
        "$python" -m venv "$drop/pip" && "$drop/pip/bin/python" -m pip wheel $quick --no-deps -w "$drop/uv" uv &&
            "$drop/pip/bin/python" -m pip install --quiet --no-index "$drop"/uv/*.whl || return 1
        uv=$drop/pip/bin/uv
    fi
    as_pip
    "$uv" venv --quiet --no-project --python "$python" "$made"
}

# What runs a value server; pip, for what is installed later by hand; and the rest in parts, which are passed on as they come.
divide() {
    sed -n 's/ .*//; /^[A-Za-z0-9._-]*==/p' "$drop/versions.txt" >"$drop/pins.txt"
    sed 's/^/@sky pin /' "$drop/pins.txt"
    for list in carriers more part-0 part-1 part-2 part-3; do
        sed -n 's/^--extra-index-url/&/p' "$drop/requirements.txt" >"$drop/$list.list"
    done
    echo pip >>"$drop/more.list"
    awk -v drop="$drop" '{
        list = /^(pyzmq|xxhash)==/ ? "carriers" : "part-" n++ % 4
        print >>(drop "/" list ".list")
    }' "$drop/pins.txt"
}

unpacked() {
    list=$1
    shift
    "$uv" pip install --quiet --no-deps --python "$made/bin/python" -r "$drop/$list.list" "$@"
}

pack() { "$made/bin/python" -c "$pack" "$1" "$("$uv" cache dir)" "$drop/store" "$incoming"; }

fetch_part() {
    {
        unpacked "$@" --target "$drop/in-$1" && pack "$drop/in-$1" >&3
    } 3>&1 </dev/null >"$drop/$1.said" 2>&1 || tail -n 15 "$drop/$1.said" >"$drop/$1.failed"
}
"""


@dataclass(frozen=True)
class FetchedWheel:
    """A wheel in a host's store.

    Attributes:
        stored: its name there. nbytes: its size. file: its own name.
    """

    stored: str
    nbytes: int
    file: str

    @property
    def package(self) -> str:
        """Its name and version: ``torch 2.13.0+cpu``."""
        return " ".join(self.file.split("-")[:2])


class FetchProgress(InstallProgress):
    """Parses the script's output: wheels, pins, and how it ended.

    Args:
        report: gets each step in words.
        arrived: gets each wheel, and None at the end.
        hidden: values that are shown nowhere.
    """

    def __init__(
        self, report: Callable[[str], None], arrived: Callable[[FetchedWheel], None], hidden: Collection[str] = ()
    ) -> None:
        super().__init__(report, hidden)
        self._arrived = arrived
        self.pins: list[str] = []

    def feed(self, line: str) -> None:
        """One line of the script's output."""
        name, _, value = line.removeprefix(MARK).partition(" ") if line.startswith(MARK) else ("", "", "")
        if name == "pin":
            self.pins.append(value.strip())
        elif name == "wheel":
            stored, nbytes, file = value.strip().split(" ", 2)
            self._arrived(FetchedWheel(stored, int(nbytes), file))
        else:
            super().feed(line)


def fetch_script(plan: InstallPlan, facts: Facts) -> str:
    """sh that fetches what an environment gets from indexes; uploads are in `plan.incoming`, where all of it stays."""
    names = {
        "folder": facts.folder,
        "python": plan.python,
        "uv": plan.uv or "",
        "incoming": plan.incoming,
        "backend": plan.builds.backend,
        "no_cuda": "" if facts.accelerated or plan.builds.only_cuda else "yes",
        "silent": " ".join(plan.silent),
        "pack": _PACK,
        "purelib": "import sysconfig; print(sysconfig.get_path('platlib'))",
    }
    functions = [COMMON + WATCHED + BEGIN + _FETCH + PIP_SETTINGS + PACKAGES, requirements_function(plan, facts)]
    return "\n".join([TELL, *assignments(names), *functions, "main </dev/null 2>&1\n"])


def can_fetch(requirements: Requirements, facts: Facts) -> bool:
    """Whether such a host's packages can all come as wheels that another one has fetched; pure."""
    fitting = [each for each in facts.pythons if each.version == requirements.minor]
    plain = not (requirements.prepared or requirements.commands or requirements.scoped)
    wheels = all(path.endswith(".whl") for path in requirements.uploads)
    able = any(facts.uv or (each.venv and each.pip) for each in fitting)
    return plain and wheels and able and not facts.ready and not facts.without_index
