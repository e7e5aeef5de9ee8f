"""Choose the wheels and builds that fit a host, and predict the contents of its new environment.

All functions here are pure. `packaging.tags` knows which wheels run on a platform that a host's
facts describe. uv chooses PyTorch's build, for CPUs or for the host's GPUs, if PyTorch's index
answers. Otherwise the host's other indexes must provide one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from skymagic.bootstrap.facts import BuildOffer, HostFacts
from skymagic.bootstrap.layers import missing_in_image
from skymagic.bootstrap.local_wheels import LocalWheel
from skymagic.bootstrap.requirements import TORCH, Requirements
from skymagic.plan.image import project
from skymagic.plan.units import count, size
from skymagic.plugins._torch.plugin import WHEELS

if TYPE_CHECKING:
    from packaging.tags import Tag


# -- wheels that run on a host ---------------------------------------------------------------------


_UV_GLIBC = (17, 28, *range(31, 41))
"""Minor versions of glibc 2 that uv accepts as platforms."""
_MACOS = {"arm64": (15, 0), "x86_64": (13, 0)}
"""Newest macOS version whose wheels are accepted, by machine."""


def platforms(facts: HostFacts) -> tuple[str, ...]:
    """Return the platform tags of wheels that run on a host, newest first."""
    from packaging.tags import mac_platforms

    machine = facts.machine
    if facts.system == "Darwin":
        return tuple(mac_platforms(_MACOS.get(machine, (13, 0)), machine))
    if facts.libc == "musl":
        # No linux_* tag: a wheel with only that tag was built locally, most likely for glibc.
        return tuple(f"musllinux_1_{minor}_{machine}" for minor in (2, 1))
    tags = (f"manylinux_2_{minor}_{machine}" for minor in range(_glibc(facts), 4, -1))
    return (
        *tags,
        *(f"manylinux{name}_{machine}" for name in ("2014", "2010", "1")),
        f"linux_{machine}",
    )


def uv_platform(facts: HostFacts) -> str:
    """Return the name of the host's platform for ``uv pip compile --python-platform``.

    Returns:
        The name, or "" if uv does not support the platform.
    """
    if facts.system == "Darwin":
        return "aarch64-apple-darwin" if facts.machine == "arm64" else "x86_64-apple-darwin"
    if facts.system != "Linux":
        return ""
    if facts.libc == "musl":
        return f"{facts.machine}-unknown-linux-musl"
    return (
        f"{facts.machine}-manylinux_2_"
        f"{max(minor for minor in _UV_GLIBC if minor <= _glibc(facts) or minor == 17)}"
    )


def _glibc(facts: HostFacts) -> int:
    """Return the minor version of the host's glibc 2, or an old one (17) if it is unknown."""
    match = re.search(r"2\.(\d+)", facts.libc)
    return int(match[1]) if match else 17


def incompatibility(file: str, facts: HostFacts, minor: str) -> str:
    """Explain why a wheel does not run on a host.

    Args:
        file: file name of the wheel.
        facts: the host.
        minor: the host's Python version, such as ``"3.11"``.

    Returns:
        A clause for a message, or "" if the wheel runs there.
    """
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        tags = parse_wheel_filename(file)[3]
    except InvalidWheelFilename as problem:
        return str(problem)
    if tags & _tags(platforms(facts), minor):
        return ""
    names = sorted({tag.platform for tag in tags})
    if {"any", *platforms(facts)} & set(names):
        pythons = ".".join(sorted({tag.interpreter for tag in tags}))
        return f"it is built for {pythons}, and the host's environment has Python {minor}"
    libc = f" ({facts.libc})" if facts.libc else ""
    return (
        f"it is compiled for {'.'.join(names)}, and the host is {facts.system} "
        f"{facts.machine}{libc}"
    )


@lru_cache(maxsize=16)
def _tags(names: tuple[str, ...], minor: str) -> frozenset[Tag]:
    """Return all wheel tags that the host's CPython accepts."""
    from packaging.tags import compatible_tags, cpython_tags

    version = [int(part) for part in minor.split(".")]
    own = f"cp{minor.replace('.', '')}"
    return frozenset([*cpython_tags(version, [own], names), *compatible_tags(version, own, names)])


# -- builds ----------------------------------------------------------------------------------------


TORCH_INDEX = WHEELS + "cpu"
"""PyTorch's own index of CPU builds, used to test whether PyTorch's indexes can be reached."""


@dataclass(frozen=True)
class Builds:
    """Builds chosen for a host.

    Attributes:
        backend: value of uv's ``--torch-backend``: ``"cpu"``, ``"auto"`` or ``"cu124"``. "" if
            PyTorch's own index does not answer, so that the host's other indexes must provide the
            build.
        constraints: pins with local labels, such as ``"torch==2.13.0+cpu"``.
        only_cuda: packages that a host without GPUs could get only as builds for CUDA.
    """

    backend: str
    constraints: tuple[str, ...] = ()
    only_cuda: tuple[BuildOffer, ...] = ()


def choose(requirements: Requirements, facts: HostFacts) -> Builds:
    """Choose the builds for a host.

    uv makes the choice unless PyTorch's index is out of reach. Then the builds are pinned to what
    the host's own indexes have.
    """
    if any(project(text) in TORCH for _, served in requirements.scoped for text in served):
        # A scoped index already holds the intended build.
        return Builds("")
    backend = (requirements.backend or "auto") if facts.accelerated else "cpu"
    reachable = TORCH_INDEX not in dict(facts.silent) and not facts.no_index
    constraints: list[str] = []
    only_cuda: list[BuildOffer] = []
    for name in requirements.torch:
        offers = _allowed(requirements, name, facts.offers)
        fitting = [offer for offer in offers if (offer.kind == "cpu") is not facts.accelerated]
        if reachable and (facts.accelerated or len({offer.public for offer in fitting}) != 1):
            # uv knows better, and the requirements of other packages may matter.
            continue
        if fitting:
            constraints.append(_pin(fitting[-1], offers))
        elif offers and not facts.accelerated:
            only_cuda.append(offers[-1])
            constraints.append(_pin(offers[-1], offers))
    return Builds(backend if reachable else "", tuple(constraints), tuple(only_cuda))


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
        backend: PyTorch's build, as in `Builds`.
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


def _allowed(
    requirements: Requirements, name: str, offers: Iterable[BuildOffer]
) -> list[BuildOffer]:
    """Return the offers of a project that the requirements allow, newest last.

    If the notebook's version is among them, return only that version.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    constraints = [Requirement(text) for text in requirements.packages if project(text) == name]
    fitting = [
        offer
        for offer in offers
        if offer.name == name
        and all(
            requirement.specifier.contains(offer.version, prereleases=False)
            for requirement in constraints
        )
    ]
    preferred = [
        offer for offer in fitting if f"{name}=={offer.public}" in requirements.preferences
    ]
    return sorted(preferred or fitting, key=lambda build: Version(build.version))


def _pin(offer: BuildOffer, among: Iterable[BuildOffer]) -> str:
    """Return a requirement that only this build satisfies.

    A version without a local label would also be satisfied by versions with one, so those are
    excluded.
    """
    same_public = {
        candidate.version
        for candidate in among
        if offer.version == offer.public and candidate.public == offer.public
    }
    excluded = "".join(f",!={version}" for version in sorted(same_public - {offer.version}))
    return f"{offer.name}=={offer.version}{excluded}"


def question(host: str, builds: Builds) -> str:
    """Return what must be confirmed before a host without GPUs gets builds for CUDA, or ""."""
    return questions({host: builds})


def questions(builds: Mapping[str, Builds]) -> str:
    """Return what must be confirmed before hosts without GPUs get builds for CUDA, or "".

    Args:
        builds: the builds that each host would get, by host name. Equal hosts share one sentence.
    """
    hosts_by_version: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for host, host_builds in builds.items():
        if host_builds.only_cuda:
            versions = tuple((offer.name, offer.version) for offer in host_builds.only_cuda)
            hosts_by_version.setdefault(versions, []).append(host)
    sentences = []
    for hosts in hosts_by_version.values():
        alike = zip(*(builds[host].only_cuda for host in hosts), strict=True)
        largest = [max(offers, key=lambda offer: offer.nbytes or 0) for offers in alike]
        what = ", ".join(
            f"{offer.name} {offer.version} ({describe_size(offer)})" for offer in largest
        )
        verb, whose = ("have", "their") if len(hosts) > 1 else ("has", "its")
        sentences.append(
            f"{', '.join(hosts)} {verb} no GPU, and {whose} indexes have only a build for CUDA "
            f"of {what}"
        )
    return "; ".join(sentences)


def describe_size(offer: BuildOffer) -> str:
    """Describe the size of a build's file, as far as the index reports it."""
    more = ", and the CUDA libraries that it needs" if offer.kind == "cuda" else ""
    return (size(offer.nbytes) if offer.nbytes else "of unknown size") + more


# -- packages of a plan ----------------------------------------------------------------------------


UV_BYTES = 20_000_000
"""Size of uv's own wheel, which is also downloaded for a host without uv."""
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

        For example: ``torch 2.13.0+cpu, CPU build, 184.2 MB, from
        https://download.pytorch.org/whl/cpu``
        """
        named = f"{self.name} {self.version or '(the newest)'}"
        details = (
            self.build,
            size(self.nbytes) if self.nbytes else "",
            f"from {self.source}" if self.source else "",
        )
        return ", ".join(filter(None, (named, *details)))


def packages(requirements: Requirements, facts: HostFacts) -> tuple[Package, ...]:
    """Return the packages that the host's new environment will hold, requested ones first."""
    builds = choose(requirements, facts)
    labelled = {
        text.partition("==")[0]: text.partition("==")[2].partition(",")[0]
        for text in builds.constraints
    }
    planned = []
    for name, pin in requirements.pins.items():
        version = labelled.get(name) or pin.partition("==")[2]
        offers = [
            candidate
            for candidate in facts.offers
            if candidate.name == name and version in (candidate.version, candidate.public)
        ]
        offer = next(
            (candidate for candidate in offers if candidate.version == version),
            offers[-1] if offers else BuildOffer(name, version),
        )
        package = Package(name, version, "", offer.nbytes, offer.source)
        if name in requirements.torch:
            package = _torch(package, offer, builds.backend, facts)
        planned.append(package)
    return (*planned, *(_own(own_wheel) for own_wheel in requirements.own))


def download_bytes(requirements: Requirements, facts: HostFacts) -> int:
    """Estimate how many bytes a new environment downloads from the network.

    Packages from links and indexes on the host's disk do not count.
    """
    remote = [
        package
        for package in packages(requirements, facts)
        if re.match(r"https?://", package.source)
    ]
    torch = ASSUMED_TORCH_BYTES[facts.accelerated]
    total = sum(
        package.nbytes or (torch if package.name in requirements.torch else ASSUMED_BYTES)
        for package in remote
    )
    return total + (UV_BYTES if remote and not facts.uv else 0)


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


def _own(wheel: LocalWheel) -> Package:
    return Package(
        wheel.name, wheel.version, "", Path(wheel.path).stat().st_size, f"{wheel.source} here"
    )


def _torch(package: Package, offer: BuildOffer, backend: str, facts: HostFacts) -> Package:
    """Add the build and its source to one of PyTorch's packages."""
    if backend and backend != "cpu":
        fitting = "that fits " + (f"driver {facts.driver}" if facts.driver else "its GPUs")
        source = TORCH_INDEX.replace("cpu", "…" if backend == "auto" else backend)
        build = f"the build {fitting}" if backend == "auto" else f"{backend} build"
        return Package(package.name, package.version, build, None, source)
    kind = "cpu" if backend == "cpu" else offer.kind
    source = package.source or (TORCH_INDEX if backend else "")
    return Package(package.name, package.version, f"{kind.upper()} build", package.nbytes, source)


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
        key = (platforms(facts), facts.accelerated, versions)
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
