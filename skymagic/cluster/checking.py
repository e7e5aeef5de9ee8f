"""Check all nodes of a pool at once with `skymagic.kernels.check`; `health` judges the reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from skymagic.cluster.health import Findings, Health, gpus, xids
from skymagic.cluster.nodes import Node
from skymagic.wire import check as check_wire
from skymagic.wire import processes
from skymagic.wire.codec import Transport
from skymagic.wire.threads import run_all

logger = logging.getLogger(__name__)
CLOCK_READINGS = 5
TIMEOUT = 60.0
"""Seconds for the reports of all nodes."""


def check(
    nodes: Sequence[Node],
    *,
    expected: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Findings:
    """Check nodes without changing anything on them.

    Args:
        expected: GPUs that each node should have.
        say: called with a line when the check begins.
    """
    say(f"looking at {', '.join(node.name for node in nodes)} …")
    opened: list[Transport] = []
    try:
        reports = run_all([partial(_check_node, node, opened) for node in nodes], timeout=TIMEOUT)
    finally:
        # Also close the transports of nodes that have not answered, whose threads are blocked in a
        # read.
        run_all([transport.close for transport in opened], timeout=TIMEOUT)
    health = tuple(
        report if isinstance(report, Health) else _unreachable(node, report)
        for node, report in zip(nodes, reports, strict=True)
    )
    return Findings(health, expected)


def _check_node(node: Node, opened: list[Transport]) -> Health:
    """Check one node over a transport that the caller closes.

    Raises:
        OSError, EOFError, HostError: the node is gone.
    """
    transport = node.run(processes.CHECK)
    opened.append(transport)
    replies = check_wire.messages(transport.read, noise=True)

    def ask(request: check_wire.CheckMessage) -> check_wire.CheckMessage:
        transport.write(check_wire.encode(request))
        return next(replies)[0]

    survey = ask(check_wire.SurveyNode())
    assert isinstance(survey, check_wire.NodeSurvey)
    clock_offset, clock_error = _clock(ask)
    return Health(
        node.name,
        gpus=gpus(survey.gpus),
        complaint=survey.complaint,
        xids=None if survey.kernel_log is None else xids(survey.kernel_log),
        disk_free=survey.disk_free,
        clock_offset=clock_offset,
        clock_error=clock_error,
    )


def _clock(
    ask: Callable[[check_wire.CheckMessage], check_wire.CheckMessage],
) -> tuple[float, float]:
    """Return how far the node's clock is ahead, in seconds, and the error bound, as in NTP.

    Uses the fastest reply, whose error bound is the smallest.
    """
    readings = []
    for _ in range(CLOCK_READINGS):
        start, clock = time.monotonic(), time.time()
        reply = ask(check_wire.ReadClock())
        half = (time.monotonic() - start) / 2
        assert isinstance(reply, check_wire.NodeClock)
        readings.append((half, reply.time - (clock + half)))
    error, offset = min(readings)
    return offset, error


def _unreachable(node: Node, problem: BaseException) -> Health:
    logger.warning("node not checked: node=%s problem=%s", node.name, type(problem).__name__)
    first_line = (str(problem).splitlines() or [""])[0]
    return Health(node.name, unreached=first_line or type(problem).__name__)
