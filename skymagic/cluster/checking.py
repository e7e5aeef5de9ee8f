"""Check all nodes of a pool at once with `skymagic.kernels.check`; `health` judges the reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from skymagic.cluster.health import Findings, Health, gpus, xids
from skymagic.cluster.nodes import Node
from skymagic.wire import check as wire
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
        # Also closes nodes that have not answered: their threads are blocked in a read.
        run_all([transport.close for transport in opened], timeout=TIMEOUT)
    health = tuple(
        report if isinstance(report, Health) else _unreached(node, report)
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
    replies = wire.messages(transport.read, noise=True)

    def ask(request: wire.CheckMessage) -> wire.CheckMessage:
        transport.write(wire.encode(request))
        return next(replies)[0]

    survey = ask(wire.SurveyNode())
    assert isinstance(survey, wire.NodeSurvey)
    ahead, unsure = _clock(ask)
    return Health(
        node.name,
        gpus=gpus(survey.gpus),
        complaint=survey.complaint,
        xids=None if survey.kernel_log is None else xids(survey.kernel_log),
        disk_free=survey.disk_free,
        ahead=ahead,
        unsure=unsure,
    )


def _clock(ask: Callable[[wire.CheckMessage], wire.CheckMessage]) -> tuple[float, float]:
    """Return how far the node's clock is ahead, in seconds, and the error bound, as in NTP.

    The fastest answer counts.
    """
    readings = []
    for _ in range(CLOCK_READINGS):
        start, clock = time.monotonic(), time.time()
        reply = ask(wire.ReadClock())
        half = (time.monotonic() - start) / 2
        assert isinstance(reply, wire.NodeClock)
        readings.append((half, reply.time - (clock + half)))
    unsure, ahead = min(readings)
    return ahead, unsure


def _unreached(node: Node, problem: BaseException) -> Health:
    logger.warning("node not checked: node=%s problem=%s", node.name, type(problem).__name__)
    first = (str(problem).splitlines() or [""])[0]
    return Health(node.name, unreached=first or type(problem).__name__)
