"""Keras on torch: each step's gradients are averaged over the ranks before an optimizer applies them.

As DDP does it, also in training loops of the user's own. A rank that has fewer batches than others goes on averaging,
with nothing to add, until all have ended their epoch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from skymagic.runtime import info


def together() -> bool:
    """Whether there is a process group of several ranks, and all of them take part in the run."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return False
    return dist.get_world_size() > 1 and info.everyone()


class GradientAverager:
    """Averages gradients over the ranks before an optimizer applies them."""

    def __init__(self) -> None:
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
        torch.zeros(value.numel(), dtype=dtype, device=device) if grad is None else grad.detach().reshape(-1).to(dtype)
        for grad, value in zip(grads, values, strict=True)
    ]
    marks = torch.tensor([float(grad is not None) for grad in grads] + [float(active)], dtype=dtype, device=device)
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


def callback(averager: GradientAverager) -> Any:
    """What `fit` does beside training where ranks train together; None where they do not."""
    import keras
    import torch
    import torch.distributed as dist

    if not together():
        return None

    class Synchronization(keras.callbacks.Callback):  # type: ignore[misc]
        data: Any = None

        def on_train_begin(self, logs: Any = None) -> None:
            broadcast(self.model.non_trainable_variables)
            averager.begin(self.model.optimizer, self.model.trainable_variables)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            averager.finish_epoch(self.model)
            device = self.model.trainable_variables[0].value.device if self.model.trainable_variables else "cpu"
            stop = torch.tensor([float(self.model.stop_training)], device=device)
            dist.all_reduce(stop, dist.ReduceOp.MAX)  # one that stops early stops all
            self.model.stop_training = bool(stop.item())

        def on_train_end(self, logs: Any = None) -> None:
            broadcast(self.model.non_trainable_variables)  # as DDP's buffers: rank 0's

    return Synchronization()
