"""Ends of ranks that the user did not ask for: a signal, a notice from EC2, or a notebook away for
too long.

Slurm, systemd and a logout send a signal. Ranks with an `on_interruption` hook run it first::

    SIGTERM ─▶ agent ─▶ Interruption ─▶ ranks     at once if no rank has a hook
               agent ◀─ HookEnded    ◀─ ranks     then the agent ends; also on timeout
                                                   or a second signal

Slurm signals all processes of a job: the notebook may exit before the agent gets its signal, and
the ranks may get the signal themselves. Some time before a job's limit it sends SIGURG (``sbatch
--signal=URG@120``), which processes ignore by default: see `SignalledEnd.warn`.

EC2's notices for spot instances are polled from the metadata service of the machine (IMDSv2), on a
thread outside the event loop::

    PUT /latest/api/token                                     a session token for later requests
    GET /latest/meta-data/spot/instance-action                404, or {"action": "terminate",
                                                              "time": "2017-09-18T08:22:00Z"}
    GET /latest/meta-data/events/recommendations/rebalance    404, or
                                                              {"noticeTime": "2020-10-27T08:22:00Z"}

EC2 recommends polling every 5 seconds, and usually announces the action two minutes ahead. The
service is reachable from this machine only, takes no credentials, and does not count as a call of
the EC2 API.
"""

from __future__ import annotations

import contextlib
import json
import logging
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

logger = logging.getLogger(__name__)

SIGNALLED = 128
"""Offset of the exit status: an agent that a signal ended exits with this plus the signal's number.
"""
ENDING = (signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals meant for the ranks' hooks (``sbatch --signal=USR1@120``); agents ignore them."""
WARNING = signal.SIGURG
SLURM = "slurm:"
"""Prefix of `AgentSpec.notices` that announces Slurm's warning signal."""
KILL_SECONDS = 30.0
"""Seconds between Slurm's SIGTERM and its SIGKILL (KillWait)."""
HOOK_SECONDS = 26.0  # how long the agent waits for hooks: 25 s for the hook, and its last output
ABANDONED_SECONDS = 1.0
"""Seconds that an agent without a notebook waits for its own signal, if a rank has a hook."""


class SignalledEnd:
    """State of an agent that was signalled: wait for the ranks' hooks, then exit.

    Args:
        woken: the agent's `signal_pipe`.
        hooks: returns, for each rank with a hook, how many times the hook has finished.
        notify: called once, on the loop, with the reason and the deadline, to run the hooks.
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
        """Deadline in monotonic seconds; None while no hook is awaited."""
        self._lead = 0.0
        self._found: Callable[[Notice], None] | None = None
        loop.watch(woken, self._begin)
        for number in ENDING:
            signal.signal(number, self._on_signal)
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_IGN)

    def warn(self, lead: float, on_notice: Callable[[Notice], None]) -> None:
        """Treat `WARNING` as a notice that the job reaches its limit in `lead` seconds."""
        self._lead, self._found = lead, on_notice
        signal.signal(WARNING, lambda number, frame: None)  # the loop wakes by the pipe

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        earlier, self._number = self._number, number
        # a second signal, or no hook to wait for: exit at once
        if earlier or not self._hooks():
            sys.exit(SIGNALLED + number)

    def _begin(self) -> None:
        # SIGURG is Slurm's advance warning; the numbers of all signals arrive in the pipe
        if WARNING in os.read(self._woken, 4096) and self._found is not None:
            self._found(Notice("Slurm ends the job at its time limit", time.time() + self._lead))
        if not self._number or self.due is not None:
            return
        logger.warning(
            "agent was signalled and waits for hooks: signal=%s seconds=%s",
            signal.Signals(self._number).name,
            HOOK_SECONDS,
        )
        self._before = self._hooks()
        self.due = time.monotonic() + HOOK_SECONDS
        self._notify(f"{signal.Signals(self._number).name} received", time.time() + KILL_SECONDS)

    def end_if_over(self, now: float) -> None:
        """Raise SystemExit once all hooks have run, or at the deadline."""
        if self.due is None:
            return
        after = self._hooks()
        if now >= self.due or all(after.get(rank) != count for rank, count in self._before.items()):
            sys.exit(SIGNALLED + self._number)

    def close(self) -> None:
        """Exit at once on further signals."""
        for number in ENDING:
            signal.signal(number, lambda number, _: sys.exit(SIGNALLED + number))


GRACE = 30.0
"""Seconds between the interrupt of a rank and its kill."""


class UnattendedRuns:
    """Time limit of runs without a notebook.

    It interrupts ranks once per absence, and kills those that keep running.

    Args:
        lifetime: knows which ranks are working and when they must stop.
        limit: the limit in seconds, for the message.
        note: shows a skymagic message with a rank's output.
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
        """Time to kill each rank that was interrupted and is still working."""

    @property
    def due(self) -> float | None:
        """Time of the next action (monotonic seconds)."""
        if self._interrupted:
            return min(
                (when for when in self._interrupted.values() if when < math.inf), default=None
            )
        return self._lifetime.runs_end

    def stop_if_due(self, now: float) -> None:
        """Interrupt or kill ranks whose time is over.

        Once the notebook is back, its own stop button ends the rest.
        """
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
                logger.warning(
                    "rank is interrupted after its time without a notebook: rank=%s limit=%s",
                    rank,
                    self._limit,
                )
                self._send(rank, signal.SIGINT)
        for rank in [rank for rank, when in self._interrupted.items() if when <= now]:
            logger.warning("rank is killed, because it ignores the interrupt: rank=%s", rank)
            # it stays listed until it counts as ended, or the next look would interrupt it again
            self._interrupted[rank] = math.inf
            self._send(rank, signal.SIGKILL)


ENDPOINT = "http://169.254.169.254"
VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Environment variable with another address of the service; AWS's own tools read it too."""
POLL_SECONDS = 5.0
METADATA_TIMEOUT = 2.0
TOKEN_SECONDS = 21600
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


@dataclass(frozen=True)
class Notice:
    """An announcement that this machine will, or may, be taken away.

    Attributes:
        at: seconds since 1970 when the machine is taken; None if that is only a risk.
    """

    reason: str
    at: float | None = None


def action(body: str) -> Notice:
    """Parse an instance action. Raises ValueError or KeyError if the body is not one."""
    fields = json.loads(body)
    return Notice(
        f"EC2 is reclaiming this spot machine ({fields['action']})", _seconds(fields["time"])
    )


def rebalance(body: str) -> Notice:
    """Parse a rebalance recommendation. Raises ValueError or KeyError if the body is not one."""
    _seconds(json.loads(body)["noticeTime"])
    return Notice(
        "EC2 recommends leaving this spot machine: it is at elevated risk of being reclaimed"
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


NOTICES = {ACTION: action, REBALANCE: rebalance}


class Metadata:
    """Client of the metadata service.

    Args:
        endpoint: its address; a path in it is prepended to all others.
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
        """Return the text at a path, or None if it does not exist.

        Raises OSError or http.client.HTTPException if the service does not answer.
        """
        # the second attempt gets a new token, if the first one had expired
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
        # not urllib's opener: it would go through the user's proxy
        from http.client import HTTPConnection

        with contextlib.closing(
            HTTPConnection(self._host, self._port, timeout=METADATA_TIMEOUT)
        ) as connection:
            connection.request(method, self._prefix + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(4096).decode(errors="replace")


class NoticeWatch:
    """Thread that polls for notices."""

    def __init__(self, loop: EventLoop, on_notice: Callable[[Notice], None]) -> None:
        self._loop, self._found = loop, on_notice
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
                    with contextlib.suppress(Exception):  # the next poll is soon
                        body = metadata.get(path)
                        notice = read(body) if body else None
                        if notice is not None and notice not in self._seen:
                            self._seen.add(notice)
                            self._theirs.sendall(json.dumps(vars(notice)).encode() + b"\n")
                self._stop.wait(POLL_SECONDS)

    def _on_notice(self) -> None:
        data = self._ours.recv(1 << 16)  # a notice is short and written in one piece
        if not data:
            self._loop.unwatch(self._ours)
        for line in data.splitlines():
            self._found(Notice(**json.loads(line)))

    def close(self) -> None:
        """Stop polling; twice is safe."""
        self._stop.set()
        self._loop.unwatch(self._ours)
        self._ours.close()
