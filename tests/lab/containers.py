"""Root file systems for containers, made in a second of this machine's own files; no registry and no network is needed.

::

    image = root_file_system(tmp_path / "image")
    with storage(tmp_path) as env:         # podman's images and containers, in a folder of their own
        ...

An image has this interpreter as ``python3``, with the packages that ranks need but for `LACKING`, and nothing of the notebook's environment.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from uv import find_uv_bin

from skymagic.bootstrap.requirements import RANK_DEPENDENCIES
from skymagic.plan.distributions import canonical
from tests.lab.hosts import SBIN

LACKING = "xxhash"
"""A package that ranks need, and images lack."""
MARKER = "/etc/image-of-tests"
"""A file that only images have."""
PROGRAMS = (
    "sh awk base64 basename cat chmod cp cut date df dirname env expr find flock getconf grep gzip head hostname id kill ldd ln ls "
    "mkdir mkfifo mktemp mv nproc printf ps pwd readlink rm rmdir sed setsid sleep sort stat tail tar tee test touch tr true false uname "
    "uniq wc which xargs"
).split()
LIBRARY = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
UNUSED = (
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "config-*",
    "__pycache__",
)


def root_file_system(folder: Path) -> Path:
    """Make a root file system in this folder, which must not exist."""
    for name in (
        "proc",
        "sys",
        "dev",
        "tmp",
        "home",
        "root",
        "mnt",
        "var/tmp",
        "etc",
        "run",
        "usr/bin",
        "usr/local/bin",
    ):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "sbin"):
        (folder / name).symlink_to("usr/bin")
    programs = [Path(found) for name in PROGRAMS if (found := shutil.which(name, path=SBIN))]
    for program in programs:
        shutil.copy2(program, folder / "usr/bin" / program.name)
    library = folder / "usr/local" / LIBRARY
    interpreter = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
    shutil.copy2(interpreter, folder / "usr/local/bin/python3")
    shutil.copytree(
        sysconfig.get_paths()["stdlib"], library, ignore=shutil.ignore_patterns(*UNUSED)
    )
    packages = library / "site-packages"
    for file in _files(_needed()):
        target = packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(sysconfig.get_paths()["purelib"]) / file, target)
    # uv, which a notebook sends, needs what every image of a distribution has
    compiled = [interpreter, Path(find_uv_bin()), *programs, *library.rglob("*.so")]
    for path in _libraries(compiled):
        target = folder / str(path).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(path, target)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\n")
    (folder / "etc/hosts").touch()
    (folder / "etc/resolv.conf").touch()
    (folder / MARKER.lstrip("/")).write_text("image\n")
    return folder


def _needed() -> set[str]:
    """The distributions that ranks need, with their dependencies, but for `LACKING`."""
    needed: set[str] = set()
    waiting = [name for name in RANK_DEPENDENCIES if name != LACKING]
    unused = {"debugpy"}  # large, and ipykernel does without it
    while waiting:
        name = canonical(waiting.pop())
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another system
        if name not in needed | unused:
            needed.add(name)
            waiting += [re.split(r"[^\w.-]", one)[0] for one in required if "extra" not in one]
    return needed


def _files(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        for file in metadata.files(name) or ():
            if not str(file).startswith("..") and "__pycache__" not in file.parts:
                yield str(file)


def _libraries(programs: Iterable[Path]) -> set[Path]:
    """What these programs are linked with, and the loader."""
    output = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
    return {Path(found) for found in re.findall(r"(?:=> |^\s)(/\S+) \(0x", output, re.MULTILINE)}


def installable(folder: Path) -> dict[str, str]:
    """Variables with which uv, as pip, finds `LACKING`, as a wheel of what is installed here, in this folder, and asks no index."""
    distribution = metadata.distribution(LACKING)
    tag = re.findall(r"(?m)^Tag: (\S+)", distribution.read_text("WHEEL") or "")[0]
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"{LACKING}-{distribution.version}-{tag}.whl", "w") as wheel:
        for name in _files([LACKING]):
            if not name.endswith(("INSTALLER", "REQUESTED", "direct_url.json")):
                wheel.write(str(distribution.locate_file(name)), name)
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}


# -- engines -------------------------------------------------------------------------------------


def has_podman() -> bool:
    """Whether podman runs containers here."""
    return _runtime() is not None


@functools.cache
def _runtime() -> str | None:
    """The program with which podman runs containers on this machine: crun knows only some kinds of cgroups. None if none does."""
    if shutil.which("podman", path=SBIN) is None:
        return None
    for runtime in filter(lambda name: shutil.which(name, path=SBIN), ("crun", "runc")):
        with tempfile.TemporaryDirectory(prefix="podman-", ignore_cleanup_errors=True) as folder:
            root = Path(folder, "image")
            program = Path(shutil.which("true", path=SBIN) or "/bin/true")
            for path in {program, *_libraries([program])}:
                target = root / str(path).lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
            with storage(Path(folder), runtime) as env:
                words = f"podman run --rm --network=host --pid=host --rootfs {root}:O {program}"
                done = subprocess.run(words.split(), env={**os.environ, **env}, capture_output=True)
        if done.returncode == 0:
            return runtime
    return None


def has_charliecloud() -> bool:
    """Whether ch-run is here, and users may have mounts."""
    if shutil.which("ch-run", path=SBIN) is None:
        return False
    return subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0


@contextmanager
def storage(folder: Path, runtime: str | None = None) -> Iterator[dict[str, str]]:
    """Variables with which podman keeps all that it has in this folder, and that no process needs a right for that this one lacks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [f"nofile={soft}:{hard}", "nproc=32768:32768"]  # podman gives itself no more processes
    files = {
        "storage": f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n',
        "containers": f'[containers]\ndefault_ulimits = {json.dumps(limits)}\n[engine]\nruntime = "{runtime or _runtime()}"\n',
    }
    for name, text in files.items():
        (folder / f"{name}.conf").write_text(text)
    env = {
        "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
        "CONTAINERS_CONF": f"{folder}/containers.conf",
    }
    try:
        yield env
    finally:
        podman(env, "rm", "--all", "--force", "--time=0")


def podman(env: Mapping[str, str], *words: str) -> str:
    """What podman prints."""
    command = ["podman", *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True).stdout


STAND_IN = """#!/bin/sh
# Does what these options of apptainer do, by charliecloud.
[ "$1" = exec ] || exit 1
shift
options=
while :; do
    case $1 in
        --bind=/dev/shm) ;;
        --bind=*) options="$options $1" ;;
        --pwd=*) options="$options --cd=${1#--pwd=}" ;;
        *) break ;;
    esac
    shift
done
image=$1
shift
export PATH=/usr/local/bin:/usr/bin:/bin USER="${USER:-root}"
ch-run $options "$image" -- "$@"
"""
"""Instead of apptainer. As that does with an image in a file, it stays the parent of the container's first process."""
