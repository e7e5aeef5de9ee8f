"""Facts of a host: the probe's output as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skymagic.bootstrap.shell import MARK
from skymagic.plan import gpus
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.plans import Inventory
from skymagic.wire.untrusted import sanitized_line

PATHS = frozenset({"home", "folder", "env", "python", "uv", "own"})
"""Facts that are paths on the host, or hold some."""


@dataclass(frozen=True)
class Python:
    """An interpreter on a host.

    Attributes:
        version: major and minor, as ``"3.11"``.
        path: where it is.
        venv: whether it can make environments. pip: whether it can put pip into them.
    """

    version: str
    path: str
    venv: bool = True
    pip: bool = True


@dataclass(frozen=True)
class BuildOffer:
    """A file that a package index of a host has, and that runs there.

    Attributes:
        name: of the project, canonical. version: with its label: ``"2.13.0+cpu"``.
        kind: ``"cpu"``, ``"cuda"``, ``"rocm"``, … for what is built for one of them.
        nbytes: its size; None where the index does not say.
        source: the index's URL, without passwords, or a folder on the host.
    """

    name: str
    version: str
    kind: str = "cpu"
    nbytes: int | None = None
    source: str = ""

    @property
    def public(self) -> str:
        """The version without its label."""
        return self.version.partition("+")[0]


@dataclass(frozen=True)
class Facts:
    """Facts of a host, as the probe found them.

    Attributes:
        system, machine: as uname says: ``Linux``, ``x86_64``.
        libc: ``"glibc 2.36"``, ``"musl"``, or "" where neither.
        home: ``$HOME`` as a command over SSH sees it. folder: where skymagic keeps its things there.
        clock: seconds since 1970 by the host's clock.
        boot: changes with every boot; "" where the system does not tell.
        descriptors: files that one process may have open; None for no limit, or where nobody can tell.
        disk_kb, shm_kb, memory_kb: free space at `folder` and in /dev/shm (None: not usable), memory of the machine.
        refusal: why nothing can be written at `folder`; "" when it can.
        noexec: the folder whose file system runs no programs; "" when it does.
        foreign: `folder` as ls shows it when it belongs to another user. exposed: when others may write to it.
        gpus: names of its GPUs. devices: the same as its driver lists them. visible: CUDA_VISIBLE_DEVICES of its sessions; None where it is
            not set. complaint: what its driver has said instead.
        driver: version of NVIDIA's driver; "" without one. rocm: whether AMD's ROCm is there.
        addresses: (interface, address) of all interfaces that are up, loopback too; interface "-" where unknown.
        pythons: interpreters; not looked for when the environment is ready.
        unreached: places that uv fetches Pythons from, where no interpreter has the version that is wanted and none of them can be
            connected to; else "".
        uv: path of a uv on the host that chooses PyTorch's builds.
        no_index: whether its pip may use no index, only links.
        indexes: how many of its package indexes answer; None where nobody asked. links: whether it has links beside them.
        silent: (URL, why) of its package indexes that do not answer. offers: what the others have of what was asked.
        env: name of the environment for what is wanted. ready: whether it is there and its interpreter starts.
        own: name → digest of the notebook's own distributions in it. sent: whether its packages came from the notebook.
        code: whether skymagic's code is there.
        packages: name → version of those that are wanted and there, for an interpreter that is used as it is.
    """

    system: str
    machine: str
    hostname: str
    home: str
    folder: str
    user: str = ""
    uid: int = -1
    libc: str = ""
    clock: int = 0
    boot: str = ""
    cpus: int = 1
    memory_kb: int = 0
    descriptors: int | None = None
    disk_kb: int | None = None
    shm_kb: int | None = None
    refusal: str = ""
    noexec: str = ""
    foreign: str = ""
    exposed: str = ""
    gpus: tuple[str, ...] = ()
    devices: tuple[GpuDevice, ...] = field(default=(), repr=False)
    visible: str | None = None
    complaint: str = ""
    driver: str = ""
    rocm: bool = False
    addresses: tuple[tuple[str, str], ...] = ()
    pythons: tuple[Python, ...] = ()
    unreached: str = ""
    uv: str | None = None
    no_index: bool = False
    indexes: int | None = None
    links: bool = False
    silent: tuple[tuple[str, str], ...] = ()
    offers: tuple[BuildOffer, ...] = field(default=(), repr=False)
    env: str = ""
    ready: bool = False
    own: Mapping[str, str] = field(default_factory=dict, repr=False)
    sent: bool = False
    code: bool = False
    packages: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def accelerated(self) -> bool:
        """Whether it runs programs that are built for GPUs."""
        return bool(self.gpus or self.driver) or self.rocm

    @property
    def without_index(self) -> bool:
        """Whether its packages have to come from the notebook: none of its indexes answers, or it has none, and no links either."""
        return self.sent or (self.indexes == 0 and not self.links)

    def interpreters(self, minor: str) -> list[Python]:
        """Interpreters of this version, those first that can make environments."""
        fitting = [python for python in self.pythons if python.version == minor]
        return sorted(
            fitting, key=lambda python: (not (python.venv and python.pip), not python.venv)
        )

    def inventory(self, python: str = "") -> Inventory:
        """The host as planning sees it."""
        memory_gb = round(self.memory_kb * 1024 / 1e9, 1)
        seen = gpus.visible(self.devices, self.visible)
        unusable = (
            f"the driver of {self.hostname} does not answer ({self.complaint})"
            if self.complaint
            else ""
        )
        if self.rocm and not self.devices:
            unusable = f"{self.hostname} has AMD's GPUs (ROCm), and ranks run CUDA programs"
        return Inventory(
            self.hostname,
            self.cpus,
            memory_gb,
            seen,
            python,
            descriptors=self.descriptors,
            unusable=unusable,
        )


def parse(out: str) -> Facts:
    """Parse the probe's output; other lines before or between are skipped.

    Raises:
        ValueError: it did not come to its end, or this is no POSIX system.
    """
    said: dict[str, list[str]] = {}
    for line in out.splitlines():
        if line.startswith(MARK):
            name, _, value = line.removeprefix(MARK).partition(" ")
            # paths are used as they are; all else is shown
            value = value.strip() if name in PATHS else sanitized_line(value.strip())
            said.setdefault(name, []).append(value)
    if not {"system", "end"} <= set(said):
        raise ValueError("its shell did not run the probe to its end")

    def one(name: str) -> str:
        return said.get(name, [""])[-1]

    def number(name: str) -> int | None:
        return int(one(name)) if one(name).isdigit() else None

    rows, tree, users, held = (
        said.get(name, ()) for name in ("gpu", "gpu_tree", "gpu_user", "gpu_hold")
    )
    devices = gpus.listed(rows, tree, users, held)
    words = (
        "system",
        "machine",
        "hostname",
        "home",
        "folder",
        "user",
        "libc",
        "boot",
        "refusal",
        "noexec",
        "foreign",
    )
    plain: dict[str, Any] = {name: one(name) for name in (*words, "exposed", "env", "unreached")}
    plain |= {name: name in said for name in ("rocm", "no_index", "links", "ready", "sent", "code")}
    plain |= {name: number(name) for name in ("descriptors", "disk_kb", "shm_kb", "indexes")}
    plain |= {name: number(name) or 0 for name in ("uid", "clock", "memory_kb")}
    return Facts(
        **plain,
        cpus=number("cpus") or 1,
        gpus=tuple(device.name for device in devices),
        devices=devices,
        visible=said["visible"][-1] if "visible" in said else None,
        complaint=one("gpu_complaint"),
        driver=one("driver"),
        silent=tuple(_pair(value) for value in said.get("silent", ())),
        offers=tuple(_offer(value, one("system")) for value in said.get("offer", ())),
        addresses=tuple(_pair(value) for value in said.get("address", ())),
        pythons=tuple(dict.fromkeys(map(_python, said.get("python", ())))),
        uv=one("uv") or None,
        own=dict(_pair(value) for value in said.get("own", ())),
        packages=dict(_pair(value) for value in said.get("package", ())),
    )


def _pair(value: str) -> tuple[str, str]:
    first, _, second = value.partition(" ")
    return first, second


def _offer(value: str, system: str) -> BuildOffer:
    name, version, nbytes, kind, source = (value.split(" ", 4) + [""] * 5)[:5]
    label = version.partition("+")[2]
    if label:
        kind = "cuda" if label.startswith("cu") else label.rstrip("0123456789.")
    elif kind == "-":  # PyPI's wheels of torch are for CUDA on Linux
        kind = "cuda" if system == "Linux" and name.startswith("torch") else "cpu"
    return BuildOffer(name, version, kind, int(nbytes) if nbytes.isdigit() else None, source)


def _python(value: str) -> Python:
    version, venv, pip, path = (value.split(" ", 3) + [""] * 4)[:4]
    return Python(version, path, venv == "venv", pip == "pip")
