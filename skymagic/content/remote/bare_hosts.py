"""Files to hosts without packages: each leaves the notebook once, then goes from host to host.

A value server runs there with the host's own Python, from an archive of the few modules that it
needs. It hashes with SHA-256, because xxhash is not installed yet::

    notebook   archive, then files → host 0 ⇢ host 1 ⇢ host 2      as for values (`content.remote`)

Hosts find each other by trying all their private addresses.
"""

from __future__ import annotations

import io
import mmap
import secrets
import threading
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from shlex import quote

from skymagic.bootstrap.install import COPIED
from skymagic.cluster import Node
from skymagic.content.remote.remote_store import RemoteStore
from skymagic.content.store import OVERFLOW
from skymagic.ssh.host import HostConnection
from skymagic.wire import processes
from skymagic.wire.codec import Transport
from skymagic.wire.store import ANY_PRIVATE, SHA256, Adopted
from skymagic.wire.threads import run_all

_CLOSE_TIMEOUT = 15.0
_PACKAGE = Path(__file__).resolve().parents[2]
_ARCHIVED = {
    ".": ("__init__",),
    "content": ("*",),
    "kernels": ("__init__", "fork", "network", "proc"),
    "kernels/store": ("*",),
    "wire": ("__init__", "authentication", "codec", "debug_log", "processes", "record", "store")
    + ("tls", "typed", "untrusted"),
}
"""By folder of the package: the modules of a value server."""
_MAIN = (
    f"import runpy\nrunpy.run_module({processes.VALUES!r}, run_name='__main__', alter_sys=True)\n"
)


@dataclass(frozen=True)
class BareHost:
    """A host that has a Python, and perhaps nothing else.

    Attributes:
        name: name shown to the user.
        python: an interpreter there, of a version that skymagic supports.
        folder: skymagic's folder there; created if it does not exist.
    """

    name: str
    connection: HostConnection
    python: str
    folder: str


class BareHosts:
    """Files on several hosts, each content once. A context manager, which removes them all.

    Args:
        hosts: the hosts; the first one gets the files from here.
        notify: called with one sentence, for example when a host cannot be reached for a while.
    """

    def __init__(self, hosts: Sequence[BareHost], notify: Callable[[str], None]) -> None:
        self._hosts = hosts
        self._over = False
        self._busy = {host.name: threading.Lock() for host in hosts}
        self._folders = [f"{host.folder}/incoming/{secrets.token_hex(8)}" for host in hosts]
        nodes = [
            Node(
                index,
                host.name,
                partial(self._start, index),
                partial(self._start, index),
                address=ANY_PRIVATE,
            )
            for index, host in enumerate(hosts)
        ]
        self.store = RemoteStore(
            nodes, lambda node: node.run(""), notify, retry_timeout=0.0, share=1.0, hash=SHA256
        )

    def __enter__(self) -> BareHosts:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._clean()
        except KeyboardInterrupt:
            self._clean()
            raise

    def _clean(self) -> None:
        self._over = True
        self.store.close()
        jobs = []
        for host, folder in zip(self._hosts, self._folders, strict=True):
            overflow = f"$(readlink {quote(f'{folder}/store/{OVERFLOW}')} || :)"
            script = f'rm -rf "{overflow}" {quote(folder)}'
            jobs.append(partial(self._remove, host, script))
        with suppress(Exception):  # a later installation removes the folders after a day
            run_all(jobs, timeout=_CLOSE_TIMEOUT)

    def _remove(self, host: BareHost, script: str) -> None:
        # What is still running there would make the folder again.
        self._busy[host.name].acquire(timeout=_CLOSE_TIMEOUT)
        try:
            host.connection.run(script, timeout=_CLOSE_TIMEOUT)
        finally:
            self._busy[host.name].release()

    def send(self, path: Path) -> list[str]:
        """Send a file to all hosts, unless it was sent, and return the paths to try on each.

        May be called on several threads.

        Raises:
            OSError: a host has no space left.
            PoolError: a host cannot be reached, or has no Python that runs the server.
        """
        with path.open("rb") as file:
            empty = not path.stat().st_size
            data = memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        key = self.store.put(None, [data], len(data))
        self.store.pin([key])
        self.store.settle()
        name = self.store.name(key)
        return [
            f"{folder}/store/{place}{name}"
            for folder in dict.fromkeys(self._folders)
            for place in ("", f"{OVERFLOW}/")
        ]

    def share(self, below: Sequence[str]) -> list[str]:
        """Pass folders of the first host on to the others.

        Args:
            below: folders below the first host's folder, with all files in them.

        Returns:
            For each host, the name of the upload folder with the copies, which are in `COPIED`; ""
            for the first host and for one that did not receive all of them.

        Raises:
            OSError: a file cannot be read, or the connection to the first host is lost.
        """
        adopted, received = self.store.adopt(0, self._hosts[0].folder, below)
        receivers = sorted(received - {0})
        jobs = [partial(self._place, index, adopted) for index in receivers]
        results = dict(zip(receivers, run_all(jobs), strict=True))
        return [
            Path(folder).name if results.get(index) is True else ""
            for index, folder in enumerate(self._folders)
        ]

    def _place(self, index: int, adopted: Sequence[Adopted]) -> bool:
        """Give files of the store their own names, and return True on success."""
        folder = self._folders[index]
        lines = ["set -e", f"mkdir -p {quote(f'{folder}/{COPIED}')}", f"cd {quote(folder)}"]
        for file in adopted:
            source = f"store/{file.name}"
            lines.append(f"[ -f {source} ] || cp store/{OVERFLOW}/{file.name} {source}")
            if not file.path:
                # Without -o, tar running as root would give the files to whichever user has the
                # same numeric ID on this host.
                lines.append(f"tar -C {COPIED} -xof {source}")
                continue
            # The first host has chosen this path: it must not write elsewhere on the others.
            path = PurePosixPath(file.path)
            if path.is_absolute() or ".." in path.parts:
                return False
            target = quote(f"{COPIED}/{path}")
            lines.append(f"mkdir -p {quote(f'{COPIED}/{path.parent}')}")
            lines.append(f"ln {source} {target}; chmod {file.mode & 0o700:o} {target}")
        host = self._hosts[index]
        with self._busy[host.name]:
            return not self._over and host.connection.run("\n".join([*lines, ""])).status == 0

    @cached_property
    def _program(self) -> bytes:
        """The value server's archive, which all hosts get."""
        return archive()

    def _start(self, index: int, *_: object) -> Transport:
        host, folder = self._hosts[index], self._folders[index]
        program = f"{folder}/server.pyz"
        words = (host.python, "-I", program, f"{folder}/store")
        with self._busy[host.name]:
            if self._over:
                raise OSError("it is not needed any more")
            data = self._program
            host.connection.upload(program, [memoryview(data)], len(data))
            return host.connection.open(f"umask 077; exec {' '.join(map(quote, words))}")


def archive() -> bytes:
    """Return a zip that runs a value server, which needs the standard library alone."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as zipped:
        for folder, names in _ARCHIVED.items():
            for name in names:
                for path in sorted((_PACKAGE / folder).glob(f"{name}.py")):
                    zipped.write(path, f"skymagic/{path.relative_to(_PACKAGE)}")
        zipped.writestr("__main__.py", _MAIN)
    return target.getvalue()
