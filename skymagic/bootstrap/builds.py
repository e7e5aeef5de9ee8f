"""Which wheels and which builds fit one host, and what its new environment will hold as far as that is known before; pure.

`packaging.tags` knows which wheels run on the platforms that a host's facts mean. uv chooses PyTorch's build, for CPUs or the
host's GPUs, where PyTorch's index answers; else the host's other indexes have to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from skymagic.bootstrap.facts import BuildOffer, Facts
from skymagic.bootstrap.own import OwnWheel
from skymagic.bootstrap.requirements import TORCH, Requirements
from skymagic.plan.image import project
from skymagic.plan.units import count, size
from skymagic.plugins._torch.plugin import WHEELS

if TYPE_CHECKING:
    from packaging.tags import Tag


# -- wheels that run on a host ---------------------------------------------------------------------


_UV_GLIBC = (17, 28, *range(31, 41))
"""Minor versions of glibc 2 that uv knows as platforms."""
_MACOS = {"arm64": (15, 0), "x86_64": (13, 0)}
"""The newest macOS whose wheels are taken."""


def platforms(facts: Facts) -> tuple[str, ...]:
    """The platform tags of wheels that run on a host, the newest first."""
    from packaging.tags import mac_platforms

    machine = facts.machine
    if facts.system == "Darwin":
        return tuple(mac_platforms(_MACOS.get(machine, (13, 0)), machine))
    if facts.libc == "musl":
        # not linux_*: a wheel that says no more was built here, most likely for glibc
        return tuple(f"musllinux_1_{minor}_{machine}" for minor in (2, 1))
    tags = (f"manylinux_2_{minor}_{machine}" for minor in range(_glibc(facts), 4, -1))
    return (
        *tags,
        *(f"manylinux{name}_{machine}" for name in ("2014", "2010", "1")),
        f"linux_{machine}",
    )


def uv_platform(facts: Facts) -> str:
    """A host's platform as ``uv pip compile --python-platform`` names it; "" for one that uv does not know."""
    if facts.system == "Darwin":
        return "aarch64-apple-darwin" if facts.machine == "arm64" else "x86_64-apple-darwin"
    if facts.system != "Linux":
        return ""
    if facts.libc == "musl":
        return f"{facts.machine}-unknown-linux-musl"
    return f"{facts.machine}-manylinux_2_{max(each for each in _UV_GLIBC if each <= _glibc(facts) or each == 17)}"


def _glibc(facts: Facts) -> int:
    """The minor version of a host's glibc 2; an old one where it does not tell."""
    found = re.search(r"2\.(\d+)", facts.libc)
    return int(found[1]) if found else 17


def misfit(file: str, facts: Facts, minor: str) -> str:
    """Why a wheel does not run on a host, in words; "" where it does.

    Args:
        file: its name. minor: the host's version of Python, as ``"3.11"``.
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
    return f"it is compiled for {'.'.join(names)}, and the host is {facts.system} {facts.machine}{libc}"


@lru_cache(maxsize=16)
def _tags(names: tuple[str, ...], minor: str) -> frozenset[Tag]:
    """All tags of wheels that a host's CPython takes."""
    from packaging.tags import compatible_tags, cpython_tags

    version = [int(part) for part in minor.split(".")]
    own = f"cp{minor.replace('.', '')}"
    return frozenset([*cpython_tags(version, [own], names), *compatible_tags(version, own, names)])


# -- builds ----------------------------------------------------------------------------------------


TORCH_INDEX = WHEELS + "cpu"
"""An index of PyTorch's own, which tells whether they can be reached."""


@dataclass(frozen=True)
class Builds:
    """Which builds a host gets.

    Attributes:
        backend: what uv is told (``--torch-backend``): ``"cpu"``, ``"auto"``, ``"cu124"``; "" where PyTorch's own index
            does not answer, and the host's other indexes have to do.
        constraints: pins with labels, as ``"torch==2.13.0+cpu"``.
        only_cuda: what a host without GPUs could get as builds for CUDA only.
    """

    backend: str
    constraints: tuple[str, ...] = ()
    only_cuda: tuple[BuildOffer, ...] = ()


def choose(requirements: Requirements, facts: Facts) -> Builds:
    """The builds for a host: of uv's choice, or, where PyTorch's index is out of reach, of what the host's own indexes have."""
    if any(project(text) in TORCH for _, served in requirements.scoped for text in served):
        return Builds("")  # an index of its own holds the build that is meant
    backend = (requirements.backend or "auto") if facts.accelerated else "cpu"
    reachable = TORCH_INDEX not in dict(facts.silent) and not facts.no_index
    constraints: list[str] = []
    only_cuda: list[BuildOffer] = []
    for name in requirements.torch:
        offers = _allowed(requirements, name, facts.offers)
        fitting = [each for each in offers if (each.kind == "cpu") is not facts.accelerated]
        if reachable and (facts.accelerated or len({each.public for each in fitting}) != 1):
            continue  # uv knows better, and other packages may have a say
        if fitting:
            constraints.append(_pin(fitting[-1], offers))
        elif offers and not facts.accelerated:
            only_cuda.append(offers[-1])
            constraints.append(_pin(offers[-1], offers))
    return Builds(backend if reachable else "", tuple(constraints), tuple(only_cuda))


JAX = re.compile(r"jax(\[cuda1\d\])?(?=$|[\s<>=!~;,@])")
"""A requirement of JAX's, as its plugin and Keras's write it."""
CUDA_13_DRIVER = (
    580  # NVIDIA's driver from which on uv's ``auto`` takes PyTorch's builds for CUDA 13
)


def for_gpus(packages: Sequence[str], facts: Facts, backend: str) -> tuple[str, ...]:
    """Requirements for this host: JAX with what uses NVIDIA's GPUs where it has some, of one CUDA major with PyTorch's build.

    Both bring CUDA's libraries, and one process loads only one of each.

    Args:
        backend: PyTorch's, as `Builds` has it.
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
    """The offers of a project that what is asked for allows, the newest last; the notebook's version alone where it is there."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    asked = [Requirement(text) for text in requirements.packages if project(text) == name]
    fitting = [
        each
        for each in offers
        if each.name == name
        and all(one.specifier.contains(each.version, prereleases=False) for one in asked)
    ]
    preferred = [each for each in fitting if f"{name}=={each.public}" in requirements.preferences]
    return sorted(preferred or fitting, key=lambda each: Version(each.version))


def _pin(offer: BuildOffer, among: Iterable[BuildOffer]) -> str:
    """A requirement that takes this build; a version without a label would also be satisfied by those with one."""
    others = {
        each.version
        for each in among
        if offer.version == offer.public and each.public == offer.public
    }
    excluded = "".join(f",!={version}" for version in sorted(others - {offer.version}))
    return f"{offer.name}=={offer.version}{excluded}"


def question(host: str, builds: Builds) -> str:
    """Return what must be confirmed before a host gets builds for GPUs that it does not have, or ""."""
    return questions({host: builds})


def questions(builds: Mapping[str, Builds]) -> str:
    """Return what must be confirmed before hosts get builds for GPUs that they do not have, or "".

    Args:
        builds: what each host would get, by its name. Equal hosts share one sentence.
    """
    hosts_by_version: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for host, chosen in builds.items():
        if chosen.only_cuda:
            versions = tuple((offer.name, offer.version) for offer in chosen.only_cuda)
            hosts_by_version.setdefault(versions, []).append(host)
    sentences = []
    for hosts in hosts_by_version.values():
        alike = zip(*(builds[host].only_cuda for host in hosts), strict=True)
        largest = [max(offers, key=lambda offer: offer.nbytes or 0) for offers in alike]
        what = ", ".join(f"{offer.name} {offer.version} ({size_words(offer)})" for offer in largest)
        verb, whose = ("have", "their") if len(hosts) > 1 else ("has", "its")
        sentences.append(
            f"{', '.join(hosts)} {verb} no GPU, and {whose} indexes have only a build for CUDA of {what}"
        )
    return "; ".join(sentences)


def size_words(offer: BuildOffer) -> str:
    """How large its file is, as far as the index says."""
    more = ", and the CUDA libraries that it needs" if offer.kind == "cuda" else ""
    return (size(offer.nbytes) if offer.nbytes else "of unknown size") + more


# -- what a plan lists -----------------------------------------------------------------------------


UV_BYTES = 20_000_000
"""Size of uv's own wheel, which a host without uv gets too."""
ASSUMED_BYTES = 2_000_000
"""Size of a wheel whose index does not say it."""
ASSUMED_TORCH_BYTES = {True: 800_000_000, False: 200_000_000}
"""Size of a wheel of PyTorch's whose index does not say it: of a build for GPUs, and of one for CPUs."""
UNPACKED = 4  # bytes on a disk for each byte of a wheel: the wheel, and about three times as much of what is in it


@dataclass(frozen=True)
class Package:
    """A package of a new environment; what nobody knows yet is empty."""

    name: str
    version: str = ""
    build: str = ""
    nbytes: int | None = None
    source: str = ""

    @property
    def text(self) -> str:
        """One line: ``torch 2.13.0+cpu, CPU build, 184.2 MB, from https://download.pytorch.org/whl/cpu``."""
        named = f"{self.name} {self.version or '(the newest)'}"
        known = (
            self.build,
            size(self.nbytes) if self.nbytes else "",
            f"from {self.source}" if self.source else "",
        )
        return ", ".join(filter(None, (named, *known)))


def packages(requirements: Requirements, facts: Facts) -> tuple[Package, ...]:
    """What a new environment of this host will hold, what is asked for first."""
    builds = choose(requirements, facts)
    labelled = {
        text.partition("==")[0]: text.partition("==")[2].partition(",")[0]
        for text in builds.constraints
    }
    found = []
    for name, pin in requirements.pins.items():
        version = labelled.get(name) or pin.partition("==")[2]
        offers = [
            each
            for each in facts.offers
            if each.name == name and version in (each.version, each.public)
        ]
        offer = next(
            (each for each in offers if each.version == version),
            offers[-1] if offers else BuildOffer(name, version),
        )
        package = Package(name, version, "", offer.nbytes, offer.source)
        if name in requirements.torch:
            package = _torch(package, offer, builds.backend, facts)
        found.append(package)
    return (*found, *(_own(each) for each in requirements.own))


def download_bytes(requirements: Requirements, facts: Facts) -> int:
    """About how many bytes a new environment of this host comes to from a network; links and indexes on its disk do not count."""
    remote = [each for each in packages(requirements, facts) if re.match(r"https?://", each.source)]
    torch = ASSUMED_TORCH_BYTES[facts.accelerated]
    known = sum(
        each.nbytes or (torch if each.name in requirements.torch else ASSUMED_BYTES)
        for each in remote
    )
    return known + (UV_BYTES if remote and not facts.uv else 0)


def shortage(requirements: Requirements, facts: Facts) -> str:
    """Why a host's disk will not hold a new environment, as far as the sizes of its packages are known; "" where it may."""
    return shortage_of(sum(each.nbytes or 0 for each in packages(requirements, facts)), facts)


def shortage_of(nbytes: int, facts: Facts) -> str:
    """Why a host's disk will not hold an environment of so many bytes of wheels; "" where it will."""
    needed, free = nbytes * UNPACKED, facts.disk_kb
    if free is None or needed <= free * 1024:
        return ""
    return f"its disk will not hold the packages: about {size(needed)} needed, {size(free * 1024)} free at {facts.folder}"


def _own(one: OwnWheel) -> Package:
    return Package(one.name, one.version, "", Path(one.path).stat().st_size, f"{one.source} here")


def _torch(package: Package, offer: BuildOffer, backend: str, facts: Facts) -> Package:
    """One of PyTorch's packages: its build, and from where it comes."""
    if backend and backend != "cpu":
        fitting = "that fits " + (f"driver {facts.driver}" if facts.driver else "its GPUs")
        source = TORCH_INDEX.replace("cpu", "…" if backend == "auto" else backend)
        build = f"the build {fitting}" if backend == "auto" else f"{backend} build"
        return Package(package.name, package.version, build, None, source)
    kind = "cpu" if backend == "cpu" else offer.kind
    source = package.source or (TORCH_INDEX if backend else "")
    return Package(package.name, package.version, f"{kind.upper()} build", package.nbytes, source)


NAMED_PACKAGES = 5
"""How many packages a plan names of those that nobody has asked for."""


def lines(requirements: Requirements, hosts: Mapping[str, Facts]) -> tuple[str, ...]:
    """Return what is installed on hosts that are not ready: a line per requested package, one for their dependencies.

    Equal hosts share their lines, also where the index of only some of them has told a size in time.
    """
    requested: dict[str, list[str]] = {}
    dependencies: dict[str, list[str]] = {}
    for names, every in _equal_hosts(requirements, hosts):
        for package in every:
            if package.name in requirements.asked:
                requested.setdefault(package.text, []).extend(names)
        if rest := [package for package in every if package.name not in requirements.asked]:
            dependencies.setdefault(_summary(rest), []).extend(names)
    return tuple(
        text + _on(names, hosts) for text, names in (*requested.items(), *dependencies.items())
    )


def _equal_hosts(
    requirements: Requirements, hosts: Mapping[str, Facts]
) -> list[tuple[list[str], list[Package]]]:
    """Group hosts of one platform that get the same versions and builds: their names, and the packages."""
    groups: dict[object, list[tuple[str, tuple[Package, ...]]]] = {}
    for host, facts in hosts.items():
        every = packages(requirements, facts)
        versions = tuple((package.name, package.version, package.build) for package in every)
        key = (platforms(facts), facts.accelerated, versions)
        groups.setdefault(key, []).append((host, every))
    return [
        (
            [host for host, _ in group],
            [_merged(alike) for alike in zip(*(every for _, every in group), strict=True)],
        )
        for group in groups.values()
    ]


def _merged(alike: Sequence[Package]) -> Package:
    """One package as the indexes of several hosts describe it: what only some of them know, and the largest size."""
    sources = dict.fromkeys(package.source for package in alike if package.source)
    return replace(
        alike[0],
        nbytes=max(package.nbytes or 0 for package in alike) or None,
        source=" or ".join(sources),
    )


def _summary(rest: Sequence[Package]) -> str:
    """ "46 packages that these and the ranks need (76.1 MB): scipy 1.17.0, … and 41 more", the largest first."""
    known = sum(package.nbytes or 0 for package in rest)
    total = f" ({size(known)})" if known else ""
    largest = sorted(rest, key=lambda package: -(package.nbytes or 0))
    shown = ", ".join(
        f"{package.name} {package.version}".strip() for package in largest[:NAMED_PACKAGES]
    )
    more = f" and {len(rest) - NAMED_PACKAGES} more" if len(rest) > NAMED_PACKAGES else ""
    return f"{count(len(rest), 'package')} that these and the ranks need{total}: {shown}{more}"


def _on(names: Sequence[str], hosts: Mapping[str, Facts]) -> str:
    """Say on which hosts, unless it is all of them."""
    return "" if set(names) == set(hosts) else f" (on {', '.join(names)})"
