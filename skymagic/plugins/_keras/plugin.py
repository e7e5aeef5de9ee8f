"""Keras 3: its backend chosen before it is imported, and training that knows of the other ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from skymagic.errors import RequestError
from skymagic.plugins.plugin import Cluster, Plugin
from skymagic.runtime.info import InstanceInfo

if TYPE_CHECKING:
    from skymagic.plan.image import Image

VARIABLE = "KERAS_BACKEND"
BACKENDS = ("jax", "torch", "tensorflow")


def keras(backend: str = "jax", sync: bool = True) -> Plugin:
    """Install Keras 3 and choose its backend before it is imported.

    With the plugin of the backend beside it, ranks train one model together, each on its own part of the data
    (``sky.shard``): on JAX by Keras's own ``DataParallel`` over the devices of all ranks, on torch by averaging each
    step's gradients (plain Keras would not). Without that plugin each rank trains for itself, and says so. On TensorFlow
    the variable is all there is: set up ``tf.distribute`` yourself.

    Args:
        backend: ``"jax"``, ``"torch"`` or ``"tensorflow"``.
        sync: False lets each rank train for itself also where they could train together.
    """
    if backend not in BACKENDS:
        raise RequestError(f"Keras has no backend {backend!r}; it has {', '.join(BACKENDS)}")

    def transform(image: Image, cluster: Cluster) -> Image:
        if image.env.get(VARIABLE, backend) != backend:
            raise RequestError(f"{VARIABLE} is {image.env[VARIABLE]!r} and backend={backend!r} is asked for; keep one")
        engine = "jax[cuda12]" if backend == "jax" and cluster.cuda else backend
        there = any(package.startswith(backend) for package in image.pip)
        packages = (*image.pip, "keras>=3", *(() if there else (engine,)))
        return image.replace(pip=packages, env={**image.env, VARIABLE: backend})

    @contextlib.contextmanager
    def around_app(info: InstanceInfo) -> Iterator[None]:
        os.environ[VARIABLE] = backend
        if backend == "tensorflow":
            yield
            return
        from skymagic.plugins._keras import fit

        if not sync:
            with fit.reporting():
                yield
            return
        if backend == "jax":
            distribute(info)
        with fit.reporting(), fit.installed(backend):
            yield

    def around_run() -> contextlib.AbstractContextManager[None]:
        if backend != "jax" or not sync:
            return contextlib.nullcontext()
        from skymagic.plugins._keras import on_jax

        return on_jax.around_run()

    # With the variable set by transform the import is right, and each rank finds it done. On torch it asks CUDA for its devices when it is
    # imported (keras/src/backend/torch/core.py), and keeps the answer: that is each rank's own affair.
    preload = ("keras",) if backend == "jax" else ()
    return Plugin(name="keras", transform=transform, preload=preload, around_app=around_app, around_run=around_run)


def distribute(info: InstanceInfo) -> None:
    """Let Keras spread its batches over the devices of all ranks, from equal weights; each rank brings its part.

    JAX must have joined its mesh before; without that there is nothing to spread over.
    """
    import jax
    import keras
    from jax.experimental import multihost_utils

    if not jax.distributed.is_initialized() or info.world_size == 1:
        return
    from skymagic.plugins._keras import on_jax
    from skymagic.runtime import rendezvous

    if info.rank == 0:
        rendezvous.put("keras", int.from_bytes(os.urandom(4), "big"))
    on_jax.share_seeds(rendezvous.get("keras"))
    multihost_utils.sync_global_devices("skymagic")  # a mesh that cannot connect is told at the start
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
