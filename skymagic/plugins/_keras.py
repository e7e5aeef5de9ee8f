"""Keras 3: its backend chosen before it is imported, and ``fit`` that trains one model on all ranks, on JAX.

Batches are spread over the mesh of all ranks, from equal weights; what would wait for ever is refused. On other backends ``fit`` averages no
gradients over ranks, and is refused in a run of several.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from skymagic.errors import RequestError
from skymagic.plugins._reports import keras_fit, with_callback
from skymagic.plugins.plugin import Cluster, Plugin
from skymagic.runtime import info as runtime
from skymagic.runtime.info import InstanceInfo
from skymagic.runtime.on_import import Patches, when_imported, wraps

if TYPE_CHECKING:
    from skymagic.plan.image import Image

VARIABLE = "KERAS_BACKEND"
BACKENDS = ("jax", "torch", "tensorflow")
ALONE = (
    "skymagic: this fit trains each rank separately. To train one model on all ranks, create the pool with --plugin jax "
    "--plugin keras:backend=jax. If separate training is intended: --plugin keras:backend=jax,sync=false\n"
)
REFUSED = (
    "Keras on {backend} averages no gradients over ranks: create the pool with --plugin jax --plugin keras:backend=jax, or train a torch "
    "model with DistributedDataParallel (for a separate model on each rank: --plugin keras:backend={backend},sync=false)"
)
MODEL = "keras.src.models.model"
"""The module of `keras.Model`."""


def keras(backend: str = "jax", sync: bool = True) -> Plugin:
    """Install Keras 3 and choose its backend before it is imported.

    On JAX, with the plugin ``jax`` beside it, ranks train one model together by Keras's own ``DataParallel`` over the devices of
    all ranks, each on its own part of the data (``sky.shard``). Without that plugin each rank trains for itself, and says so. On torch
    and TensorFlow ``fit`` raises RuntimeError in a run of several ranks, for Keras averages no gradients over them.

    Args:
        backend: ``"jax"``, ``"torch"`` or ``"tensorflow"``.
        sync: False lets each rank train for itself, without a word; also for ``tf.distribute``, which you set up yourself.
    """
    if backend not in BACKENDS:
        raise RequestError(f"Keras has no backend {backend!r}; it has {', '.join(BACKENDS)}")

    def transform(image: Image, cluster: Cluster) -> Image:
        if image.env.get(VARIABLE, backend) != backend:
            raise RequestError(
                f"{VARIABLE} is {image.env[VARIABLE]!r} and backend={backend!r} is asked for; keep one"
            )
        engine = "jax[cuda12]" if backend == "jax" and cluster.cuda else backend
        there = any(package.startswith(backend) for package in image.pip)
        packages = (*image.pip, "keras>=3", *(() if there else (engine,)))
        return image.replace(pip=packages, env={**image.env, VARIABLE: backend})

    @contextlib.contextmanager
    def around_app(info: InstanceInfo) -> Iterator[None]:
        os.environ[VARIABLE] = backend
        if backend == "tensorflow":
            if sync:  # TensorFlow takes seconds to import, and is left to the cell that needs it
                when_imported(MODEL, lambda module: _refuse(module.Model, backend))
            yield
            return
        if not sync:
            with reporting():
                yield
            return
        if backend == "jax":
            distribute(info)
        with reporting(), synchronized(backend):
            yield

    def around_run() -> contextlib.AbstractContextManager[None]:
        if backend != "jax" or not sync:
            return contextlib.nullcontext()
        return own_devices_in_part_runs()

    # With the variable set by transform the import is right, and each rank finds it done. On torch it asks CUDA for its devices when it is
    # imported (keras/src/backend/torch/core.py), and keeps the answer: that is each rank's own affair.
    preload = ("keras",) if backend == "jax" else ()
    return Plugin(
        name="keras",
        transform=transform,
        preload=preload,
        around_app=around_app,
        around_run=around_run,
    )


def distribute(info: InstanceInfo) -> None:
    """Let Keras spread its batches over the devices of all ranks, from equal weights; each rank brings its part.

    JAX must have joined its mesh before; without that there is nothing to spread over.
    """
    import jax
    import keras
    from jax.experimental import multihost_utils

    if not jax.distributed.is_initialized() or info.world_size == 1:
        return
    from skymagic.runtime import rendezvous

    if info.rank == 0:
        rendezvous.put("keras", int.from_bytes(os.urandom(4), "big"))
    share_seeds(rendezvous.get("keras"))
    multihost_utils.sync_global_devices(
        "skymagic"
    )  # a mesh that cannot connect is told at the start
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))


# -- fit on several ranks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Inside, ``fit`` reports its steps and what it logs."""
    import keras

    model = owner(keras.Model, "fit")
    with Patches() as patches:
        patches.put(model, "fit", keras_fit(model.fit))
        yield


@contextlib.contextmanager
def synchronized(backend: str) -> Iterator[None]:
    """Inside, Keras knows of the other ranks. Keras must be imported, with this backend."""
    import keras

    model = owner(keras.Model, "fit")
    with Patches() as patches:
        if backend == "torch":
            patches.put(model, "fit", refused_on_several(model.fit, backend))
        else:
            patches.put(model, "fit", on_whole_mesh(together(model.fit)))
            for name in ("evaluate", "predict"):
                kind = owner(keras.Model, name)
                patches.put(kind, name, on_whole_mesh(getattr(kind, name)))
        yield


def _refuse(model: type, backend: str) -> None:
    """Refuse ``fit`` on several ranks, as long as the process lives."""
    trainer = owner(model, "fit")
    trainer.fit = refused_on_several(trainer.fit, backend)


def owner(kind: type, name: str) -> Any:
    """The class in which a method is written."""
    return next(base for base in kind.__mro__ if name in vars(base))


def refused_on_several(plain: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return ``fit`` that raises RuntimeError in a run of several ranks: each would train a model of its own."""

    @wraps(plain)
    def fit(*args: Any, **kwargs: Any) -> Any:
        if len(runtime.participants()) > 1:
            raise RuntimeError(REFUSED.format(backend=backend))
        return plain(*args, **kwargs)

    return fit


def together(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``fit`` on JAX with a callback of ours, the last in the list; None of it, and a word, where ranks train apart."""
    signature = inspect.signature(plain)

    @wraps(plain)
    def fit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        ours = equal_parts()
        if ours is None:
            warn_alone()
        else:
            ours.data = bound.arguments.get("x")
            with_callback(bound, ours)
        return plain(*bound.args, **bound.kwargs)

    return fit


_warned: list[bool] = []


def warn_alone() -> None:
    """Say once in the process that ranks train apart; not on one rank, where that is what was asked for."""
    if len(runtime.participants()) > 1 and not _warned:
        _warned.append(True)
        sys.stderr.write(ALONE)


# -- on JAX ----------------------------------------------------------------------------------------------------------


class SharedSeeds:
    """Stands for the module `random` where Keras draws seeds of weights and of dropout: the same ones on all ranks.

    Each rank draws its own weights, and they must be equal. A run of some ranks, which others do not see, must not put the
    ranks out of step: it draws from the process's own numbers, and each run of all begins anew.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._run = -1
        self._stream = random.Random()

    def randint(self, low: int, high: int) -> int:
        """A number from `low` to `high`."""
        from keras.src.utils import rng_utils

        # a seed that is there was set by the user: keras.utils.set_random_seed
        if not runtime.everyone() or rng_utils.get_random_seed() is not None:
            return random.randint(low, high)
        if runtime.run_number() != self._run:
            self._run = runtime.run_number()
            self._stream = random.Random(f"{self._seed} {self._run}")
        return self._stream.randint(low, high)


def share_seeds(seed: int) -> None:
    """From now on Keras draws the same seeds on all ranks; `seed` is known to all of them."""
    from keras.src.random import seed_generator

    if hasattr(seed_generator, "python_random"):
        seed_generator.python_random = SharedSeeds(seed)


@contextlib.contextmanager
def own_devices_in_part_runs() -> Iterator[None]:
    """In a run of some ranks Keras keeps to their own devices; what is on the mesh of all waits for the others for ever."""
    import keras

    mesh = keras.distribution.distribution()
    if mesh is None or runtime.everyone():
        yield
        return
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(mesh)


def on_whole_mesh(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a model, refused (RuntimeError) where the model is on the mesh of all ranks and not all take part."""

    @wraps(plain)
    def guarded(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not runtime.everyone() and any(
            not getattr(v.value, "is_fully_addressable", True) for v in model.variables
        ):
            part = len(runtime.participants())
            raise RuntimeError(
                f"this model is on the devices of all {runtime.instance_info().world_size} ranks, and only {part} "
                f"take{'s' * (part == 1)} part in this run: {plain.__name__} it on all of them, or make it in this run"
            )
        return plain(model, *args, **kwargs)

    return guarded


def equal_parts() -> Any:
    """A callback that raises ValueError where ranks have different numbers of batches, or of items; None where ranks train apart.

    They would wait for each other for ever.
    """
    import jax

    if jax.process_count() == 1 or not runtime.everyone():
        return None
    import keras
    import numpy as np
    from jax.experimental import multihost_utils

    class EqualParts(keras.callbacks.Callback):  # type: ignore[misc]
        data: Any = None

        def on_train_begin(self, logs: Any = None) -> None:
            try:
                items = len(self.data)
            except TypeError:
                items = -1
            steps = self.params.get("steps")
            mine = np.array([-1 if steps is None else steps, items])
            rows = multihost_utils.process_allgather(mine).reshape(-1, len(mine)).tolist()
            for name, column in zip(("batches", "items"), zip(*rows, strict=True), strict=True):
                if len(set(column)) > 1:
                    raise ValueError(
                        f"all ranks must train on equally many {name}, and they have {list(column)} by rank: "
                        "sky.shard(x, y, drop_last=True) gives equal parts"
                    )

    return EqualParts()
