"""Containers are read from the option, and what cannot be is refused in words."""

from __future__ import annotations

import pytest

from skymagic.errors import RequestError
from skymagic.plan.container import (
    Container,
    PyxisStep,
    container_mistakes,
    parse_container,
    read_bind,
)
from skymagic.plan.requests import PoolRequest, unsupported_options
from tests.lab.golden import Golden


@pytest.mark.parametrize(
    ("text", "image", "engine"),
    [
        ("pytorch/pytorch:2.13.0", "pytorch/pytorch:2.13.0", ""),
        ("python:3.11", "python:3.11", ""),
        ("nvcr.io/nvidia/pytorch:24.01-py3", "nvcr.io/nvidia/pytorch:24.01-py3", ""),
        ("localhost:5000/a/b:1", "localhost:5000/a/b:1", ""),
        ("podman:python:3.11", "python:3.11", "podman"),
        ("podman:docker://a/b", "a/b", "podman"),
        ("apptainer:docker://a/b", "docker://a/b", "apptainer"),
        ("docker://a/b", "docker://a/b", ""),
        ("charliecloud:/images/torch", "/images/torch", "charliecloud"),
        ("~/torch.sif", "~/torch.sif", ""),
    ],
)
def test_engine_stands_before_the_image(text: str, image: str, engine: str) -> None:
    assert parse_container(text) == Container(image, engine)


def test_kind_of_image_decides_the_engines() -> None:
    engines = {text: parse_container(text).engines for text in ("a/b", "/a.sif", "/a.sqfs")}
    assert engines == {
        "a/b": ("apptainer", "singularity", "podman", "charliecloud"),
        "/a.sif": ("apptainer", "singularity"),
        "/a.sqfs": ("charliecloud", "apptainer", "singularity"),
    }
    assert parse_container("podman:/a.sif").engines == ("podman",)


def test_unusable_images_and_folders_are_refused(golden: Golden) -> None:
    refusals: list[str] = []
    for text in ("docker:python:3.11", "podmn:python:3.11", "-x", "./torch.sif", "a b"):
        with pytest.raises(RequestError) as refused:
            parse_container(text)
        refusals += refused.value.mistakes
    for text in ("data", "/a,b", "/a:b", "/a b"):
        with pytest.raises(RequestError) as refused:
            read_bind(text)
        refusals += refused.value.mistakes
    golden("\n".join(refusals))


def test_options_that_do_not_fit_the_provider_are_refused(golden: Golden) -> None:
    image = PoolRequest(container="a/b", binds=("/data",), stated=frozenset({"container", "binds"}))
    refusals = [
        *(
            f"{name}: {each}"
            for name in ("local", "aws", "ray")
            for each in unsupported_options(image, name)
        ),
        *unsupported_options(image, "kubernetes"),
        *container_mistakes(PoolRequest(binds=("/data",)), "ssh"),
        *container_mistakes(PoolRequest(container="podman:a/b"), "kubernetes"),
        *container_mistakes(PoolRequest(container="pyxis:a/b"), "ssh"),
    ]
    golden("\n".join(refusals))
    assert not any(unsupported_options(image, name) for name in ("ssh", "slurm"))
    assert container_mistakes(image, "slurm") == []


def test_options_of_pyxis() -> None:
    container = Container("nvcr.io/nvidia/pytorch:24.01-py3", "pyxis", ("/data", "/a:/b"))
    options = PyxisStep(container, "skymagic-lab-1").options()
    assert "--container-image=nvcr.io#nvidia/pytorch:24.01-py3" in options
    assert "--container-mounts=/tmp:/tmp,/dev/shm:/dev/shm,/data:/data,/a:/b" in options
    plain = PyxisStep(Container("pytorch/pytorch"), "x").options()
    assert "--container-image=pytorch/pytorch" in plain
