"""Keras on several ranks: ``fit`` trains one model on all of them, or says that it does not."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from skymagic.plugins._keras import on_jax, on_torch
from skymagic.plugins._reports import keras_fit, with_callback
from skymagic.runtime import info

ALONE = (
    "skymagic: this fit trains on each rank for itself. To average gradients make the pool with --plugin {backend} "
    "beside keras; to say that it is meant so: --plugin keras:backend={backend},sync=false\n"
)


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Inside, ``fit`` reports its steps and what it logs."""
    import keras

    model = owner(keras.Model, "fit")
    plain = model.fit
    model.fit = keras_fit(plain)
    try:
        yield
    finally:
        model.fit = plain


@contextlib.contextmanager
def installed(backend: str) -> Iterator[None]:
    """Inside, Keras knows of the other ranks. Keras must be imported, with this backend."""
    import keras

    with contextlib.ExitStack() as undo:

        def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            plain = getattr(owner, name)
            undo.callback(setattr, owner, name, plain)
            setattr(owner, name, make(plain))

        model = owner(keras.Model, "fit")
        if backend == "torch":
            averager = on_torch.GradientAverager()
            for kind in {owner(keras.optimizers.Optimizer, "apply"), keras.optimizers.LossScaleOptimizer}:
                put(kind, "apply", averager.around)
            put(model, "fit", lambda plain: together(plain, "torch", lambda: on_torch.callback(averager)))
        else:
            put(model, "fit", lambda plain: on_jax.on_whole_mesh(together(plain, "jax", on_jax.callback)))
            for name in ("evaluate", "predict"):
                put(owner(keras.Model, name), name, on_jax.on_whole_mesh)
        yield


def owner(kind: type, name: str) -> Any:
    """The class in which a method is written."""
    return next(base for base in kind.__mro__ if name in vars(base))


def together(plain: Callable[..., Any], backend: str, callback: Callable[[], Any]) -> Callable[..., Any]:
    """``fit`` with a callback of ours, the last in the list; None of it, and a word, where ranks train apart."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def fit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        ours = callback()
        if ours is None:
            warn_alone(backend)
        else:
            ours.data = bound.arguments.get("x")
            with_callback(bound, ours)
        return plain(*bound.args, **bound.kwargs)

    return fit


_warned: set[str] = set()


def warn_alone(backend: str) -> None:
    """Say once in the process that ranks train apart; not on one rank, where that is what was asked for."""
    if len(info.participants()) > 1 and backend not in _warned:
        _warned.add(backend)
        sys.stderr.write(ALONE.format(backend=backend))
