"""Interruption notices of EC2 spot instances: polled from the machine's own metadata service (IMDSv2), beside the event loop.

    PUT /latest/api/token                                        a session token, in the header of all that follows
    GET /latest/meta-data/spot/instance-action                   404, or {"action": "terminate", "time": "2017-09-18T08:22:00Z"}
    GET /latest/meta-data/events/recommendations/rebalance       404, or {"noticeTime": "2020-10-27T08:22:00Z"}

EC2 asks to look every 5 seconds; of the action it tells two minutes before, as a rule. The service answers on this machine alone, takes
no credentials, and costs no call of EC2's API.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from skymagic.kernels.agent.loop import Loop

ENDPOINT = "http://169.254.169.254"
VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Names another address of the service, as for AWS's own tools."""
POLL_SECONDS = 5.0
TIMEOUT = 2.0
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
    return Notice(f"EC2 takes this spot machine back ({said['action']})", _seconds(said["time"]))


def rebalance(body: str) -> Notice:
    """The same of a recommendation."""
    _seconds(json.loads(body)["noticeTime"])
    return Notice("EC2 recommends to leave this spot machine: it is more likely than others to be taken back")


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


READERS = {ACTION: action, REBALANCE: rebalance}


class Metadata:
    """A client of the metadata service.

    Args:
        endpoint: its address; a path in it comes before all others.
    """

    def __init__(self, endpoint: str) -> None:
        from urllib.parse import urlsplit

        parts = urlsplit(endpoint)
        self._host, self._port, self._prefix = parts.hostname or "", parts.port or 80, parts.path.rstrip("/")
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
        from http.client import HTTPConnection  # not urllib's opener: it would go through the user's proxy

        with contextlib.closing(HTTPConnection(self._host, self._port, timeout=TIMEOUT)) as connection:
            connection.request(method, self._prefix + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(4096).decode(errors="replace")


class NoticeWatch:
    """Owns the thread that polls.

    Args:
        found: called on the loop with each notice, once.
    """

    def __init__(self, loop: Loop, found: Callable[[Notice], None]) -> None:
        self._loop, self._found = loop, found
        self._stop = threading.Event()
        self._seen: set[Notice] = set()
        self._ours, self._theirs = socket.socketpair()
        loop.watch(self._ours, self._on_notice)
        metadata = Metadata(os.environ.get(VARIABLE) or ENDPOINT)
        self._thread = threading.Thread(target=self._run, args=(metadata,), name="skymagic-notices", daemon=True)
        self._thread.start()

    def _run(self, metadata: Metadata) -> None:
        with self._theirs:
            while not self._stop.is_set():
                for path, read in READERS.items():
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
