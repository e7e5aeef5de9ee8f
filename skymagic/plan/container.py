"""Containers of nodes: the engine, the image and the folders of `--container`.

Pure values; `ssh.container` turns them into sh that runs on a node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skymagic.errors import RequestError
from skymagic.plan.suggest import did_you_mean

if TYPE_CHECKING:
    from skymagic.plan.requests import PoolRequest

ENGINES = ("apptainer", "singularity", "podman", "charliecloud", "pyxis")
"""Programs that run containers for users without special rights, in the order they are looked for.

Slurm's plugin pyxis is not found on a node, but in srun's options.
"""
UNSUPPORTED = {"docker": "podman", "enroot": "pyxis", "shifter": "podman", "sarus": "podman"}
"""Engines that cannot be named, each with the one that runs the same images."""
_SCHEMES = ("docker", "oras", "library", "shub", "oci")
"""Schemes of apptainer's image names, which are no engines although a colon follows them."""


@dataclass(frozen=True)
class Container:
    """Container of a node.

    Attributes:
        image: name in a registry, or absolute path on the node.
        engine: one of `ENGINES`; "" for the first that the node has.
        binds: further folders of the node that the container shows, as ``FOLDER`` or
            ``FOLDER:FOLDER_INSIDE``.
    """

    image: str
    engine: str = ""
    binds: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ":".join(filter(None, (self.engine, self.image)))

    @property
    def is_file(self) -> bool:
        """True if the image is a file or folder of the node."""
        return self.image.startswith(("/", "~/"))

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines of a node that can run the image, the preferred one first."""
        if self.engine:
            return (self.engine,)
        if self.image.endswith(".sif"):
            return ("apptainer", "singularity")
        if self.image.endswith((".sqfs", ".squashfs", ".sqsh")):
            return ("charliecloud", "apptainer", "singularity")
        if "://" in self.image and not self.image.startswith("docker://"):
            return ("apptainer", "singularity")
        return ("apptainer", "singularity", "podman", "charliecloud")


def parse_container(text: str, binds: Sequence[str] = ()) -> Container:
    """Parse ``IMAGE`` or ``ENGINE:IMAGE``. Raises RequestError."""
    # the text before a colon is an engine, a registry, a scheme, or the name before a tag
    engine, colon, image = text.partition(":")
    if not colon or engine not in ENGINES:
        _refuse_engine(text, engine, image)
        engine, image = "", text
    if not re.fullmatch(r"[\w./~][\w./:@+~-]*", image) or image.startswith("./"):
        raise RequestError(
            f"{image!r} is no image: write a name in a registry, as in pytorch/pytorch:2.13.0, or "
            "an absolute path on the nodes"
        )
    # people copy names from apptainer's documentation, which writes the scheme
    if engine == "podman":
        image = image.removeprefix("docker://")
    return Container(image, engine, tuple(binds))


def _refuse_engine(text: str, engine: str, image: str) -> None:
    """Raise RequestError if the text begins with the name of an engine that cannot be named."""
    if not image or "/" in engine or "." in engine or (engine in _SCHEMES and "//" in image):
        return
    if re.match(r"\d+/", image):  # a registry's port
        return
    if engine in UNSUPPORTED:
        raise RequestError(
            f"containers are not started by {engine}: write "
            f"{UNSUPPORTED[engine]}:{image.lstrip('/')}, which runs the same images"
        )
    # a tag has no slash and no colon behind it: IMAGE:TAG
    if "/" in image or ":" in image:
        nearest = did_you_mean(engine, ENGINES) or f"; available: {', '.join(ENGINES)}"
        raise RequestError(f"{text!r}: no engine is called {engine!r}{nearest}")


@dataclass(frozen=True)
class PyxisStep:
    """Step of a Slurm job that the plugin pyxis runs in a container.

    Attributes:
        container: the image and folders.
        name: name that all steps of a pool share, so that the image is unpacked once.
    """

    container: Container
    name: str

    def options(self) -> tuple[str, ...]:
        """Return the options of srun."""
        image = self.container.image
        registry, slash, path = image.partition("/")
        if slash and registry and ("." in registry or ":" in registry):
            image = f"{registry}#{path}"  # pyxis takes what follows the first slash for the name
        # daemons and channels meet in /tmp; tensors of data loaders are in /dev/shm
        folders = ("/tmp", "/dev/shm", *self.container.binds)
        mounts = ",".join(name if ":" in name else ":".join([name, name]) for name in folders)
        return (
            f"--container-image={image}",
            f"--container-name={self.name}",
            f"--container-mounts={mounts}",
            "--container-mount-home",
            "--no-container-remap-root",
            "--container-workdir=/tmp",
        )


def container_mistakes(request: PoolRequest, provider: str) -> list[str]:
    """Return mistakes in the container options of a request; the values themselves are checked."""
    if not request.container:
        return ["--bind is for --container: add an image, or leave it out"] if request.binds else []
    engine = parse_container(request.container).engine
    if provider == "kubernetes" and engine:
        return [f"Kubernetes runs the image itself: write --container without {engine}:"]
    if provider == "ssh" and engine == "pyxis":
        return ["pyxis is a plugin of Slurm: name another engine, or --provider slurm"]
    return []


def read_container(text: str) -> str:
    """Check the value of --container, and return it unchanged. Raises RequestError."""
    parse_container(text)
    return text


def read_bind(text: str) -> str:
    """Check one folder of --bind, and return it unchanged. Raises RequestError."""
    if not re.fullmatch(r"[/~][^\0\s,:'\"\\$`]*(:/[^\0\s,:'\"\\$`]*)?", text):
        raise RequestError(
            f"{text!r} is no folder: write /data, or /data:/mnt for another name in the container"
        )
    return text
