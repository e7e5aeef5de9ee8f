"""Keras 3: choose its backend before it is imported, and train one model on all ranks with JAX.

On JAX, ``fit`` spreads batches over the mesh of all ranks and starts from equal weights. Calls that
would wait forever are refused. On other backends ``fit`` does not average gradients over ranks, and
is refused in a run of several ranks.
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
    "skymagic: this fit trains each rank separately. To train one model on all ranks, create the "
    "pool with --plugin jax --plugin keras:backend=jax. If separate training is intended: "
    "--plugin keras:backend=jax,sync=false\n"
)
REFUSED = (
    "Keras on {backend} averages no gradients over ranks: create the pool with --plugin jax "
    "--plugin keras:backend=jax, or train a torch model with DistributedDataParallel (for a "
    "separate model on each rank: --plugin keras:backend={backend},sync=false)"
)
MODEL = "keras.src.models.model"
"""Name of the module that defines `keras.Model`."""


def keras(backend: str = "jax", sync: bool = True) -> Plugin:
    """Install Keras 3 and choose its backend before it is imported.

    On JAX, together with the ``jax`` plugin, ranks train one model by Keras's own ``DataParallel``
    over the devices of all ranks, each on its own part of the data (``sky.shard``). Without that
    plugin, each rank trains separately and prints a note. On torch and TensorFlow, ``fit`` raises
    RuntimeError in a run of several ranks, because Keras does not average gradients over them.

    Args:
        backend: ``"jax"``, ``"torch"`` or ``"tensorflow"``.
        sync: False lets each rank train separately, without a note. Use it also for
            ``tf.distribute``, which you set up yourself.
    """
    if backend not in BACKENDS:
        raise RequestError(f"Keras has no backend {backend!r}; it has {', '.join(BACKENDS)}")

    def transform(image: Image, cluster: Cluster) -> Image:
        if image.env.get(VARIABLE, backend) != backend:
            raise RequestError(
                f"{VARIABLE} is {image.env[VARIABLE]!r} and backend={backend!r} is asked for; "
                "keep one"
            )
        engine = "jax[cuda12]" if backend == "jax" and cluster.cuda else backend
        has_engine = any(package.startswith(backend) for package in image.pip)
        packages = (*image.pip, "keras>=3", *(() if has_engine else (engine,)))
        return image.replace(pip=packages, env={**image.env, VARIABLE: backend})

    @contextlib.contextmanager
    def around_app(info: InstanceInfo) -> Iterator[None]:
        os.environ[VARIABLE] = backend
        if backend == "tensorflow":
            # TensorFlow takes seconds to import, so that is left to the cell that needs it.
            if sync:
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

    # With the variable set by transform, preloading imports the right backend, and each rank finds
    # it imported. With torch, Keras asks CUDA for its devices on import
    # (keras/src/backend/torch/core.py) and caches the answer, so each rank must import it for
    # itself.
    preload = ("keras",) if backend == "jax" else ()
    return Plugin(
        name="keras",
        transform=transform,
        preload=preload,
        around_app=around_app,
        around_run=around_run,
    )


def distribute(info: InstanceInfo) -> None:
    """Let Keras spread its batches over the devices of all ranks, starting from equal weights.

    Each rank provides its part of the data. JAX must have joined its mesh before; otherwise nothing
    is distributed.
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
    # A mesh that cannot connect fails here, at the start.
    multihost_utils.sync_global_devices("skymagic")
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))


# -- fit on several ranks --------------------------------------------------------------------------


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Let ``fit`` report its steps and logs inside the context."""
    import keras

    model = owner(keras.Model, "fit")
    with Patches() as patches:
        patches.put(model, "fit", keras_fit(model.fit))
        yield


@contextlib.contextmanager
def synchronized(backend: str) -> Iterator[None]:
    """Make Keras aware of the other ranks inside the context.

    Keras must already be imported with this backend.
    """
    import keras

    model = owner(keras.Model, "fit")
    with Patches() as patches:
        if backend == "torch":
            patches.put(model, "fit", refuse_on_several_ranks(model.fit, backend))
        else:
            patches.put(model, "fit", on_whole_mesh(fit_with_callback(model.fit)))
            for name in ("evaluate", "predict"):
                kind = owner(keras.Model, name)
                patches.put(kind, name, on_whole_mesh(getattr(kind, name)))
        yield


def _refuse(model: type, backend: str) -> None:
    """Refuse ``fit`` on several ranks for the rest of the process's life."""
    trainer = owner(model, "fit")
    trainer.fit = refuse_on_several_ranks(trainer.fit, backend)


def owner(kind: type, name: str) -> Any:
    """Return the class that defines a method."""
    return next(base for base in kind.__mro__ if name in vars(base))


def refuse_on_several_ranks(plain: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return a ``fit`` that raises RuntimeError in a run of several ranks.

    Each of them would train its own model.
    """

    @wraps(plain)
    def fit(*args: Any, **kwargs: Any) -> Any:
        if len(runtime.participants()) > 1:
            raise RuntimeError(REFUSED.format(backend=backend))
        return plain(*args, **kwargs)

    return fit


def fit_with_callback(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``fit`` for JAX that appends our callback to the list.

    If ranks train separately, it adds no callback and prints a note.
    """
    signature = inspect.signature(plain)

    @wraps(plain)
    def fit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        parts_check = equal_parts()
        if parts_check is None:
            warn_if_alone()
        else:
            parts_check.data = bound.arguments.get("x")
            with_callback(bound, parts_check)
        return plain(*bound.args, **bound.kwargs)

    return fit


_warned: list[bool] = []


def warn_if_alone() -> None:
    """Print once per process that ranks train separately.

    On a single rank, that is what was requested, so nothing is printed.
    """
    if len(runtime.participants()) > 1 and not _warned:
        _warned.append(True)
        sys.stderr.write(ALONE)


# -- on JAX ----------------------------------------------------------------------------------------


class SharedSeeds:
    """Replacement for the module `random` in Keras that draws the same seeds on all ranks.

    Keras uses them for weights and dropout. Each rank draws its own weights, and they must be
    equal. A run on some ranks, which the others do not see, must not put the ranks out of step. It
    draws from the process's own numbers, and each run on all ranks starts a new sequence.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._run = -1
        self._stream = random.Random()

    def randint(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`."""
        from keras.src.utils import rng_utils

        # A seed that exists was set by the user: keras.utils.set_random_seed.
        if not runtime.all_ranks_take_part() or rng_utils.get_random_seed() is not None:
            return random.randint(low, high)
        if runtime.run_number() != self._run:
            # Each run on all ranks starts a new sequence.
            self._run = runtime.run_number()
            self._stream = random.Random(f"{self._seed} {self._run}")
        return self._stream.randint(low, high)


def share_seeds(seed: int) -> None:
    """Make Keras draw the same seeds on all ranks from now on. All ranks know `seed`."""
    from keras.src.random import seed_generator

    if hasattr(seed_generator, "python_random"):
        seed_generator.python_random = SharedSeeds(seed)


@contextlib.contextmanager
def own_devices_in_part_runs() -> Iterator[None]:
    """Restrict Keras to a rank's own devices in a run on some ranks.

    Anything on the mesh of all ranks would wait forever for the others.
    """
    import keras

    mesh = keras.distribution.distribution()
    if mesh is None or runtime.all_ranks_take_part():
        yield
        return
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(mesh)


def on_whole_mesh(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's method so that it raises RuntimeError if the mesh is only partly in the run.

    That is the case if the model is on the mesh of all ranks and not all of them take part.
    """

    @wraps(plain)
    def guarded(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not runtime.all_ranks_take_part() and any(
            not getattr(v.value, "is_fully_addressable", True) for v in model.variables
        ):
            part = len(runtime.participants())
            raise RuntimeError(
                f"this model is on the devices of all {runtime.instance_info().world_size} ranks, "
                f"and only {part} take{'s' * (part == 1)} part in this run: {plain.__name__} it "
                "on all of them, or make it in this run"
            )
        return plain(model, *args, **kwargs)

    return guarded


def equal_parts() -> Any:
    """Return a callback that checks that all ranks have equally many batches and items.

    Otherwise they would wait for each other forever. The callback raises ValueError.

    Returns:
        The callback, or None if ranks train separately.
    """
    import jax

    if jax.process_count() == 1 or not runtime.all_ranks_take_part():
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
            counts = np.array([-1 if steps is None else steps, items])
            rows = multihost_utils.process_allgather(counts).reshape(-1, len(counts)).tolist()
            for name, column in zip(("batches", "items"), zip(*rows, strict=True), strict=True):
                if len(set(column)) > 1:
                    raise ValueError(
                        f"all ranks must train on equally many {name}, and they have "
                        f"{list(column)} by rank: sky.shard(x, y, drop_last=True) gives equal "
                        "parts"
                    )

    return EqualParts()
