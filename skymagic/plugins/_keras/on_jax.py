"""Keras on JAX: batches over the mesh of all ranks, from equal weights; what would wait for ever is refused."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

from skymagic.runtime import info


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
        if not info.everyone() or rng_utils.get_random_seed() is not None:
            return random.randint(low, high)
        if info.run_number() != self._run:
            self._run = info.run_number()
            self._stream = random.Random(f"{self._seed} {self._run}")
        return self._stream.randint(low, high)


def share_seeds(seed: int) -> None:
    """From now on Keras draws the same seeds on all ranks; `seed` is known to all of them."""
    from keras.src.random import seed_generator

    if hasattr(seed_generator, "python_random"):
        seed_generator.python_random = SharedSeeds(seed)


@contextlib.contextmanager
def around_run() -> Iterator[None]:
    """In a run of some ranks Keras keeps to their own devices; what is on the mesh of all waits for the others for ever."""
    import keras

    mesh = keras.distribution.distribution()
    if mesh is None or info.everyone():
        yield
        return
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(mesh)


def on_whole_mesh(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a model, refused (RuntimeError) where the model is on the mesh of all ranks and not all take part."""

    @functools.wraps(plain)
    def guarded(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not info.everyone() and any(not getattr(v.value, "is_fully_addressable", True) for v in model.variables):
            part = len(info.participants())
            raise RuntimeError(
                f"this model is on the devices of all {info.instance_info().world_size} ranks, and only {part} "
                f"take{'s' * (part == 1)} part in this run: {plain.__name__} it on all of them, or make it in this run"
            )
        return plain(model, *args, **kwargs)

    return guarded


def callback() -> Any:
    """Checks before training that all ranks will do the same number of steps; None where they train apart."""
    import jax
    import keras

    if jax.process_count() == 1 or not info.everyone():
        return None

    class EqualParts(keras.callbacks.Callback):  # type: ignore[misc]
        data: Any = None

        def on_train_begin(self, logs: Any = None) -> None:
            check_equal_parts(self.params.get("steps"), self.data)

    return EqualParts()


def check_equal_parts(steps: int | None, data: Any) -> None:
    """Raises ValueError where ranks have different numbers of batches, or of items; all ranks must call it."""
    import numpy as np
    from jax.experimental import multihost_utils

    try:
        items = len(data)
    except TypeError:
        items = -1
    mine = np.array([-1 if steps is None else steps, items])
    every = multihost_utils.process_allgather(mine).reshape(-1, 2)
    for name, column in (("batches", every[:, 0]), ("items", every[:, 1])):
        if len(set(column.tolist())) > 1:
            raise ValueError(
                f"all ranks must train on equally many {name}, and they have {column.tolist()} by rank: "
                "sky.shard(x, y, drop_last=True) gives equal parts"
            )
