"""Choose the builds that fit a host, and describe what its new environment will hold.

All functions here are pure. uv chooses wheels for the host's platform, and PyTorch's build, for
CPUs or for the host's GPUs, if PyTorch's index answers. Otherwise the host's other indexes must
provide one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skymagic.bootstrap.downloading import LockedWheel
from skymagic.bootstrap.facts import HostFacts, PlannedWheel
from skymagic.bootstrap.layers import missing_in_image
from skymagic.bootstrap.local_wheels import LocalWheel
from skymagic.bootstrap.requirements import TORCH, Requirements
from skymagic.plan.image import project
from skymagic.plan.units import count, size
from skymagic.plugins._torch.plugin import WHEELS

# -- platforms and builds --------------------------------------------------------------------------


_UV_GLIBC = (17, 28, *range(31, 41))
"""Minor versions of glibc 2 that uv accepts as platforms."""


def uv_platform(facts: HostFacts) -> str:
    """Return the name of the host's platform for ``uv pip compile --python-platform``.

    Returns:
        The name, or "" if uv does not support the platform.
    """
    if facts.system == "Darwin":
        return "aarch64-apple-darwin" if facts.machine == "arm64" else "x86_64-apple-darwin"
    if facts.system != "Linux" or facts.machine not in ("x86_64", "aarch64", "riscv64"):
        return ""
    if facts.libc == "musl":
        return f"{facts.machine}-unknown-linux-musl"
    if facts.machine == "riscv64":
        return "riscv64-unknown-linux-gnu"
    match = re.search(r"2\.(\d+)", facts.libc)
    minor = int(match[1]) if match else 17
    return (
        f"{facts.machine}-manylinux_2_"
        f"{max(known for known in _UV_GLIBC if known <= minor or known == 17)}"
    )


TORCH_INDEX = WHEELS + "cpu"
"""PyTorch's own index of CPU builds, used to test whether PyTorch's indexes can be reached."""


def backend_for(requirements: Requirements, facts: HostFacts) -> str:
    """Return PyTorch's build for a host as a value of uv's ``--torch-backend``.

    Returns:
        ``"cpu"``, ``"auto"``, or the build that the image names, such as ``"cu124"``. "" if
            PyTorch's own index does not answer, or the image names the index of PyTorch's packages,
            so that these must provide the build.
    """
    if any(project(text) in TORCH for _, served in requirements.scoped for text in served):
        return ""
    if TORCH_INDEX in dict(facts.silent) or facts.no_index:
        return ""
    return (requirements.backend or "auto") if facts.accelerated else "cpu"


def build_constraints(pins: Iterable[str], facts: HostFacts) -> tuple[str, ...]:
    """Return constraints that choose PyTorch's build by the label of its version.

    They serve where PyTorch's own index does not answer.

    An index may still have another build that fits: those for macOS have no labels.

    Args:
        pins: requirements; only those that pin PyTorch's packages count.
        facts: the host.
    """
    constraints = []
    for text in dict.fromkeys(pins):
        stated, _, version = text.partition("==")
        if project(stated) in TORCH and re.fullmatch(r"[\w.]+", version):
            relation = "!=" if facts.accelerated else "=="
            constraints.append(f"{project(stated)}{relation}{version}+cpu")
    return tuple(constraints)


JAX = re.compile(r"jax(\[cuda1\d\])?(?=$|[\s<>=!~;,@])")
"""Matches a requirement for JAX as its plugin and Keras's plugin write it."""
CUDA_13_DRIVER = 580
"""Lowest NVIDIA driver version that makes uv's ``auto`` pick PyTorch's builds for CUDA 13."""


def for_gpus(packages: Sequence[str], facts: HostFacts, backend: str) -> tuple[str, ...]:
    """Adapt requirements to a host: add CUDA support to JAX if the host has NVIDIA GPUs.

    JAX and PyTorch both bring CUDA's libraries, and one process can load only one copy of each. JAX
    therefore gets the same CUDA major version as PyTorch's build.

    Args:
        packages: requirements for the host.
        facts: the host.
        backend: PyTorch's build, as of `backend_for`.
    """
    if not (facts.gpus or facts.driver):
        return tuple(JAX.sub("jax", text) if JAX.match(text) else text for text in packages)
    driver = facts.driver.partition(".")[0]
    newest = 13 if driver.isdigit() and int(driver) >= CUDA_13_DRIVER else 12
    major = backend[2:4] if backend.startswith("cu") else newest
    return tuple(
        JAX.sub(f"jax[cuda{major}]", text, count=1) if JAX.match(text) else text
        for text in packages
    )


def needs_cuda(wheels: Iterable[PlannedWheel | LockedWheel]) -> bool:
    """Return True if PyTorch is among the wheels in a build for CUDA."""
    names = {wheel.name for wheel in wheels}
    return "torch" in names and any(name.startswith(("nvidia-", "cuda-")) for name in names)


def cuda_question(hosts: Mapping[str, HostFacts]) -> str:
    """Return what must be confirmed before hosts without GPUs get PyTorch for CUDA, or "".

    Args:
        hosts: facts with plans, by host name. Equal hosts share one sentence.
    """
    hosts_by_build: dict[PlannedWheel, list[str]] = {}
    for host, facts in hosts.items():
        wheels = facts.planned or ()
        if needs_cuda(wheels) and not facts.accelerated:
            torch = next(wheel for wheel in wheels if wheel.name == "torch")
            hosts_by_build.setdefault(torch, []).append(host)
    return "; ".join(
        f"{', '.join(names)} {'have' if len(names) > 1 else 'has'} no GPU, and the package indexes "
        f"have only a build for CUDA of torch {torch.version} ("
        f"{size(torch.nbytes) if torch.nbytes else 'of unknown size'}, and the CUDA libraries that "
        "it needs)"
        for torch, names in hosts_by_build.items()
    )


# -- packages of a plan ----------------------------------------------------------------------------


ASSUMED_BYTES = 2_000_000
"""Assumed size of a wheel if its index does not report one."""
ASSUMED_TORCH_BYTES = {True: 800_000_000, False: 200_000_000}
"""Assumed size of a PyTorch wheel if its index does not report one.

True is the key of builds for GPUs, False that of builds for CPUs.
"""
UNPACKED = 4
"""Bytes on disk per byte of a wheel.

This counts the wheel itself, and its contents at about three times its size.
"""


@dataclass(frozen=True)
class Package:
    """A package of a new environment. Fields that are not known yet are empty."""

    name: str
    version: str = ""
    build: str = ""
    nbytes: int | None = None
    source: str = ""

    @property
    def text(self) -> str:
        """A line that describes the package.

        For example: ``torch 2.13.0+cpu, CPU build, 184.2 MB, from download.pytorch.org``
        """
        named = f"{self.name} {self.version or '(the newest)'}"
        details = (
            self.build,
            size(self.nbytes) if self.nbytes else "",
            f"from {self.source}" if self.source else "",
        )
        return ", ".join(filter(None, (named, *details)))


def packages(requirements: Requirements, facts: HostFacts) -> tuple[Package, ...]:
    """Return the packages that the host's new environment will hold.

    Without a plan of the notebook's uv, these are the requirements and their preferred versions.
    """
    planned = facts.planned or [
        PlannedWheel(name, pin.partition("==")[2]) for name, pin in requirements.pins.items()
    ]
    backend = backend_for(requirements, facts)
    return (
        *(_package(wheel, requirements, facts, backend) for wheel in planned),
        *map(_own, requirements.own),
    )


def _package(
    wheel: PlannedWheel, requirements: Requirements, facts: HostFacts, backend: str
) -> Package:
    build = ""
    if wheel.name in requirements.torch:
        label = wheel.version.partition("+")[2] or backend
        if needs_cuda(facts.planned or ()) and not facts.accelerated:
            build = "CUDA build"
        elif label == "auto":
            build = "the build that fits " + (
                f"driver {facts.driver}" if facts.driver else "its GPUs"
            )
        else:
            build = f"{'CPU' if label in ('cpu', '') else label} build"
    return Package(wheel.name, wheel.version, build, wheel.nbytes, wheel.source)


def _own(wheel: LocalWheel) -> Package:
    return Package(
        wheel.name, wheel.version, "", Path(wheel.path).stat().st_size, f"{wheel.source} here"
    )


def download_bytes(requirements: Requirements, facts: HostFacts) -> int:
    """Estimate how many bytes a new environment downloads from the network.

    Packages from links and indexes on a disk do not count, nor those of an unknown source.
    """
    torch = ASSUMED_TORCH_BYTES[facts.accelerated]
    return sum(
        package.nbytes or (torch if package.name in requirements.torch else ASSUMED_BYTES)
        for package in packages(requirements, facts)
        if package.source and not re.search(r"^/| here$", package.source)
    )


def shortage(requirements: Requirements, facts: HostFacts) -> str:
    """Explain why the host's disk will not hold a new environment, or return "" if it may.

    Only packages whose sizes are known count.
    """
    return shortage_of(sum(package.nbytes or 0 for package in packages(requirements, facts)), facts)


def shortage_of(nbytes: int, facts: HostFacts) -> str:
    """Explain why `nbytes` of wheels do not fit on the host's disk, or return ""."""
    needed, free = nbytes * UNPACKED, facts.disk_kb
    if free is None or needed <= free * 1024:
        return ""
    return (
        f"its disk will not hold the packages: about {size(needed)} needed, {size(free * 1024)} "
        f"free at {facts.folder}"
    )


NAMED_PACKAGES = 5
"""Number of dependencies that a plan lists by name."""


def lines(requirements: Requirements, hosts: Mapping[str, HostFacts]) -> tuple[str, ...]:
    """Describe what is installed on hosts that are not ready.

    There is a line per requested package and a line for all dependencies. Equal hosts share their
    lines, even if the index of only some of them reported a size in time.
    """
    requested: dict[str, list[str]] = {}
    dependencies: dict[str, list[str]] = {}
    for names, host_packages in _equal_hosts(requirements, hosts):
        for package in host_packages:
            if package.name in requirements.requested:
                requested.setdefault(package.text, []).extend(names)
        if dependent := [
            package for package in host_packages if package.name not in requirements.requested
        ]:
            dependencies.setdefault(_summary(dependent), []).extend(names)
    return tuple(
        text + _host_suffix(names, hosts)
        for text, names in (*requested.items(), *dependencies.items())
    )


def _equal_hosts(
    requirements: Requirements, hosts: Mapping[str, HostFacts]
) -> list[tuple[list[str], list[Package]]]:
    """Group hosts of one platform that get the same versions and builds.

    Returns:
        The host names and the packages of each group.
    """
    groups: dict[object, list[tuple[str, tuple[Package, ...]]]] = {}
    for host, facts in hosts.items():
        host_packages = packages(missing_in_image(requirements, facts), facts)
        versions = tuple(
            (package.name, package.version, package.build) for package in host_packages
        )
        key = (uv_platform(facts), facts.accelerated, versions)
        groups.setdefault(key, []).append((host, host_packages))
    return [
        (
            [host for host, _ in group],
            [
                _merge_descriptions(alike)
                for alike in zip(*(host_packages for _, host_packages in group), strict=True)
            ],
        )
        for group in groups.values()
    ]


def _merge_descriptions(alike: Sequence[Package]) -> Package:
    """Merge the descriptions that the indexes of several hosts give of one package.

    Take details that only some of them report, and the largest size.
    """
    sources = dict.fromkeys(package.source for package in alike if package.source)
    return replace(
        alike[0],
        nbytes=max(package.nbytes or 0 for package in alike) or None,
        source=" or ".join(sources),
    )


def _summary(packages: Sequence[Package]) -> str:
    """Summarize the dependencies, largest first.

    For example:
    "46 packages that these and the ranks need (76.1 MB): scipy 1.17.0, … and 41 more".
    """
    nbytes = sum(package.nbytes or 0 for package in packages)
    total = f" ({size(nbytes)})" if nbytes else ""
    largest = sorted(packages, key=lambda package: -(package.nbytes or 0))
    shown = ", ".join(
        f"{package.name} {package.version}".strip() for package in largest[:NAMED_PACKAGES]
    )
    more = f" and {len(packages) - NAMED_PACKAGES} more" if len(packages) > NAMED_PACKAGES else ""
    return f"{count(len(packages), 'package')} that these and the ranks need{total}: {shown}{more}"


def _host_suffix(names: Sequence[str], hosts: Mapping[str, HostFacts]) -> str:
    """Return a suffix that names the hosts, or "" if it applies to all of them."""
    return "" if set(names) == set(hosts) else f" (on {', '.join(names)})"
