"""A few files from one host to others, before anything of ours runs there: by the standard library of each host's Python.

What a value server needs goes this way: skymagic's own code, and two public wheels. Both ends have a certificate made for this, over their
own connections, and speak TLS 1.3 with nobody else.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from shlex import quote

from skymagic.errors import HostError
from skymagic.ssh.connection import Connection
from skymagic.wire import tls
from skymagic.wire.threads import run_all

_FETCH_SECONDS = 60.0

# Both run in whatever Python a host has.
_COMMON = f"""
import hashlib, json, os, socket, ssl, sys, tempfile, threading
{inspect.getsource(tls.context)}
pem, names = json.loads(sys.stdin.readline())
"""
_SERVE = """
address, folder = sys.argv[1:]
paths = {name: os.path.join(folder, path) for name, path in names.items()}
secure = context(pem, server=True)
def content(path):
    with open(path, 'rb') as file:
        return file.read()
def answer(plain):
    plain.settimeout(20)
    with secure.wrap_socket(plain, server_side=True) as one:
        name = one.makefile('rb').readline(300).decode('ascii', 'replace').strip()
        if name in paths:
            one.sendall(content(paths[name]))
def serve(listener):
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
threading.excepthook = lambda problem: None  # strangers' connections
listener = socket.create_server((address, 0))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
found = {name: hashlib.sha256(content(path)).hexdigest() for name, path in paths.items()}
print(json.dumps([listener.getsockname()[1], found]), flush=True)
sys.stdin.read()
"""
_FETCH = """
address, port, folder = sys.argv[1:]
for name, digest in names.items():
    with socket.create_connection((address, int(port)), 5) as plain:
        plain.settimeout(20)
        with context(pem, server=False).wrap_socket(plain) as one:
            one.sendall((name + '\\n').encode())
            data = one.makefile('rb').read()
    if hashlib.sha256(data).hexdigest() != digest:
        sys.exit('%s: other bytes came than were sent' % name)
    descriptor = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, 'wb') as file:
        file.write(data)
"""


@dataclass(frozen=True)
class Relay:
    """Files that a host hands out.

    Attributes:
        address, port: where. digests: of each, by name. pem: certificate and key of both ends.
    """

    address: str
    port: int
    digests: Mapping[str, str]
    pem: str = field(repr=False)

    def fetch(self, host: Connection, python: str, folder: str) -> bool:
        """Let another host fetch all of them into a folder; whether they have come."""
        asked = json.dumps([self.pem, dict(self.digests)])
        words = [python, "-c", _COMMON + _FETCH, self.address, str(self.port), folder]
        script = f"printf '%s\\n' {quote(asked)} | {' '.join(map(quote, words))}"
        try:
            return host.run(script, timeout=_FETCH_SECONDS).status == 0
        except HostError:
            return False


@contextlib.contextmanager
def handed_out(
    host: Connection, python: str, address: str, folder: str, names: Mapping[str, str]
) -> Iterator[Relay | None]:
    """Let a host hand out files while the block runs; None where it cannot.

    Args:
        address: of its own, by which the others reach it.
        names: the name that each file takes elsewhere → its path in the folder.
    """
    pem = tls.certificate()
    words = [python, "-c", _COMMON + _SERVE, address, folder]
    process = host.open(f"exec {' '.join(map(quote, words))}")
    try:
        process.write(json.dumps([pem, dict(names)]).encode() + b"\n")
        said = b""
        while not said.endswith(b"\n") and (data := process.read()):
            said += data
        if not said:
            yield None
        else:
            port, digests = json.loads(said)
            yield Relay(address, port, digests, pem)
    finally:
        process.close()


def fetched(relay: Relay, hosts: Collection[tuple[Connection, str, str]]) -> list[bool]:
    """Let hosts, each with its Python and a folder there, fetch what is handed out, all at once; whether it has come to each."""
    outcomes = run_all([partial(relay.fetch, host, python, folder) for host, python, folder in hosts])
    return [outcome is True for outcome in outcomes]
