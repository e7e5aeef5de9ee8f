"""The torch plugin's wheels and its arguments."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

import skymagic as sky
from skymagic.plugins import Cluster

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)

CPU = Cluster(nodes=2)
GPU = Cluster(nodes=2, accelerator=sky.accelerators.A100(count=8))
OTHER = Cluster(nodes=2, accelerator=sky.accelerators.MI300X())
INDEX = "https://download.pytorch.org/whl/"


def image(cluster: Cluster, before: sky.Image | None = None, **options: Any) -> sky.Image:
    made: sky.Image = sky.plugins.torch(**options).transform(before or sky.Image(), cluster)
    return made


# ---------------------------------------------------------------------------------------------------- wheels


@pytest.mark.parametrize(
    ("options", "packages"),
    [
        ({}, ("torch",)),
        ({"version": "latest"}, ("torch>=0",)),
        ({"version": "2.3.0"}, ("torch==2.3.0",)),
        ({"version": ">=2.3"}, ("torch>=2.3",)),
        ({"version": "~=2.3"}, ("torch~=2.3",)),
        ({"vision": "latest"}, ("torch", "torchvision")),
        ({"audio": "latest"}, ("torch", "torchaudio")),
        ({"version": "latest", "vision": "latest"}, ("torch>=0", "torchvision>=0")),
        (
            {"version": "2.3.0", "vision": "0.18.0", "audio": ">=2"},
            ("torch==2.3.0", "torchvision==0.18.0", "torchaudio>=2"),
        ),
    ],
    ids=str,
)
def test_packages(options: dict[str, str], packages: tuple[str, ...]) -> None:
    assert image(GPU, **options).pip == packages


@pytest.mark.parametrize(
    ("cluster", "options", "index"),
    [
        (GPU, {}, "cu128"),
        (GPU, {"cuda": "cu124"}, "cu124"),
        (CPU, {}, "cpu"),
        (CPU, {"cuda": "cu124"}, "cpu"),
        (OTHER, {}, "cpu"),
    ],
    ids=str,
)
def test_the_index_follows_the_accelerator(
    cluster: Cluster, options: dict[str, str], index: str
) -> None:
    assert image(cluster, **options).pip_indexes == (INDEX + index,)


def test_plugin_packages_follow_the_images() -> None:
    before = sky.Image(
        pip=["numpy", "einops"], pip_indexes=["https://example.org/simple"], env={"A": "b"}
    )
    after = image(CPU, before)
    assert after.pip == ("numpy", "einops", "torch")
    assert after.pip_indexes == ("https://example.org/simple", INDEX + "cpu")
    assert after.env == {"A": "b"}
