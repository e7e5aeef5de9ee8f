"""Who is in a process group, and what its members tell each other before user code uses it: tensors, never pickles.

torch's store knows no secret: whoever reaches its port can register as a rank. The ranks of a pool have one, from the control channel, and
each shows that it knows it before anything is sent through a new group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

from skymagic.plugins._torch import backends
from skymagic.runtime import rendezvous

PROOF_BYTES = 32


def verify(secret: str, rank: int) -> None:
    """Compare what each member of the default group sends with what a rank of this pool must send.

    Args:
        secret: known to the ranks of this pool, new for each group.
        rank: of this process.

    Raises:
        RuntimeError: names the ranks in whose place somebody else has joined.
    """
    import torch
    import torch.distributed as dist

    all_gather, _ = _collectives()
    device = _device()
    size = dist.get_world_size()
    received = [torch.empty(PROOF_BYTES, dtype=torch.uint8, device=device) for _ in range(size)]
    all_gather(received, torch.tensor(_proof(secret, rank), dtype=torch.uint8, device=device))
    strangers = [number for number in range(size) if received[number].tolist() != _proof(secret, number)]
    if strangers:
        raise RuntimeError(
            f"the process group has a stranger in place of rank {', '.join(map(str, strangers))}: another process has joined "
            "through torch's store, which knows no password; the group is not used. Try %sky_restart, and ask who else is on this machine"
        )


def tell_all(pairs: Sequence[tuple[str, str]]) -> list[dict[int, int]]:
    """What each rank of the default group tells: name → value, both as digests. Each rank takes part, also with no pairs."""
    import torch
    import torch.distributed as dist

    all_gather, all_reduce = _collectives()
    device = _device()
    size = dist.get_world_size()
    count = torch.tensor([len(pairs)], device=device)
    all_reduce(count, dist.ReduceOp.MAX)
    rows = [[digest(name), digest(value)] for name, value in pairs]
    mine = torch.tensor(rows + [[-1, -1]] * (int(count.item()) - len(rows)), dtype=torch.int64, device=device)
    if not mine.numel():
        return [{} for _ in range(size)]
    received = [torch.empty_like(mine) for _ in range(size)]
    all_gather(received, mine)
    return [{name: value for name, value in table.tolist() if name >= 0} for table in received]


def highest(value: int) -> int:
    """The highest of all ranks' values; each rank takes part."""
    import torch
    import torch.distributed as dist

    _, all_reduce = _collectives()
    found = torch.tensor([value], device=_device())
    all_reduce(found, dist.ReduceOp.MAX)
    return int(found.item())


@cache
def _collectives() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch's all_gather and all_reduce as they were at the rank's start: a cell may put others in their place."""
    import torch.distributed as dist

    return _waiting(dist.all_gather), _waiting(dist.all_reduce)


def _waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with rendezvous.waiting():
            return collective(*args)

    return call


def digest(text: str) -> int:
    """63 bits that stand for a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _proof(secret: str, rank: int) -> list[int]:
    return list(blake2b(f"rank {rank}".encode(), key=secret.encode()[:64], digest_size=PROOF_BYTES).digest())


def _device() -> Any:
    """Where the tensors of the default group's collectives lie: always somewhere, or a stranger would pass without a proof.

    ``get_backend()`` answers ``"cpu:gloo,cuda:nccl"``, or ``"undefined"``; what serves which device is in the configuration.
    """
    import torch
    import torch.distributed as dist

    return torch.device(backends.device_for_talk(backends.legs(str(dist.get_backend_config()))))
