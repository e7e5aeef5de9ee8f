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
from skymagic.plugins._torch.plugin import WHEELS

_KEEP = """
import os, sys, xxhash
source, target, nonce = sys.argv[1:]
os.makedirs(target, mode=0o700, exist_ok=True)
for name in sorted(os.listdir(source)):
    path, state = os.path.join(source, name), xxhash.xxh3_128()
    if not name.endswith('.whl'):
        continue
    with open(path, 'rb') as file:
        while data := file.read(1 << 20):
            state.update(data)
    kept = nonce + '-' + state.hexdigest()
    nbytes = os.path.getsize(path)
    os.rename(path, os.path.join(target, kept))
    print('@sky wheel', kept, nbytes, name, flush=True)
"""
"""Run by the host's Python: moves wheels into a value server's store, by the hash of what they hold."""

_PACK = """
import base64, hashlib, os, sys, zipfile
from importlib import metadata
found, lines = metadata.distribution('pip'), []
info = 'pip-%s.dist-info' % found.version
with zipfile.ZipFile(os.path.join(sys.argv[1], 'pip-%s-py3-none-any.whl' % found.version), 'w') as archive:
    for file in found.files:
        own = file.parts[0] == info and file.name in ('RECORD', 'INSTALLER', 'REQUESTED', 'uv_cache.json')
        if not own and '..' not in file.parts and '__pycache__' not in file.parts:
            data = file.read_binary()
            archive.writestr(str(file), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')
            lines.append('%s,sha256=%s,%d\\n' % (file, digest, len(data)))
    archive.writestr(info + '/RECORD', ''.join(lines) + info + '/RECORD,,\\n')
"""
"""Run by the Python that downloads: makes a wheel of its pip, which then need not be downloaded twice."""

_FETCH = r"""    if [ ! -w "$HOME" ]; then
        UV_CACHE_DIR=$folder/cache/uv PIP_CACHE_DIR=$folder/cache/pip
        export UV_CACHE_DIR PIP_CACHE_DIR
    fi
    made=$drop/tools
    step "writing the list of packages" requirements
    answering
    step "making room for a download" tools
    as_pip
    step "choosing versions with uv" "$uv" pip compile --quiet --no-header --no-annotate --python "$made/bin/python" \
        "$drop/requirements.txt" -c "$drop/builds.txt" -o "$drop/versions.txt"
    if takes_cuda "$drop/versions.txt"; then refuse_cuda; fi
    unset UV_TORCH_BACKEND
    divide
    fetch_lists
    step "fetching what passes them on" wheels carriers
    step "installing it" unpack_xxhash
    step "keeping it" keep carriers
    tell step "fetching packages"
    keep pip
    if [ -d "$drop/uv" ]; then keep uv; fi
    : >"$drop/hashing"
    wait $fetching
    for each in "$drop"/*.failed; do
        if [ -f "$each" ]; then sed 's/^/  /' "$each"; command="pip wheel" status=1; fail; fi
    done
    tell done
    kill "$ticker" 2>/dev/null
    rm -rf "$made" "$drop"/*.list "$drop"/*.said
    exit 0
}

# pip downloads; uv chooses, and is one of the wheels where the host has none.
tools() {
    if [ -n "$uv" ]; then
        as_pip
        "$uv" venv --quiet --no-project --python "$python" "$made" || return 1
        env -u UV_COMPILE_BYTECODE "$uv" pip install --quiet --python "$made/bin/python" pip && pack
        return
    fi
    "$python" -m venv "$made" &&
        "$made/bin/python" -m pip wheel $quick --no-deps -w "$drop/uv" uv &&
        "$made/bin/python" -m pip install --quiet --no-index --find-links "$drop/uv" uv || return 1
    uv=$made/bin/uv
    pack
}

pack() { mkdir "$drop/pip" && "$made/bin/python" -c "$pack" "$drop/pip"; }

unpack_xxhash() { "$made/bin/python" -m zipfile -e "$drop"/carriers/xxhash-*.whl "$("$made/bin/python" -c "$purelib")"; }

# A list each for what carries the others, what has a label (an index of PyTorch's may be the only one that has it), and the
# rest in equal parts.
divide() {
    sed -n 's/ .*//; /^[A-Za-z0-9._-]*==/p' "$drop/versions.txt" >"$drop/pins.txt"
    sed 's/^/@sky pin /' "$drop/pins.txt"
    indexes=$(sed -n 's/^--extra-index-url/&/p' "$drop/requirements.txt")
    for label in $(sed -n 's/^[^+]*+\([a-z]*[0-9.]*\)$/\1/p' "$drop/pins.txt" | sort -u); do
        if [ -n "$backend" ]; then labelled="${labelled-}--extra-index-url $labels$label
"; fi
    done
    list carriers '^(pyzmq|xxhash)==' ''
    list labelled '[+]' "${labelled-}"
    for part in 0 1 2; do list "part-$part" "" "" "$part"; done
}

# NAME PATTERN MORE PART: the pins that match, or a third of those that match neither.
list() {
    found=$(awk -v want="$2" -v part="${4-}" '
        part == "" { if ($0 ~ want) print; next }
        $0 !~ /^(pyzmq|xxhash)==/ && $0 !~ /[+]/ { if (n++ % 3 == part) print }' "$drop/pins.txt")
    if [ -n "$found" ]; then printf '%s\n' "$indexes" "${3-}" "$found" >"$drop/$1.list"; fi
}

wheels() { "$made/bin/python" -m pip wheel --quiet --no-deps -w "$drop/$1" -r "$drop/$1.list"; }

keep() { "$made/bin/python" -c "$keep" "$drop/$1" "$drop/store" "$incoming"; }

# What comes is kept as soon as there is what hashes it.
fetch_lists() {
    for one in "$drop"/*.list; do
        one=${one##*/}
        one=${one%.list}
        if [ "$one" = carriers ]; then continue; fi
        (
            if wheels "$one" </dev/null >"$drop/$one.said" 2>&1; then
                until [ -f "$drop/hashing" ]; do
                    if [ ! -d "$drop" ]; then exit; fi  # it has failed meanwhile
                    sleep 0.2 2>/dev/null || sleep 1
                done
                keep "$one"
            else
                tail -n 15 "$drop/$one.said" >"$drop/$one.failed"
            fi
        ) &
        fetching="${fetching-} $!"
    done
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
        "labels": WHEELS,
        "no_cuda": "" if facts.accelerated or plan.builds.only_cuda else "yes",
        "silent": " ".join(plan.silent),
        "keep": _KEEP,
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
