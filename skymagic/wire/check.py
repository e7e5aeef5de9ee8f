"""The protocol of checking a node: what it has and how it is, and its clock.

notebook                                  node
SurveyNode                           →
                                     ←    NodeSurvey
ReadClock                            →    several times; the shortest answer counts
                                     ←    NodeClock
"""

from __future__ import annotations

from skymagic.wire.codec import Codec, FrozenMessage


class CheckMessage(FrozenMessage):
    """Base of this protocol's messages."""


class SurveyNode(CheckMessage):
    """What is there?"""


class NodeSurvey(CheckMessage):
    """What a node says of itself."""

    gpus: str = ""
    """What nvidia-smi lists, a line of `GPU_FIELDS` for each GPU; "" where there is no nvidia-smi."""
    complaint: str = ""
    """What nvidia-smi has said instead of a list."""
    processes: dict[str, list[int]] | None = None
    """Processes that use a GPU: pid → the pids of those that have started it, the nearest first; None where nobody tells."""
    kernel: list[str] | None = None
    """Lines of the kernel's log on errors of GPUs (Xid); None where it may not be read."""
    efa: bool = False
    """Whether it has network cards of the kind EFA and no plugin by which NCCL uses them."""
    disk_free: int = 0
    """Bytes of the file system of the user's home."""


class ReadClock(CheckMessage):
    """What time is it?"""


class NodeClock(CheckMessage):
    """Seconds since 1970, as the node has them."""

    time: float


GPU_FIELDS = (
    "index", "name", "driver_version", "memory.used", "utilization.gpu", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
"""What nvidia-smi is asked for, in this order; all drivers of these ten years know these."""

CODEC: Codec[CheckMessage] = Codec(*CheckMessage.__subclasses__(), max_line=4 << 20)
encode, messages = CODEC.encode, CODEC.messages
