"""This rank's GPU as torch uses it: errors are attributed to cells, and failed cells free memory.

This module never imports torch and never initializes CUDA: it only inspects state that a cell has
created.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skymagic.wire.queries import Stack, StackFrame

LOST = (
    "CUDA cannot be used in this process any more: the rank is replaced, and its variables are lost"
)
RECORDED = "_dump_nccl_trace_json"
NCCL = "torch/distributed/nccl"
"""Pseudo file name in frames of collectives on GPUs; their line is the collective's number."""
LARGEST = 4
"""Number of variables named when a GPU's memory is full."""


def in_use() -> bool:
    """Return True if this process uses a GPU through torch, whose groups can be aborted.

    Safe on any thread.
    """
    return _cuda() is not None


def synchronize() -> None:
    """Wait for the kernels that a cell has launched, and raise their error.

    CUDA reports the error of a kernel on the next call.
    """
    if (cuda := _cuda()) is not None:
        cuda.synchronize()


def free_memory() -> None:
    """Free unreferenced memory on the GPU, so that other processes can use it."""
    if (cuda := _cuda()) is not None or "jax" in sys.modules:
        gc.collect()  # takes half a second once torch is imported, and would delay the next cell
    if cuda is not None:
        with contextlib.suppress(Exception):  # fails if the CUDA context is lost
            cuda.empty_cache()


def is_device_lost(problem: BaseException | None) -> bool:
    """Return True if an error destroyed the process's CUDA context, so that all later calls fail.

    A device assert and an illegal access do that; "out of memory" and a refused argument do not.
    """
    torch, cuda = sys.modules.get("torch"), _cuda()
    if torch is None or cuda is None or not _is_cuda_error(torch, problem):
        return False
    try:
        # does not wait, unlike synchronize(): a kernel of NCCL may wait for other ranks
        cuda.current_stream().query()
    except Exception:
        return True
    return False


def explain_cuda_error(problem: BaseException | None, variables: Mapping[str, Any]) -> str:
    """Return an explanation to add to an error of the GPU, or "".

    It describes the use of full memory, or announces that the rank is replaced.
    """
    torch, cuda = sys.modules.get("torch"), _cuda()
    if torch is None or cuda is None or problem is None:
        return ""
    if isinstance(problem, torch.OutOfMemoryError):
        with contextlib.suppress(Exception):
            return _memory_owners(cuda, variables)
        return ""
    return LOST if is_device_lost(problem) else ""


def with_collective(stack: Stack) -> Stack:
    """Add the oldest unfinished NCCL collective to a stack, as its innermost frame.

    The main thread has only launched it, and waits for the GPU at some later line. The data comes
    from torch's flight recorder, which the plugin turns on.
    """
    dump = getattr(
        getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None),
        RECORDED,
        None,
    )
    if dump is None or not stack.busy or _cuda() is None:
        return stack
    with contextlib.suppress(Exception):  # other versions of torch may write another format
        entries = json.loads(dump(includeCollectives=True, onlyActive=True))["entries"]
        oldest = next(entry for entry in entries if entry["state"] != "completed")
        name = str(oldest["profiling_name"]).rpartition(":")[2]
        frame = StackFrame(name, int(oldest["collective_seq_id"]), NCCL, is_library=True)
        return replace(stack, frames=(*stack.frames, frame))
    return stack


def _is_cuda_error(torch: Any, problem: BaseException | None) -> bool:
    if problem is None or isinstance(problem, torch.OutOfMemoryError):
        return False
    kinds = getattr(torch, "AcceleratorError", ())
    return isinstance(problem, kinds) or (
        isinstance(problem, RuntimeError) and "CUDA error" in str(problem)
    )


def _memory_owners(cuda: Any, variables: Mapping[str, Any]) -> str:
    free, total = cuda.mem_get_info()
    tensors, reserved = cuda.memory_allocated(), cuda.memory_reserved()
    other_bytes = max(total - free - reserved, 0)
    text = (
        f"of this GPU's {_gb(total)}, this rank's tensors have {_gb(tensors)}, "
        f"torch keeps {_gb(reserved - tensors)} for more, "
        f"other processes and CUDA itself have {_gb(other_bytes)}, {_gb(free)} are free"
    )
    sizes = {
        name: size
        for name, value in variables.items()
        if not name.startswith("_") and (size := _nbytes(value))
    }
    largest = sorted(sizes, key=lambda name: -sizes[name])[:LARGEST]
    return (
        f"{text}; largest variables: {', '.join(f'{name} {_gb(sizes[name])}' for name in largest)}"
        if largest
        else text
    )


def _nbytes(value: Any) -> int:
    """Return a variable's bytes on GPUs: a tensor's, a model's with gradients, an optimizer's."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        # torch warns about reading the gradient of a tensor that is no leaf
        tensors = [value, value.grad if value.is_leaf else None]
    elif isinstance(value, torch.nn.Module):
        tensors = [
            *value.parameters(),
            *value.buffers(),
            *(item.grad for item in value.parameters()),
        ]
    elif isinstance(value, torch.optim.Optimizer):
        tensors = [
            item
            for state in value.state.values()
            for item in state.values()
            if isinstance(item, torch.Tensor)
        ]
    elif isinstance(value, list | tuple | dict) and len(value) <= 10_000:
        values = value.values() if isinstance(value, dict) else value
        tensors = [item for item in values if isinstance(item, torch.Tensor)]
    else:
        return 0
    return sum(item.nbytes for item in tensors if item is not None and item.is_cuda)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _cuda() -> Any:
    """Return ``torch.cuda`` if this process has used it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return cuda if cuda is not None and cuda.is_initialized() else None
    except Exception:  # a cell may have broken it
        return None
