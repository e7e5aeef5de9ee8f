"""Report the progress of libraries' trainers: transformers' Trainer, Lightning's, Keras's ``fit``.

Each library gets one of our callbacks when a cell imports it. None of them is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

from skymagic.runtime.on_import import when_imported, wraps
from skymagic.runtime.reporting import RESERVED, report

INTERVAL, SHARE = 0.5, 0.01
"""Longest time in seconds between two reads of numbers that may wait for a GPU, and the largest
share of the time that these reads may take.
"""
TIMINGS = re.compile(r"_(runtime|per_second|preparation_time)$|^total_flos$")
"""Matches what transformers logs about an evaluation besides its result."""
LIGHTNING = (
    "lightning.pytorch.trainer.connectors.callback_connector",
    "pytorch_lightning.trainer.connectors.callback_connector",
)
"""Modules where Lightning's ``Trainer`` chooses its callbacks."""


def report_progress(
    step: float, total: float | None, numbers: Mapping[str, object] | None = None
) -> None:
    """Report a library's progress.

    Values that cannot be reported are left out, because the training must continue.
    """
    reportable = {
        str(name): value for name, value in (numbers or {}).items() if name not in RESERVED
    }
    reportable = {
        name: value
        for name, value in reportable.items()
        if not isinstance(value, str) and _is_scalar(value)
    }
    with contextlib.suppress(TypeError, ValueError):
        report(step=step, total=total if total and 0 < total < float("inf") else None, **reportable)


def _is_scalar(value: Any) -> bool:
    count = getattr(value, "numel", None)
    return isinstance(value, int | float) or (
        hasattr(value, "item") and (not callable(count) or count() == 1)
    )


# -- transformers ----------------------------------------------------------------------------------


@functools.cache  # Once per process: the plugins of torch and huggingface may both be active.
def adapt_transformers() -> None:
    """Let each ``Trainer`` report its steps and logs."""
    when_imported("transformers.trainer", _trainer)


def _trainer(module: types.ModuleType) -> None:
    class TransformersReport(module.TrainerCallback):  # type: ignore[misc, name-defined]
        """Callback that reports to skymagic's notebook."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            report_progress(state.global_step, state.max_steps)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            metrics = {
                name: value for name, value in (logs or {}).items() if not TIMINGS.search(name)
            }
            report_progress(state.global_step, state.max_steps, metrics)

    module.DEFAULT_CALLBACKS.append(TransformersReport)


# -- Lightning -------------------------------------------------------------------------------------


@functools.cache
def adapt_lightning() -> None:
    """Let each of Lightning's ``Trainer`` report its steps and what its modules log."""
    for module in LIGHTNING:
        when_imported(module, _lightning)


def _lightning(module: types.ModuleType) -> None:
    class LightningReport(module.Callback):  # type: ignore[misc, name-defined]
        """Callback that reports to skymagic's notebook."""

        total: float | None = None
        looked = wait = 0.0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.total = None
            # A dataset may have no length.
            with contextlib.suppress(Exception):
                self.total = float(trainer.estimated_stepping_batches)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.report_step(trainer, look=time.monotonic() - self.looked >= self.wait)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.state.fn == "fit" and not trainer.sanity_checking:
                self.report_step(trainer)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.report_step(trainer)

        def report_step(self, trainer: Any, *, look: bool = True) -> None:
            report_progress(trainer.global_step, self.total)
            if look:
                start = time.monotonic()
                report_progress(trainer.global_step, self.total, trainer.callback_metrics)
                self.looked = time.monotonic()
                # The slower the read, the longer the pause before the next one.
                self.wait = min(INTERVAL, (self.looked - start) / SHARE)

    connector = module._CallbackConnector
    plain = connector.on_trainer_init

    @wraps(plain)
    def on_trainer_init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.trainer.callbacks.insert(0, LightningReport())

    connector.on_trainer_init = on_trainer_init


# -- Keras -----------------------------------------------------------------------------------------


def keras_fit(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fit`` with a reporting callback at the end of the list."""
    signature = inspect.signature(plain)

    @wraps(plain)
    def fit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        # Reading each batch's numbers waits for them, as Keras's own progress bar does. If the bar
        # is off, read them after each epoch.
        quiet = bound.arguments.get("verbose") in (0, "0")
        with_callback(bound, _keras_callback(each_batch=not quiet))
        return plain(*bound.args, **bound.kwargs)

    return fit


def with_callback(bound: inspect.BoundArguments, callback: Any) -> None:
    """Append a callback to those of a call of ``fit``."""
    callbacks = bound.arguments.get("callbacks")
    # Keras's CallbackList is not a list, but can be appended to.
    if callbacks is not None and hasattr(callbacks, "append") and not isinstance(callbacks, list):
        callbacks.append(callback)
        return
    listed = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    bound.arguments["callbacks"] = [callback for callback in listed if callback is not None] + [
        callback
    ]


def _keras_callback(*, each_batch: bool) -> Any:
    import keras

    class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
        """Callback that reports to skymagic's notebook after each epoch."""

        done = 0
        first: int | None = None

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.first = epoch if self.first is None else self.first

        @property
        def total(self) -> int | None:
            steps, epochs = self.params.get("steps"), self.params.get("epochs")
            return steps * (epochs - (self.first or 0)) if steps and epochs else None

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if not each_batch:
                self.done += self.params.get("steps") or 1
            report_progress(self.done, self.total, logs)

    class Batches(Epochs):
        """Callback that also reports after each batch."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.done += 1
            report_progress(self.done, self.total, logs)

    return Batches() if each_batch else Epochs()
