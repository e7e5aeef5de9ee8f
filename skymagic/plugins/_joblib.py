"""joblib and scikit-learn: run their tasks on the pool's ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skymagic.plugins.plugin import Cluster, Plugin

if TYPE_CHECKING:
    from skymagic.plan.image import Image


def joblib() -> Plugin:
    """Run ``joblib.Parallel`` on the pool's ranks as long as the pool exists.

    ``n_jobs=-1`` uses all ranks. Code that requests threads, shared memory or one job still gets
    them. Tasks that use joblib themselves use threads of their rank.
    """

    def transform(image: Image, cluster: Cluster) -> Image:
        return image.replace(pip=(*image.pip, "joblib"))

    return Plugin(name="joblib", transform=transform, around_client=on_ranks, preload=("joblib",))


backend: list[Callable[[Any], contextlib.AbstractContextManager[None]]] = []
"""Function that sends joblib's tasks to a pool's ranks.

`jobs.workers` registers itself here, because a node must not import it.
"""


def on_ranks(pool: Any) -> contextlib.AbstractContextManager[None]:
    """Run joblib's tasks on the pool's ranks while the context is open. Only for the notebook."""
    return backend[-1](pool)


def sklearn(version: str | None = None) -> Plugin:
    """Install scikit-learn, and run its ``n_jobs=-1`` on the pool's ranks while the pool exists.

    This applies to ``GridSearchCV``, ``cross_val_score`` and other estimators that use processes.
    See `joblib` for the rules.

    Args:
        version: None for the notebook's version, ``"latest"``, a version (``"1.5.2"`` means
            ``==1.5.2``) or a constraint (``">=1.4"``).
    """
    from skymagic.plugins._torch.plugin import constraint

    def transform(image: Image, cluster: Cluster) -> Image:
        return image.replace(pip=(*image.pip, "joblib", "scikit-learn" + constraint(version)))

    return Plugin(
        name="sklearn", transform=transform, around_client=on_ranks, preload=("joblib", "sklearn")
    )
