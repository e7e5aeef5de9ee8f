"""joblib and scikit-learn: their tasks run on the pool's ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skymagic.plugins.plugin import Cluster, Plugin

if TYPE_CHECKING:
    from skymagic.plan.image import Image


def joblib() -> Plugin:
    """Run ``joblib.Parallel`` on the pool's ranks while the pool is there.

    ``n_jobs=-1`` takes all ranks. Code that asks for threads, shared memory or one job keeps them; tasks that use joblib
    themselves do so with threads of their rank.
    """

    def transform(image: Image, cluster: Cluster) -> Image:
        return image.replace(pip=(*image.pip, "joblib"))

    return Plugin(name="joblib", transform=transform, around_client=on_ranks, preload=("joblib",))


backend: list[Callable[[Any], contextlib.AbstractContextManager[None]]] = []
"""What sends joblib's tasks to a pool's ranks; `jobs.workers` puts itself here, for a node must not import it."""


def on_ranks(pool: Any) -> contextlib.AbstractContextManager[None]:
    """Let joblib's tasks run on the pool's ranks while the context is open; in the notebook only."""
    return backend[-1](pool)


def sklearn(version: str | None = None) -> Plugin:
    """Install scikit-learn, and run its ``n_jobs=-1`` on the pool's ranks while the pool is there.

    ``GridSearchCV``, ``cross_val_score`` and other estimators that use processes; see `joblib` for the rules.

    Args:
        version: None for the notebook's, ``"latest"``, a version (``"1.5.2"`` means ``==1.5.2``) or a constraint (``">=1.4"``).
    """
    from skymagic.plugins._torch.plugin import constraint

    def transform(image: Image, cluster: Cluster) -> Image:
        return image.replace(pip=(*image.pip, "joblib", "scikit-learn" + constraint(version)))

    return Plugin(
        name="sklearn", transform=transform, around_client=on_ranks, preload=("joblib", "sklearn")
    )
