"""HuggingFace: its packages, and a token that is seen by the libraries alone."""

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

PACKAGES = ("transformers", "datasets", "tokenizers", "accelerate")  # Trainer needs accelerate


def huggingface(token: str | None = None) -> Plugin:
    """Install transformers, datasets and tokenizers, and let the hub's libraries find the token.

    With the plugin torch beside it, ``Trainer`` finds the process group and trains on all ranks together. The token is in
    the ranks' variable HF_TOKEN: never in a command line, a log, a plan or a repr, and it is not written to a node's disk
    (``huggingface-cli login`` would do that). In a notebook that you save, leave it out and use ``--secret HF_TOKEN``.

    Args:
        token: of the hub; None for the one in the ranks' environment.
    """

    def transform(image: Image, cluster: Cluster) -> Image:
        return image.replace(pip=(*image.pip, *PACKAGES))

    @contextlib.contextmanager
    def around_app(info: InstanceInfo) -> Iterator[None]:
        if token is not None:
            os.environ["HF_TOKEN"] = token
        # the tokenizers' threads and a process that forks do not go together, and ranks fork loader workers
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        _reports.adapt_transformers()
        yield

    # transformers alone is light; what it loads on use would start threads, which a process that forks must not have
    return Plugin(
        name="huggingface",
        transform=transform,
        around_app=around_app,
        preload=("transformers", "accelerate"),
    )
