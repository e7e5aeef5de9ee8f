"""EC2's metadata service (IMDSv2) for the machines of the tests: one HTTP server, with a path for each instance.

::

    with metadata() as service, booting(cloud, folder, service) as machines:
        service.say(instance, notices.ACTION, {"action": "terminate", "time": "2026-11-22T20:00:00Z"})
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from skymagic.kernels.agent import ending


@dataclass
class Metadata:
    """What it answers; without a token that it has given, 401."""

    port: int = 0
    said: dict[str, str] = field(default_factory=dict)
    """Path → body; 404 for all others."""
    tokens: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def url(self, instance: str) -> str:
        """Where an instance finds it."""
        return f"http://127.0.0.1:{self.port}/{instance}"

    def say(self, instance: str, path: str, body: object) -> None:
        """Answer so from now on."""
        self.said[f"/{instance}{path}"] = json.dumps(body)

    def take_back(self, instance: str, at: float) -> None:
        """EC2 will terminate a spot instance at this time (seconds since 1970)."""
        when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.say(instance, ending.ACTION, {"action": "terminate", "time": when})


@contextmanager
def metadata() -> Iterator[Metadata]:
    """The service, until the end of the block."""
    service = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
            token = secrets.token_hex(8)
            service.tokens.add(token)
            self._answer(200, token)

        def do_GET(self) -> None:
            service.asked.append(self.path)
            if self.headers["X-aws-ec2-metadata-token"] not in service.tokens:
                self._answer(401, "")
            else:
                self._answer(
                    200 if self.path in service.said else 404, service.said.get(self.path, "")
                )

        def _answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    service.port = server.server_port
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
