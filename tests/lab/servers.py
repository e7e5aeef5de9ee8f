"""Jupyter's server without a browser: it executes cells by itself, as jupyter-server-nbmodel does for front ends, and keeps what they show."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab.notebook import ROOT

TIMEOUT = 100
SERVED = ROOT / "build" / "served"
"""Where `make` has put jupyter-server-nbmodel for these tests: in an environment of people's own JupyterLab would show nothing amid a cell."""
Outputs = Sequence[Mapping[str, Any]]


def needed() -> None:
    """Skip the test where the server's extension is not installed."""
    if not (SERVED / "jupyter_server_nbmodel").exists():
        pytest.importorskip("jupyter_server_nbmodel")


@dataclass
class Served:
    """A server, and a kernel of its."""

    url: str
    token: str
    kernel: str = ""

    def call(self, path: str, body: Any = None) -> Any:
        """What it answers to a request over HTTP: GET without a body, POST with one."""
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, data, headers)
        ) as answer:
            return json.loads(answer.read() or "null")

    def new_kernel(self) -> None:
        """Start another kernel, which executes the cells from now on."""
        self.kernel = self.call("api/kernels", {"name": "python3"})["id"]

    def begin(self, source: str) -> str:
        """Have the kernel execute a cell: where its outputs will be."""
        return str(
            self.call(f"api/kernels/{self.kernel}/execute", {"code": source})["request_url"]
        ).lstrip("/")

    def outputs(self, request: str) -> Outputs | None:
        """What a cell has shown; None while it goes on."""
        answer = self.call(request)
        return (
            None if "outputs" not in answer or answer.get("pending") else _parsed(answer["outputs"])
        )

    def so_far(self, request: str) -> Outputs:
        """What a cell has shown that goes on, or whose kernel has ended."""
        return _parsed(self.call(request).get("outputs", "[]"))

    def run(self, source: str) -> Outputs:
        """What a cell shows until it ends."""
        request, deadline = self.begin(source), time.monotonic() + TIMEOUT
        while (found := self.outputs(request)) is None:
            assert time.monotonic() < deadline, f"{source} goes on"
            time.sleep(0.05)  # its HTTP interface is asked, and tells nobody
        return found


def _parsed(outputs: Any) -> Outputs:
    found: Outputs = json.loads(outputs) if isinstance(outputs, str) else outputs
    return found


def listens(port: int) -> bool:
    """Whether somebody does on this machine."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def server(folder: Path, env: Mapping[str, str]) -> Iterator[Served]:
    """A server in a folder, with a kernel. Its kernels get this environment."""
    runtime = folder / "runtime"
    path = os.pathsep.join(filter(None, [env.get("PYTHONPATH", ""), str(SERVED)]))
    env = {
        **env,
        "PYTHONPATH": path,
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
    }
    options = (
        "--allow-root", "--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", "--ServerApp.terminals_enabled=False",
        f"--ServerApp.root_dir={folder}", "--ServerApp.jpserver_extensions={'jupyter_server_nbmodel': True}",
    )  # fmt: skip
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "jupyter_server", *options], env=env, cwd=folder, stdout=log, stderr=log)  # fmt: skip
        try:
            written, deadline = runtime / f"jpserver-{process.pid}.json", time.monotonic() + TIMEOUT

            def waits() -> None:
                alive = time.monotonic() < deadline and process.poll() is None
                assert alive, (folder / "server.log").read_text()
                time.sleep(0.05)  # its file appears, and its port opens: no event

            while not (written.exists() and written.read_text().endswith("}")):
                waits()
            info = json.loads(written.read_text())
            while not listens(info["port"]):  # it writes before it listens
                waits()
            served = Served(info["url"], info["token"])
            served.new_kernel()
            yield served
        finally:
            process.terminate()
            try:
                process.wait(TIMEOUT)
            finally:
                process.kill()
