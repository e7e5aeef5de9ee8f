"""Protocol for checking a node: its GPUs, its kernel's log, its disk and its clock.

notebook                                  node
SurveyNode                           →
                                     ←    NodeSurvey
ReadClock                            →    several times; the shortest answer counts
                                     ←    NodeClock
"""

from __future__ import annotations

from skymagic.wire.codec import Codec, FrozenMessage

# Volatile errors are those since the driver was loaded; aggregate ones would include errors from
# before a repair.
GPU_FIELDS = ("index", "name", "driver_version", "ecc.errors.uncorrected.volatile.total")
"""Fields queried from nvidia-smi, in this order."""


class CheckMessage(FrozenMessage):
    """Base of this protocol's messages."""


class SurveyNode(CheckMessage):
    """Ask for a `NodeSurvey`."""


class NodeSurvey(CheckMessage):
    """State of a node, as reported by its own programs."""

    gpus: str = ""
    """Output of nvidia-smi, one line of `GPU_FIELDS` per GPU; "" if nvidia-smi is not installed."""
    complaint: str = ""
    """Output of nvidia-smi when it is not a list of GPUs."""
    kernel_log: list[str] | None = None
    """Lines of the kernel's log about GPU errors (Xid); None if this user may not read it."""
    disk_free: int = 0
    """Bytes free in the file system of the user's home."""


class ReadClock(CheckMessage):
    """Ask for a `NodeClock`."""


class NodeClock(CheckMessage):
    """Seconds since 1970 by the node's clock."""

    time: float


CODEC: Codec[CheckMessage] = Codec(*CheckMessage.__subclasses__(), max_line=4 << 20)
encode, messages = CODEC.encode, CODEC.messages
