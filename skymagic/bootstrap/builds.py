"""Builds for one host: CPU or CUDA, by what the host has. uv chooses PyTorch's where its index answers; else what other indexes have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skymagic.bootstrap.facts import Facts, Offer
from skymagic.bootstrap.requirements import TORCH, Requirements
from skymagic.plan.image import project
from skymagic.plan.units import size
from skymagic.plugins._torch.plugin import WHEELS

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
    only_cuda: tuple[Offer, ...] = ()


def choose(requirements: Requirements, facts: Facts) -> Builds:
    """The builds for a host: of uv's choice, or, where PyTorch's index is out of reach, of what the host's own indexes have."""
    if any(project(text) in TORCH for _, served in requirements.scoped for text in served):
        return Builds("")  # an index of its own holds the build that is meant
    backend = (requirements.backend or "auto") if facts.accelerated else "cpu"
    reachable = TORCH_INDEX not in dict(facts.silent) and not facts.no_index
    constraints: list[str] = []
    only_cuda: list[Offer] = []
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
CUDA_13_DRIVER = 580
"""NVIDIA's driver from which on uv's ``auto`` takes PyTorch's builds for CUDA 13."""


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
    return tuple(JAX.sub(f"jax[cuda{major}]", text, count=1) if JAX.match(text) else text for text in packages)


def _allowed(requirements: Requirements, name: str, offers: Iterable[Offer]) -> list[Offer]:
    """The offers of a project that what is asked for allows, the newest last; the notebook's version alone where it is there."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    asked = [Requirement(text) for text in requirements.packages if project(text) == name]
    fitting = [
        each
        for each in offers
        if each.name == name and all(one.specifier.contains(each.version, prereleases=False) for one in asked)
    ]
    preferred = [each for each in fitting if f"{name}=={each.public}" in requirements.preferences]
    return sorted(preferred or fitting, key=lambda each: Version(each.version))


def _pin(offer: Offer, among: Iterable[Offer]) -> str:
    """A requirement that takes this build; a version without a label would also be satisfied by those with one."""
    others = {each.version for each in among if offer.version == offer.public and each.public == offer.public}
    excluded = "".join(f",!={version}" for version in sorted(others - {offer.version}))
    return f"{offer.name}=={offer.version}{excluded}"


def question(host: str, builds: Builds) -> str:
    """What has to be confirmed before a host gets builds for GPUs that it does not have; "" for nothing."""
    if not builds.only_cuda:
        return ""
    what = ", ".join(f"{each.name} {each.version} ({size_words(each)})" for each in builds.only_cuda)
    return f"{host} has no GPU, and its indexes have only a build for CUDA of {what}"


def size_words(offer: Offer) -> str:
    """How large its file is, as far as the index says."""
    more = ", and the CUDA libraries that it needs" if offer.kind == "cuda" else ""
    return (size(offer.nbytes) if offer.nbytes else "of unknown size") + more
