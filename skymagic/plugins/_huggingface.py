"""HuggingFace: its packages, and a token that only its libraries see."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from skymagic.plugins import _reports
from skymagic.plugins.plugin import Cluster, Plugin
from skymagic.runtime.info import InstanceInfo

if TYPE_CHECKING:
    from skymagic.plan.image import Image

# Trainer needs accelerate.
PACKAGES = ("transformers", "datasets", "tokenizers", "accelerate")


def huggingface(token: str | None = None) -> Plugin:
    """Install transformers, datasets and tokenizers, and pass the hub's token to its libraries.

    Together with the torch plugin, ``Trainer`` finds the process group and trains on all ranks
    together. The token is set as HF_TOKEN in the ranks' environment. It never appears in a command
    line, a log, a plan or a repr, and it is not written to a node's disk (``huggingface-cli login``
    would do that). In a notebook that you save, omit it and use ``--secret HF_TOKEN``.

    Args:
        token: token of the hub; None for the one in the ranks' environment.
    """

    def transform(image: Image, cluster: Cluster) -> Image:
        return image.replace(pip=(*image.pip, *PACKAGES))

    @contextlib.contextmanager
    def around_app(info: InstanceInfo) -> Iterator[None]:
        if token is not None:
            os.environ["HF_TOKEN"] = token
        # Tokenizers' threads are not safe in a process that forks, and ranks fork loader workers.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        _reports.adapt_transformers()
        yield

    # Importing transformers itself is light. What it loads on use would start threads, which a
    # process that forks must not have.
    return Plugin(
        name="huggingface",
        transform=transform,
        around_app=around_app,
        preload=("transformers", "accelerate"),
    )
