"""Output of ranks, as their agent sends it to the notebook.

The agent numbers what a run shows (`Output.seq`), keeps the beginning and the end of it, and sends
it to the notebook that started the run, or to one that follows it. The notebook acknowledges what
it has shown (`wire.agent.Shown`); a notebook that follows the run gets the rest.
"""

from __future__ import annotations

from dataclasses import KW_ONLY

from skymagic.wire.codec import FrozenMessage
from skymagic.wire.metrics import MetricBatch
from skymagic.wire.typed import JsonObject


class AgentMessage(FrozenMessage):
    """Base of the messages between agents and their notebook, forkserver and ranks."""


class Output(AgentMessage):
    """Base: a piece of a rank's output in a run."""

    rank: int
    _: KW_ONLY
    request: str = ""
    """Identity of the request that caused it."""
    seq: int = 0
    """Number of the piece in the run's output, from 1; 0 for pieces that are not numbered."""
    cost: int = 0
    """Credit that it takes on the link (`wire.agent.Credit`)."""


class OutputText(Output):
    """Text of a standard stream."""

    name: str
    """"stdout" or "stderr"."""
    text: str


class OutputDisplay(Output):
    """Rich output."""

    kind: str
    """Type of Jupyter's message, such as ``display_data`` or ``clear_output``."""
    content: JsonObject
    """Jupyter's content of such a message."""

    @property
    def display_id(self) -> str:
        """Id under which the display can be updated, or ""."""
        return str((self.content.get("transient") or {}).get("display_id", ""))


class OutputNote(Output):
    """A line by skymagic itself."""

    text: str


class OutputMetrics(Output):
    """Numbers that the rank reported (`wire.metrics`)."""

    batches: tuple[MetricBatch, ...]
    dropped: int = 0
    """Number of older rows that were dropped while the notebook was away."""


class OutputSuppressed(Output):
    """Text that is only in the rank's log."""

    nbytes: int


class OutputMissed(Output):
    """Displays that were dropped while the notebook was away."""

    count: int


class OutputRepeated(Output):
    """The output that comes next may have been shown by an earlier notebook.

    That notebook got it, and ended without having acknowledged it.
    """

    lines: int
    displays: int


class OutputComplete(Output):
    """End of the rank's output in the run."""
