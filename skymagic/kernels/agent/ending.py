"""The end of ranks that nobody has asked for: the agent is signalled, EC2 takes the machine, or their notebook stays away for too long.

A signal, as Slurm, systemd and a logout send it; ranks that have an `on_interruption` hook run it first::

    SIGTERM ─▶ agent ─▶ Interruption ─▶ ranks     at once, where no rank has a hook
               agent ◀─ HookEnded    ◀─ ranks     then the agent ends; also once time is up, or at a second signal

Slurm signals all processes of a job: the notebook may be gone before the agent has heard, and the ranks may have heard themselves. Some time
before a job's limit it sends SIGURG (``sbatch --signal=URG@120``), which whatever does not expect it ignores: `SignalledEnd.warn`.

Notices of EC2 for spot instances are polled from the metadata service of the machine (IMDSv2), beside the event loop::

    PUT /latest/api/token                                        a session token, in the header of all that follows
    GET /latest/meta-data/spot/instance-action                   404, or {"action": "terminate", "time": "2017-09-18T08:22:00Z"}
    GET /latest/meta-data/events/recommendations/rebalance       404, or {"noticeTime": "2020-10-27T08:22:00Z"}

EC2 asks to look every 5 seconds; of the action it tells two minutes before, as a rule. The service answers on this machine alone, takes
no credentials, and costs no call of the API of EC2.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from types import FrameType

from skymagic.kernels.fork import EventLoop
from skymagic.plan.limits import Lifetime
from skymagic.plan.units import duration_text

SIGNALLED = 128
"""What a signal's number is added to, for the exit status of an agent that was ended by it."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""For ranks' hooks (``sbatch --signal=USR1@120``); agents outlive them."""
WARNING = signal.SIGURG
SLURM = "slurm:"
"""Begins how an agent is told to wait for it (`AgentSpec.notices`)."""
KILL_SECONDS = 30.0
"""Between Slurm's SIGTERM and its SIGKILL (KillWait)."""
HOOK_SECONDS = 26.0  # for which hooks are waited for: 25 of their own, and their last words
ABANDONED_SECONDS = 1.0
"""For which an agent whose notebook is gone waits for a signal of its own, where a rank has a hook."""


class SignalledEnd:
    """How an agent ends that is signalled.

    Args:
        woken: the agent's `signal_pipe`.
        hooks: rank → how many times its hook has ended, of the ranks that have one.
        notify: called on the loop with the reason, once: has the hooks called.
    """

    def __init__(
        self,
        loop: EventLoop,
        woken: int,
        hooks: Callable[[], dict[int, int]],
        notify: Callable[[str, float], None],
    ) -> None:
        self._woken, self._hooks, self._notify = woken, hooks, notify
        self._number = 0  # number of the signal
        self._before: dict[int, int] = {}
        self.due: float | None = None
        """Monotonic seconds at which it ends in any case; None while no hook is waited for."""
        self._lead = 0.0
        self._found: Callable[[Notice], None] | None = None
        loop.watch(woken, self._begin)
        for number in ENDING:
            signal.signal(number, self._on_signal)
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_IGN)

    def warn(self, lead: float, found: Callable[[Notice], None]) -> None:
        """Take `WARNING` as a notice that the job reaches its limit after so many seconds."""
        self._lead, self._found = lead, found
        signal.signal(WARNING, lambda number, frame: None)  # the loop wakes by the pipe

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self._number = self._number, number
        if again or not self._hooks():
            sys.exit(SIGNALLED + number)

    def _begin(self) -> None:
        if WARNING in os.read(self._woken, 4096) and self._found is not None:
            self._found(Notice("Slurm ends the job at its time limit", time.time() + self._lead))
        if not self._number or self.due is not None:
            return
        self._before = self._hooks()
        self.due = time.monotonic() + HOOK_SECONDS
        self._notify(f"{signal.Signals(self._number).name} has come", time.time() + KILL_SECONDS)

    def end_if_over(self, now: float) -> None:
        """Raise SystemExit once all hooks have run, or their time is up."""
        if self.due is None:
            return
        after = self._hooks()
        if now >= self.due or all(after.get(rank) != ended for rank, ended in self._before.items()):
            sys.exit(SIGNALLED + self._number)

    def close(self) -> None:
        """From here on signals end it at once."""
        for number in ENDING:
            signal.signal(number, lambda number, _: sys.exit(SIGNALLED + number))


GRACE = 30.0
"""Seconds that ranks have to end their cell once they are interrupted."""


class UnattendedRuns:
    """Interrupts ranks, once for each time that the notebook is away, and kills those that go on.

    Args:
        lifetime: knows who is at work, and when that is to end.
        limit: seconds, for the line that says so.
        note: shows a line of skymagic's own with what a rank shows.
        send: sends a signal to a rank.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        limit: float,
        note: Callable[[int, str], None],
        send: Callable[[int, int], None],
    ) -> None:
        self._lifetime, self._limit, self._note, self._send = lifetime, limit, note, send
        self._interrupted: dict[int, float] = {}
        """Rank → when it is killed, of those that were interrupted and are at work still."""

    @property
    def due(self) -> float | None:
        """When something is to be done next (monotonic seconds)."""
        if self._interrupted:
            return min(
                (when for when in self._interrupted.values() if when < math.inf), default=None
            )
        return self._lifetime.runs_end

    def stop_if_due(self, now: float) -> None:
        """Stop what has no more time; a notebook that comes back leaves the rest to its own stop button."""
        end, working = self._lifetime.runs_end, self._lifetime.working
        if end is None:
            self._interrupted.clear()
            return
        self._interrupted = {
            rank: when for rank, when in self._interrupted.items() if rank in working
        }
        if not self._interrupted and now >= end:
            self._interrupted = dict.fromkeys(working, now + GRACE)
            for rank in working:
                text = duration_text(self._limit)
                self._note(rank, f"stopped after {text} without its notebook (--max-away {text})")
                self._send(rank, signal.SIGINT)
        for rank in [rank for rank, when in self._interrupted.items() if when <= now]:
            self._interrupted[rank] = math.inf
            self._send(rank, signal.SIGKILL)


ENDPOINT = "http://169.254.169.254"
VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Names another address of the service, as for AWS's own tools."""
POLL_SECONDS = 5.0
METADATA_TIMEOUT = 2.0
TOKEN_SECONDS = 21600
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


@dataclass(frozen=True)
class Notice:
    """What EC2 says.

    Attributes:
        at: seconds since 1970 when the machine is taken; None where it only may be.
    """

    reason: str
    at: float | None = None


def action(body: str) -> Notice:
    """The notice in an answer. Raises ValueError or KeyError for what is none."""
    said = json.loads(body)
    return Notice(f"EC2 is reclaiming this spot machine ({said['action']})", _seconds(said["time"]))


def rebalance(body: str) -> Notice:
    """The notice in a recommendation."""
    _seconds(json.loads(body)["noticeTime"])
    return Notice(
        "EC2 recommends leaving this spot machine: it is at elevated risk of being reclaimed"
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


NOTICES = {ACTION: action, REBALANCE: rebalance}


class Metadata:
    """A client of the metadata service.

    Args:
        endpoint: its address; a path in it comes before all others.
    """

    def __init__(self, endpoint: str) -> None:
        from urllib.parse import urlsplit

        parts = urlsplit(endpoint)
        self._host, self._port, self._prefix = (
            parts.hostname or "",
            parts.port or 80,
            parts.path.rstrip("/"),
        )
        self._token = ""

    def get(self, path: str) -> str | None:
        """What stands there; None where nothing does. Raises OSError or http.client.HTTPException without an answer."""
        for _ in range(2):
            if not self._token:
                header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                self._token = self._request("PUT", "/latest/api/token", header)[1]
            status, body = self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if status != 401:
                return body if status == 200 else None
            self._token = ""  # it has expired
        return None

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        from http.client import (
            HTTPConnection,
        )  # not urllib's opener: it would go through the user's proxy

        with contextlib.closing(
            HTTPConnection(self._host, self._port, timeout=METADATA_TIMEOUT)
        ) as connection:
            connection.request(method, self._prefix + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(4096).decode(errors="replace")


class NoticeWatch:
    """The thread that polls for notices, with its lifetime."""

    def __init__(self, loop: EventLoop, found: Callable[[Notice], None]) -> None:
        self._loop, self._found = loop, found
        self._stop = threading.Event()
        self._seen: set[Notice] = set()
        self._ours, self._theirs = socket.socketpair()
        loop.watch(self._ours, self._on_notice)
        metadata = Metadata(os.environ.get(VARIABLE) or ENDPOINT)
        self._thread = threading.Thread(
            target=self._run, args=(metadata,), name="skymagic-notices", daemon=True
        )
        self._thread.start()

    def _run(self, metadata: Metadata) -> None:
        with self._theirs:
            while not self._stop.is_set():
                for path, read in NOTICES.items():
                    with contextlib.suppress(Exception):  # the next look is soon
                        body = metadata.get(path)
                        notice = read(body) if body else None
                        if notice is not None and notice not in self._seen:
                            self._seen.add(notice)
                            self._theirs.sendall(json.dumps(vars(notice)).encode() + b"\n")
                self._stop.wait(POLL_SECONDS)

    def _on_notice(self) -> None:
        data = self._ours.recv(1 << 16)  # a notice is short, and written at once
        if not data:
            self._loop.unwatch(self._ours)
        for line in data.splitlines():
            self._found(Notice(**json.loads(line)))

    def close(self) -> None:
        """Stop; twice is safe."""
        self._stop.set()
        self._loop.unwatch(self._ours)
        self._ours.close()
