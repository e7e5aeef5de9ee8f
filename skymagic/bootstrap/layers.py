"""Environments over the packages of a container's image.

Such an environment is a venv that sees the image's own packages, and holds only what the image
lacks: an image with PyTorch keeps its build. pip installs it, because uv does not see packages
below a venv.
"""

from __future__ import annotations

from dataclasses import replace

from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.requirements import TORCH, Lookup, Requirements, notebook, preferred
from skymagic.plan.image import is_place, project, unsatisfied_requirements

OVER_IMAGE = r"""
# An environment that sees the packages of the interpreter's own installation.
over_image() {
    attempt "making an environment over the image's packages" \
        "$python" -m venv --without-pip --system-site-packages "$made" && begun || return 1
    if ! grep -q '^[^-]' "$drop/requirements.txt"; then return 0; fi
    if ! "$made/bin/python" -m pip --version >/dev/null 2>&1; then ensure_pip || return 1; fi
    by_steps "installing packages with pip" \
        "$made/bin/python" -m pip install --progress-bar off
}
"""
"""Functions of install.sh, see `bootstrap.install`. They use those of `bootstrap.shell.PACKAGES`.
"""


def missing_in_image(
    requirements: Requirements, facts: HostFacts, lookup: Lookup = notebook
) -> Requirements:
    """Return the requirements without those that the host's image satisfies.

    What the image has keeps its version, unless the user wants another one. All other packages get
    the notebook's versions.

    Args:
        lookup: finds what the notebook has.
    """
    if not requirements.base:
        return requirements
    # `str` of a requirement sorts its specifiers, so both sides are compared in that form
    unsatisfied = {
        str(requirement)
        for requirement, _ in unsatisfied_requirements(requirements.packages, facts.packages)
    }
    missing = tuple(
        text
        for text in requirements.packages
        if is_place(text) or project(text) is None or _normal(text) in unsatisfied
    )
    # without those that only the image's own packages need
    needed = {project(text) for text in preferred(missing, lookup)} - set(facts.packages)
    preferences = (text for text in requirements.preferences if project(text) in needed)
    return replace(requirements, packages=missing, preferences=tuple(preferences))


def _normal(text: str) -> str:
    from packaging.requirements import Requirement

    return str(Requirement(text))


def kept_builds(requirements: Requirements, facts: HostFacts) -> tuple[str, ...]:
    """Return pins of the image's builds of PyTorch, which no other package may replace.

    Args:
        requirements: those that the image does not satisfy.
    """
    # a dependency of another package must not bring a second torch, gigabytes with other CUDA
    requested = set(map(project, requirements.packages))
    return tuple(
        f"{name}=={facts.packages[name]}"
        for name in TORCH
        if requirements.base and name in facts.packages and name not in requested
    )


def layer_problems(facts: HostFacts, requirements: Requirements) -> list[str]:
    """Explain why no environment can be made over a host's image."""
    if not requirements.base or facts.ready:
        return []
    own = (
        f"write --python {requirements.minor} to have a Python installed in the container, without "
        "the image's packages"
    )
    if not facts.pythons:
        return [f"the image {requirements.base} has no Python: choose another image, or {own}"]
    # the probe asks only the interpreter that comes first on the image's PATH
    python = facts.pythons[0]
    if python.version != requirements.minor:
        return [
            f"the image {requirements.base} has Python {python.version} and this notebook runs "
            f"{requirements.minor}; functions travel only between equal versions: choose another "
            f"image, or {own}"
        ]
    if not python.venv:
        return [
            f"{python.path} of the image {requirements.base} has no module venv: install it in the "
            f"image (python3-venv), or {own}"
        ]
    return []
