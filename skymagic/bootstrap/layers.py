"""Environments over the packages of a container's image.

Such an environment is a venv that sees the image's own packages, and holds only what the image
lacks: an image with PyTorch keeps its build. uv does not see packages below a venv. Therefore,
while uv installs, copies of their metadata are in the venv.
"""

from __future__ import annotations

from dataclasses import replace

from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.requirements import TORCH, Lookup, Requirements, notebook, preferred
from skymagic.plan.image import is_place, project, unsatisfied_requirements

SHOW_IMAGE = r"""
# [INTERPRETER]: let uv see the packages below the environment; and let the environment see those of
# an interpreter that is in an environment itself.
show_image() {
    hide_image
    "$made/bin/python" -I -c "$shown_packages" "$@"
}

hide_image() {
    for one in "$made"/lib/python*/site-packages/*.dist-info/of-image; do
        if [ -f "$one" ]; then rm -rf "${one%/*}"; fi
    done
}
"""
"""Functions of install.sh, see `bootstrap.install`, which read ``made`` and ``shown_packages``."""

SHOWN_PACKAGES = r"""
import os, re, subprocess, sys, sysconfig
own = sysconfig.get_path('purelib')
if sys.argv[1:]:
    ask = (
        'import os, sys, sysconfig as s\n'
        'if sys.prefix != sys.base_prefix:\n'
        '    print(*{s.get_path(name): 0 for name in ("purelib", "platlib")}, sep=os.linesep)'
    )
    folders = subprocess.check_output([sys.argv[1], '-I', '-c', ask], text=True)
    if folders:
        with open(os.path.join(own, 'image.pth'), 'w') as file:
            file.write(folders)
        # where the file brings them: before those of the base installation
        at = sys.path.index(own) + 1
        sys.path[at:at] = folders.splitlines()
import importlib.metadata
seen = set()
for distribution in importlib.metadata.distributions():
    name, version = distribution.metadata['Name'], distribution.metadata['Version']
    plain = re.sub('[-_.]+', '_', name or '').lower()
    # uv reads no others
    if not re.fullmatch(r'\w+', plain) or not re.fullmatch(r'[0-9][\w.!+]*', version or ''):
        continue
    if plain in seen:
        continue
    seen.add(plain)
    if str(distribution.locate_file('')) == own:
        continue
    folder = f'{plain}-{version}.dist-info'
    os.makedirs(os.path.join(own, folder))
    files = {
        'METADATA': distribution.read_text('METADATA') or distribution.read_text('PKG-INFO') or '',
        'INSTALLER': 'skymagic',
        'of-image': '',
    }
    files['RECORD'] = ''.join(f'{folder}/{file},,\n' for file in (*files, 'RECORD'))
    for file, text in files.items():
        with open(os.path.join(own, folder, file), 'w', encoding='utf-8') as opened:
            opened.write(text)
"""
"""Code run by an environment's interpreter: place copies of the metadata of an image's packages.

uv takes these for installed packages. It removes the copy of a package that it replaces.
Argument: the image's interpreter, for a new environment.
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
    # without those that only the image's own packages need, and those that it has: uv would
    # replace them to satisfy the notebook's pins
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
    # a dependency of another package must not bring a second torch, gigabytes with other CUDA;
    # the local label, such as +cu124, is in no index, but uv takes the copy of the metadata
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
    return []
