"""This rank's GPU as torch uses it: an error belongs to the cell that caused it, and memory of a failed cell is freed.

torch is not imported here, and its CUDA is not initialised: only what a cell has done is looked at.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Mapping
from typing import Any

LOST = (
    "CUDA cannot be used in this process any more: the rank is replaced, and its variables are lost"
)
RECORDED = "_dump_nccl_trace_json"
NCCL = "torch/distributed/nccl"
"""Stands for a file in frames of collectives on GPUs, whose line is their number."""
LARGEST = 4
"""Variables that are named when a GPU's memory is full."""


def in_use() -> bool:
    """Whether this process uses a GPU through torch, whose groups can be aborted. Safe on any thread."""
    return _cuda() is not None


def synchronize() -> None:
    """Wait for the kernels that a cell has launched. Raises the error of one of them, as CUDA tells it to the next call."""
    if (cuda := _cuda()) is not None:
        cuda.synchronize()


def free_memory() -> None:
    """Free on the GPU what nothing refers to any more, for other processes, too."""
    if (cuda := _cuda()) is not None or "jax" in sys.modules:
        gc.collect()  # takes half a second where torch is imported, and would hold up the next cell
    if cuda is not None:
        with contextlib.suppress(Exception):  # its context is lost
            cuda.empty_cache()


def lost(problem: BaseException | None) -> bool:
    """Whether an error has taken the process's CUDA context with it, so that each later call fails alike.

    A device assert and an illegal access do, "out of memory" and an argument that is refused do not.
    """
    torch, cuda = sys.modules.get("torch"), _cuda()
    if torch is None or cuda is None or not _is_cuda_error(torch, problem):
        return False
    try:
        cuda.current_stream().query()  # does not wait, unlike synchronize(), where a kernel of NCCL may wait for other ranks
    except Exception:
        return True
    return False


def explain(problem: BaseException | None, variables: Mapping[str, Any]) -> str:
    """What to add to an error of the GPU: whose memory it is that is full, or that the rank is replaced. Empty for others."""
    torch, cuda = sys.modules.get("torch"), _cuda()
    if torch is None or cuda is None or problem is None:
        return ""
    if isinstance(problem, torch.OutOfMemoryError):
        with contextlib.suppress(Exception):
            return _whose_memory(cuda, variables)
        return ""
    return LOST if lost(problem) else ""


def with_collective(stack: dict[str, Any]) -> dict[str, Any]:
    """A stack, with the oldest of NCCL's collectives that have not ended as its innermost frame.

    The main thread has only launched it, and waits for the GPU at some later line. By torch's flight recorder, which the plugin turns on.
    """
    dump = getattr(
        getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None),
        RECORDED,
        None,
    )
    if dump is None or not stack["busy"] or _cuda() is None:
        return stack
    with contextlib.suppress(Exception):  # another version of torch writes another text
        entries = json.loads(dump(includeCollectives=True, onlyActive=True))["entries"]
        oldest = next(each for each in entries if each["state"] != "completed")
        name = str(oldest["profiling_name"]).rpartition(":")[2]
        frame = {
            "file": NCCL,
            "line": int(oldest["collective_seq_id"]),
            "name": name,
            "library": True,
        }
        return {**stack, "frames": [*stack["frames"], frame]}
    return stack


def _is_cuda_error(torch: Any, problem: BaseException | None) -> bool:
    if problem is None or isinstance(problem, torch.OutOfMemoryError):
        return False
    kinds = getattr(torch, "AcceleratorError", ())
    return isinstance(problem, kinds) or (
        isinstance(problem, RuntimeError) and "CUDA error" in str(problem)
    )


def _whose_memory(cuda: Any, variables: Mapping[str, Any]) -> str:
    free, total = cuda.mem_get_info()
    tensors, reserved = cuda.memory_allocated(), cuda.memory_reserved()
    others = max(total - free - reserved, 0)
    text = (
        f"of this GPU's {_gb(total)}, this rank's tensors have {_gb(tensors)}, torch keeps {_gb(reserved - tensors)} for more, "
        f"other processes and CUDA itself have {_gb(others)}, {_gb(free)} are free"
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
    """A variable's bytes on GPUs: a tensor's, a model's with its gradients, an optimizer's state."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        tensors = [value, value.grad if value.is_leaf else None]
    elif isinstance(value, torch.nn.Module):
        tensors = [
            *value.parameters(),
            *value.buffers(),
            *(each.grad for each in value.parameters()),
        ]
    elif isinstance(value, torch.optim.Optimizer):
        tensors = [
            each
            for state in value.state.values()
            for each in state.values()
            if isinstance(each, torch.Tensor)
        ]
    elif isinstance(value, list | tuple | dict) and len(value) <= 10_000:
        values = value.values() if isinstance(value, dict) else value
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
    else:
        return 0
    return sum(each.nbytes for each in tensors if each is not None and each.is_cuda)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _cuda() -> Any:
    """``torch.cuda``, where this process has used it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return cuda if cuda is not None and cuda.is_initialized() else None
    except Exception:  # a cell has broken it
        return None
