"""Facts of a host: the probe's output as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from skymagic.bootstrap.shell import MARK
from skymagic.plan import gpus
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.plans import Inventory
from skymagic.wire.untrusted import sanitized_line

PATHS = frozenset({"home", "folder", "env", "python", "uv", "own"})
"""Facts that are paths on the host or contain some."""


@dataclass(frozen=True)
class Python:
    """An interpreter on a host.

    Attributes:
        version: major and minor version, such as ``"3.11"``.
        path: absolute path.
    """

    version: str
    path: str


@dataclass(frozen=True)
class PlannedWheel:
    """A wheel that uv has chosen for a host.

    Attributes:
        name: canonical project name.
        version: version with its local label, such as ``"2.13.0+cpu"``.
        nbytes: size of the file; None if the index does not report it.
        source: the server that has it, or a folder.
    """

    name: str
    version: str
    nbytes: int | None = None
    source: str = ""


@dataclass(frozen=True)
class HostFacts:
    """Facts of a host as the probe gathered them.

    Attributes:
        system: output of ``uname -s``, such as ``Linux``.
        machine: output of ``uname -m``, such as ``x86_64``.
        libc: ``"glibc 2.36"``, ``"musl"``, or "" if neither.
        home: ``$HOME`` as a command over SSH sees it.
        folder: skymagic's folder on the host.
        clock: seconds since 1970 by the host's clock.
        boot: identifier that changes with every boot; "" if the system has none.
        descriptors: number of files that one process may open; None if unlimited or unknown.
        disk_kb: free space at `folder`.
        shm_kb: free space in /dev/shm; None if it is not usable.
        memory_kb: memory of the machine.
        refusal: error when writing to `folder`; "" if it can be written.
        noexec: folder whose file system does not run programs; "" if it does.
        foreign: `folder` as listed by ls, if it belongs to another user.
        exposed: `folder` as listed by ls, if other users may write to it.
        gpus: names of its GPUs.
        devices: its GPUs as the driver lists them.
        visible: CUDA_VISIBLE_DEVICES of its sessions; None if it is not set.
        complaint: error of the driver, if it did not list the GPUs.
        driver: version of NVIDIA's driver; "" without one.
        rocm: whether AMD's ROCm is installed.
        addresses: (interface, address) of all interfaces that are up, including loopback; the
            interface is "-" if unknown.
        pythons: interpreters; not searched for if the environment is ready.
        unreached: sources of Python that uv would fetch from, if no interpreter has the requested
            version and none of the sources can be reached; else "".
        uv: path of a uv on the host, if it is new enough.
        no_index: whether its pip may use only links and no index.
        indexes: number of its package indexes that answer; None if they were not queried.
        links: whether it has links besides its indexes.
        silent: (URL, reason) of package indexes that do not answer.
        planned: wheels that the notebook's uv has chosen for a new environment, () if it could not;
            None if it was not asked. The host's own indexes may have others.
        gets_python: whether the notebook sends it a Python.
        env: name of the environment for the requirements.
        ready: whether the environment exists and its interpreter starts.
        own: digest by name of the notebook's own distributions installed in it.
        sent: whether its packages were sent by the notebook.
        code: whether skymagic's code is installed.
        packages: version by name of the required packages in an interpreter that is used unchanged.
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
    planned: tuple[PlannedWheel, ...] | None = field(default=None, repr=False)
    gets_python: bool = False
    env: str = ""
    ready: bool = False
    own: Mapping[str, str] = field(default_factory=dict, repr=False)
    sent: bool = False
    code: bool = False
    packages: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def accelerated(self) -> bool:
        """Whether the host runs programs that are built for GPUs."""
        return bool(self.gpus or self.driver) or self.rocm

    @property
    def without_index(self) -> bool:
        """Whether its packages must be sent by the notebook.

        That is so if none of its indexes answers, or it has none, and it has no links either.
        """
        return self.sent or (self.indexes == 0 and not self.links)

    def interpreters(self, minor: str) -> list[Python]:
        """Return the interpreters of this version."""
        return [python for python in self.pythons if python.version == minor]

    def inventory(self, python: str = "") -> Inventory:
        """Return the host's resources as planning needs them."""
        memory_gb = round(self.memory_kb * 1024 / 1e9, 1)
        visible_gpus = gpus.visible(self.devices, self.visible)
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
            visible_gpus,
            python,
            descriptors=self.descriptors,
            unusable=unusable,
        )


def parse(out: str) -> HostFacts:
    """Parse the probe's output. Lines of other programs are skipped.

    Raises:
        ValueError: the probe did not run to its end, or this is not a POSIX system.
    """
    values: dict[str, list[str]] = {}
    for line in out.splitlines():
        if line.startswith(MARK):
            name, _, value = line.removeprefix(MARK).partition(" ")
            # Paths are used unchanged. Everything else is shown to the user.
            value = value.strip() if name in PATHS else sanitized_line(value.strip())
            values.setdefault(name, []).append(value)
    if not {"system", "end"} <= set(values):
        raise ValueError("its shell did not run the probe to its end")

    def text(name: str) -> str:
        return values.get(name, [""])[-1]

    def number(name: str) -> int | None:
        return int(text(name)) if text(name).isdigit() else None

    devices = gpus.parse_nvidia_smi(
        values.get("gpu", ()),
        values.get("gpu_tree", ()),
        values.get("gpu_user", ()),
        values.get("gpu_hold", ()),
    )
    return HostFacts(
        system=text("system"),
        machine=text("machine"),
        hostname=text("hostname"),
        home=text("home"),
        folder=text("folder"),
        user=text("user"),
        uid=number("uid") or 0,
        libc=text("libc"),
        clock=number("clock") or 0,
        boot=text("boot"),
        cpus=number("cpus") or 1,
        memory_kb=number("memory_kb") or 0,
        descriptors=number("descriptors"),
        disk_kb=number("disk_kb"),
        shm_kb=number("shm_kb"),
        refusal=text("refusal"),
        noexec=text("noexec"),
        foreign=text("foreign"),
        exposed=text("exposed"),
        gpus=tuple(device.name for device in devices),
        devices=devices,
        visible=values["visible"][-1] if "visible" in values else None,
        complaint=text("gpu_complaint"),
        driver=text("driver"),
        rocm="rocm" in values,
        addresses=tuple(_pair(value) for value in values.get("address", ())),
        pythons=tuple(dict.fromkeys(map(_python, values.get("python", ())))),
        unreached=text("unreached"),
        uv=text("uv") or None,
        no_index="no_index" in values,
        indexes=number("indexes"),
        links="links" in values,
        silent=tuple(_pair(value) for value in values.get("silent", ())),
        env=text("env"),
        ready="ready" in values,
        own=dict(_pair(value) for value in values.get("own", ())),
        sent="sent" in values,
        code="code" in values,
        packages=dict(_pair(value) for value in values.get("package", ())),
    )


def _pair(value: str) -> tuple[str, str]:
    first, _, second = value.partition(" ")
    return first, second


def _python(value: str) -> Python:
    version, _, path = value.partition(" ")
    return Python(version, path)
