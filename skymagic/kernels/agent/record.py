"""The agent's record on disk: what it serves, since when it is at work, and whether its notebook is there."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import skymagic
from skymagic.plan.limits import Lifetime
from skymagic.wire import agent as wire
from skymagic.wire.processes import boot_id
from skymagic.wire.record import RECORD, AgentRecord, identity

CODE = Path(skymagic.__file__).parents[1]
"""The folder that skymagic is imported from."""
WRITE_INTERVAL = 1.0
"""Seconds between two writes: cells may follow each other faster."""


class RecordFile:
    """Owns the file. A folder that cannot be written keeps no record, and says nothing.

    Args:
        path: where it is; None for an agent that ends with its notebook, which nobody needs to find.
        spec: what the agent was told.
    """

    def __init__(self, path: str | None, spec: wire.AgentSpec) -> None:
        self.path = None if path is None else Path(path)
        self._identity = identity()
        self._written_at = float("-inf")
        self._state: tuple[bool, bool, Mapping[int, int]] = (False, False, {})
        self.due: float | None = None
        """When it is to be written again (monotonic seconds); None while it is up to date."""
        now = time.time()
        self._record = AgentRecord(
            version=spec.version, pool=spec.pool, job_id=spec.job_id, node=spec.node, nodes=spec.nodes, client=spec.client,
            hostname=socket.gethostname(), boot=boot_id(), pid=os.getpid(), started=now, idle_since=now,
            devices=spec.devices, uses=used() if path else (), idle_timeout=spec.idle_timeout, max_lifetime=spec.max_lifetime, detached_timeout=spec.detached_timeout,
        )  # fmt: skip
        if self.path is not None:
            self._write(self.path)

    def update(self, lifetime: Lifetime, pids: Callable[[], Mapping[int, int]]) -> None:
        """Note what has changed, and write it if the last time is long enough ago.

        Args:
            pids: gives rank → process id.
        """
        if self.path is None:
            return
        busy, away, ranks = lifetime.busy, lifetime.away, pids()
        if (busy, away, ranks) != self._state:
            now = time.time()
            was_busy, was_away, _ = self._state
            record = replace(self._record, ranks={str(rank): pid for rank, pid in ranks.items()})
            if busy != was_busy:
                record = replace(record, busy_since=now if busy else 0.0, idle_since=0.0 if busy else now)
            if away != was_away:
                record = replace(record, away_since=now if away else 0.0)
            self._record = record
            self._state = busy, away, dict(ranks)
            self.due = self._written_at + WRITE_INTERVAL
        if self.due is not None and time.monotonic() >= self.due:
            self._write(self.path)

    def _write(self, path: Path) -> None:
        self._written_at, self.due = time.monotonic(), None
        part = path.with_suffix(".part")
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(f"{self._identity}\n".encode() + RECORD.encode(self._record))
            part.replace(path)


def used() -> tuple[str, ...]:
    """The folders that this process needs. What skymagic has made of them is marked as used now."""
    prefix = Path(sys.prefix)
    marks = [prefix / ".ready"] if prefix.parent.name == "env" else []
    marks += [CODE] if CODE.parent.name == "code" else []
    for mark in marks:
        with contextlib.suppress(OSError):
            os.utime(mark)
    return (str(prefix), str(CODE))
