"""scikit-learn: what it does in parallel runs on the pool's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skymagic.plugins.plugin import Cluster, Plugin

if TYPE_CHECKING:
    from skymagic.plan.image import Image


def sklearn(version: str | None = None) -> Plugin:
    """Install scikit-learn, and run its ``n_jobs=-1`` on the pool's ranks while the pool is there.

    ``GridSearchCV``, ``cross_val_score`` and other estimators that use processes; see `joblib` for the rules.

    Args:
        version: None for the notebook's, ``"latest"``, a version (``"1.5.2"`` means ``==1.5.2``) or a constraint (``">=1.4"``).
    """
    from skymagic.plugins._joblib import on_ranks
    from skymagic.plugins._torch.plugin import constraint

    def transform(image: Image, cluster: Cluster) -> Image:
        return image.replace(pip=(*image.pip, "joblib", "scikit-learn" + constraint(version)))

    return Plugin(name="sklearn", transform=transform, around_client=on_ranks, preload=("joblib", "sklearn"))
