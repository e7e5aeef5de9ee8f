"""What new environments will hold, for a plan: name, version, build, size and source of each package, as far as they are known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skymagic.bootstrap.builds import TORCH_INDEX, choose
from skymagic.bootstrap.facts import Facts, Offer
from skymagic.bootstrap.own import OwnWheel
from skymagic.bootstrap.requirements import Requirements
from skymagic.plan.units import count, size

UV_BYTES = 20_000_000
"""Size of uv's own wheel, which a host without uv gets too."""
ASSUMED_BYTES = 2_000_000
"""Size of a wheel whose index does not say it."""
ASSUMED_TORCH_BYTES = {True: 800_000_000, False: 200_000_000}
"""The same for PyTorch's builds: for GPUs, and for none."""
UNPACKED = 4
"""Bytes on a disk for each byte of a wheel: the wheel, and about three times as much of what is in it."""


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
        """It in a line: ``torch 2.13.0+cpu, CPU build, 184.2 MB, from https://download.pytorch.org/whl/cpu``."""
        named = f"{self.name} {self.version or '(the newest)'}"
        known = (self.build, size(self.nbytes) if self.nbytes else "", f"from {self.source}" if self.source else "")
        return ", ".join(filter(None, (named, *known)))


def packages(requirements: Requirements, facts: Facts) -> tuple[Package, ...]:
    """What a new environment of this host will hold, what is asked for first."""
    builds = choose(requirements, facts)
    labelled = {text.partition("==")[0]: text.partition("==")[2].partition(",")[0] for text in builds.constraints}
    found = []
    for name, pin in requirements.pins.items():
        version = labelled.get(name) or pin.partition("==")[2]
        offers = [each for each in facts.offers if each.name == name and version in (each.version, each.public)]
        offer = next(
            (each for each in offers if each.version == version), offers[-1] if offers else Offer(name, version)
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
    known = sum(each.nbytes or (torch if each.name in requirements.torch else ASSUMED_BYTES) for each in remote)
    return known + (UV_BYTES if remote and not facts.uv else 0)


def shortage(requirements: Requirements, facts: Facts) -> str:
    """That a host's disk will not hold a new environment, as far as the sizes of its packages are known; "" where it may."""
    return shortage_of(sum(each.nbytes or 0 for each in packages(requirements, facts)), facts)


def shortage_of(nbytes: int, facts: Facts) -> str:
    """The same for so many bytes of wheels."""
    needed, free = nbytes * UNPACKED, facts.disk_kb
    if free is None or needed <= free * 1024:
        return ""
    return (
        f"its disk will not hold the packages: about {size(needed)} needed, {size(free * 1024)} free at {facts.folder}"
    )


def _own(one: OwnWheel) -> Package:
    return Package(one.name, one.version, "", Path(one.path).stat().st_size, f"{one.source} here")


def _torch(package: Package, offer: Offer, backend: str, facts: Facts) -> Package:
    """One of PyTorch's packages: its build, and from where it comes."""
    if backend and backend != "cpu":
        fitting = "that fits " + (f"driver {facts.driver}" if facts.driver else "its GPUs")
        source = TORCH_INDEX.replace("cpu", "…" if backend == "auto" else backend)
        build = f"the build {fitting}" if backend == "auto" else f"{backend} build"
        return Package(package.name, package.version, build, None, source)
    kind = "cpu" if backend == "cpu" else offer.kind
    source = package.source or (TORCH_INDEX if backend else "")
    return Package(package.name, package.version, f"{kind.upper()} build", package.nbytes, source)


def lines(requirements: Requirements, hosts: Mapping[str, Facts]) -> tuple[str, ...]:
    """What is installed on hosts that are not ready: a line for each package that is asked for, one for what they need."""
    asked, needed = dict[str, list[str]](), dict[tuple[Package, ...], list[str]]()
    for host, facts in hosts.items():
        every = packages(requirements, facts)
        for package in every:
            if package.name in requirements.asked:
                asked.setdefault(package.text, []).append(host)
        needed.setdefault(tuple(each for each in every if each.name not in requirements.asked), []).append(host)
    everywhere = list(hosts)
    found = [text + _on(where, everywhere) for text, where in asked.items()]
    return (*found, *(_summary(rest) + _on(where, everywhere) for rest, where in needed.items() if rest))


def _summary(rest: tuple[Package, ...]) -> str:
    known = sum(each.nbytes or 0 for each in rest)
    total = f" ({size(known)})" if known else ""
    names = ", ".join(f"{each.name} {each.version}".strip() for each in rest)
    return f"{count(len(rest), 'package')} that these and the ranks need{total}: {names}"


def _on(hosts: list[str], everywhere: list[str]) -> str:
    return "" if hosts == everywhere else f" (on {', '.join(hosts)})"
