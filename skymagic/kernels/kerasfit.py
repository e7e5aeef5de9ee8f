"""Keras on several ranks: ``fit`` on torch averages gradients, on JAX it refuses what would hang.

On JAX, Keras computes over the whole mesh by itself, in lockstep. On torch it does not know of other processes: here each
step's gradients are averaged before the optimizer takes them, as DDP does, also in training loops of the user's own. A
rank that has fewer batches than others goes on averaging, with nothing to add, until all have ended their epoch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from skymagic import runtime

ALONE = (
    "skymagic: this fit trains on each rank for itself. To average gradients make the pool with --plugin {backend} "
    "beside keras; to say that it is meant so: --plugin keras:backend={backend},sync=false\n"
)


@contextlib.contextmanager
def installed(backend: str) -> Iterator[None]:
    """Inside, Keras knows of the other ranks. Keras must be imported, with this backend."""
    import keras

    with contextlib.ExitStack() as undo:

        def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            plain = getattr(owner, name)
            undo.callback(setattr, owner, name, plain)
            setattr(owner, name, make(plain))

        if backend == "torch":
            averager = Averager(owner(keras.optimizers.Optimizer, "apply").apply)
            for kind in {owner(keras.optimizers.Optimizer, "apply"), keras.optimizers.LossScaleOptimizer}:
                put(kind, "apply", averager.around)
            put(
                owner(keras.Model, "fit"),
                "fit",
                lambda plain: fit_together(plain, lambda: torch_callback(averager)),
            )
        else:
            put(
                owner(keras.Model, "fit"),
                "fit",
                lambda plain: on_whole_mesh(fit_together(plain, jax_callback)),
            )
            for name in ("evaluate", "predict"):
                put(owner(keras.Model, name), name, on_whole_mesh)
        yield


def owner(kind: type, name: str) -> Any:
    """The class in which a method is written."""
    return next(base for base in kind.__mro__ if name in vars(base))


def fit_together(plain: Callable[..., Any], callback: Callable[[], Any]) -> Callable[..., Any]:
    """``fit`` with a callback of ours, the last in the list; `callback` returns None where there is nothing to add."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def fit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        ours = callback()
        if ours is not None:
            ours.data = bound.arguments.get("x")
            theirs = bound.arguments.get("callbacks")
            if (
                theirs is not None and hasattr(theirs, "append") and not isinstance(theirs, list)
            ):  # a CallbackList
                theirs.append(ours)
            else:
                listed = theirs if isinstance(theirs, list | tuple) else [theirs]
                bound.arguments["callbacks"] = [each for each in listed if each is not None] + [ours]
        return plain(*bound.args, **bound.kwargs)

    return fit


# -- torch -----------------------------------------------------------------------------------------------------------


def together() -> bool:
    """Whether there is a process group of several ranks, and all of them take part in the run."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return False
    return dist.get_world_size() > 1 and whole()


class Averager:
    """Averages gradients over the ranks before an optimizer applies them.

    Args:
        apply: the optimizers' own method.
    """

    def __init__(self, apply: Callable[..., Any]) -> None:
        self._apply = apply
        self._inside = False
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()

    def around(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The method of a class of optimizers, on averaged gradients; one optimizer within another averages once."""

        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._inside or not together():
                return plain(optimizer, grads, trainable_variables)
            given = optimizer._trainable_variables if trainable_variables is None else trainable_variables
            variables = list(given)
            if optimizer not in self._met:  # a training loop that is not fit
                self.begin(optimizer, variables)
            averaged, _ = average(list(grads), variables, active=True)
            self._inside = True
            try:
                return plain(optimizer, averaged, trainable_variables)
            finally:
                self._inside = False

        return apply

    def begin(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """All ranks start from rank 0's values."""
        broadcast([*variables, *(optimizer.variables if optimizer.built else ())])
        self._met.add(optimizer)

    def finish_epoch(self, model: Any) -> None:
        """Take part in the steps of ranks that have more batches, until all have ended the epoch."""
        import torch

        variables = model.trainable_variables
        while variables:
            averaged, active = average([None] * len(variables), variables, active=False)
            if not active:
                return
            self._inside = True
            try:
                with torch.no_grad():
                    model.optimizer.apply(averaged, variables)
            finally:
                self._inside = False


def average(grads: Sequence[Any], variables: Sequence[Any], *, active: bool) -> tuple[list[Any], int]:
    """Gradients averaged over the ranks that are in a step, and the number of these ranks.

    One all_reduce of everything in a row: gradients, which of them there are, and whether this rank is in a step. A
    gradient that no rank has stays None.
    """
    import torch
    import torch.distributed as dist

    values = [variable.value for variable in variables]
    double = any(value.dtype == torch.float64 for value in values)
    dtype = torch.float64 if double else torch.float32
    device = values[0].device
    flat = [
        torch.zeros(value.numel(), dtype=dtype, device=device)
        if grad is None
        else grad.detach().reshape(-1).to(dtype)
        for grad, value in zip(grads, values, strict=True)
    ]
    marks = torch.tensor(
        [float(grad is not None) for grad in grads] + [float(active)], dtype=dtype, device=device
    )
    row = torch.cat([*flat, marks])
    dist.all_reduce(row)
    *there, count = row[-len(marks) :].tolist()
    averaged, place = [], 0
    for value, some in zip(values, there, strict=True):
        part = row[place : place + value.numel()] / max(count, 1.0)
        averaged.append(part.reshape(value.shape).to(value.dtype) if some else None)
        place += value.numel()
    return averaged, round(count)


def broadcast(variables: Sequence[Any]) -> None:
    """Give rank 0's values to these variables on all ranks."""
    import torch
    import torch.distributed as dist

    with torch.no_grad():
        for variable in variables:
            tensor = variable.value
            whole = tensor.detach().clone(memory_format=torch.contiguous_format)
            as_sent = whole.to(torch.uint8) if whole.dtype == torch.bool else whole
            dist.broadcast(as_sent, 0)
            tensor.copy_(as_sent)


def torch_callback(averager: Averager) -> Any:
    """What `fit` does beside training where ranks train together; None, and a word, where they do not."""
    import keras
    import torch
    import torch.distributed as dist

    if not together():
        warn_alone("torch")
        return None

    class Together(keras.callbacks.Callback):  # type: ignore[misc]
        data: Any = None

        def on_train_begin(self, logs: Any = None) -> None:
            broadcast(self.model.non_trainable_variables)
            averager.begin(self.model.optimizer, self.model.trainable_variables)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            averager.finish_epoch(self.model)
            device = (
                self.model.trainable_variables[0].value.device if self.model.trainable_variables else "cpu"
            )
            stop = torch.tensor([float(self.model.stop_training)], device=device)
            dist.all_reduce(stop, dist.ReduceOp.MAX)  # one that stops early stops all
            self.model.stop_training = bool(stop.item())

        def on_train_end(self, logs: Any = None) -> None:
            broadcast(self.model.non_trainable_variables)  # as DDP's buffers: rank 0's

    return Together()


_warned: set[str] = set()


def warn_alone(backend: str) -> None:
    """Say once in the process that ranks train apart; not on one rank, where that is what was asked for."""
    if len(runtime.participants()) > 1 and backend not in _warned:
        _warned.add(backend)
        sys.stderr.write(ALONE.format(backend=backend))


# -- JAX -------------------------------------------------------------------------------------------------------------


class Alike:
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

        if not whole() or rng_utils.get_random_seed() is not None:  # keras.utils.set_random_seed, by the user
            return random.randint(low, high)
        if runtime.run_number() != self._run:
            self._run = runtime.run_number()
            self._stream = random.Random(f"{self._seed} {self._run}")
        return self._stream.randint(low, high)


def draw_alike(seed: int) -> None:
    """From now on Keras draws the same seeds on all ranks; `seed` is known to all of them."""
    from keras.src.random import seed_generator

    if hasattr(seed_generator, "python_random"):
        seed_generator.python_random = Alike(seed)


@contextlib.contextmanager
def around_jax_run() -> Iterator[None]:
    """In a run of some ranks Keras keeps to their own devices; what is on the mesh of all waits for the others for ever."""
    import keras

    mesh = keras.distribution.distribution()
    if mesh is None or whole():
        yield
        return
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(mesh)


def whole() -> bool:
    """Whether all ranks take part in the run."""
    return len(runtime.participants()) == runtime.instance_info().world_size


def on_whole_mesh(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a model, refused where the model is on the mesh of all ranks and not all of them take part.

    Raises:
        RuntimeError: who takes part, and what to do.
    """

    @functools.wraps(plain)
    def guarded(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not whole() and any(not getattr(v.value, "is_fully_addressable", True) for v in model.variables):
            part = len(runtime.participants())
            raise RuntimeError(
                f"this model is on the devices of all {runtime.instance_info().world_size} ranks, and only {part} "
                f"take{'s' * (part == 1)} part in this run: {plain.__name__} it on all of them, or make it in this run"
            )
        return plain(model, *args, **kwargs)

    return guarded


def jax_callback() -> Any:
    """Checks before training that all ranks will do the same number of steps; None where they train apart, with a word."""
    import jax
    import keras

    if jax.process_count() == 1 or not whole():
        warn_alone("jax")
        return None

    class Together(keras.callbacks.Callback):  # type: ignore[misc]
        data: Any = None

        def on_train_begin(self, logs: Any = None) -> None:
            same(self.params.get("steps"), self.data)

    return Together()


def same(steps: int | None, data: Any) -> None:
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
