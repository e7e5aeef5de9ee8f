"""Separate machines for the tests: network namespaces with an sshd each, a switch, and a link to the client.

::

    with machines(tmp_path, 3, delay_ms=25, rate_mbit=100) as hosts:
        hosts.config                    # h1 is 10.77.0.1, h2 is 10.77.0.2, …
        hosts[1].cut(); hosts[1].mend() # its network cable
        hosts[1].power_cut(); hosts[1].boot()
        hosts.link.cut()                # the client's
        hosts.link.traffic()            # bytes on it

Each machine has its own network, hostname, process table, /dev/shm and /etc/hosts (in which its name is 127.0.1.1, as on
Debian); files are this machine's. Within the block the calling thread, and all threads and processes that it starts, are on
the client's network, which reaches the machines and nothing else. Nothing of this is visible outside; it needs root, also
that of ``unshare --map-root-user --net --mount --pid --fork --mount-proc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.lab.hosts import Host, Hosts, closing, keygen, still_there

CLONE_NEWNET = 0x40000000
NETWORK = "10.77.0"
CLIENT = 100
WAN = Path(__file__).with_name("wan.py")
# The first process of a namespace: reaps orphans; ends, and with it all others, when the tests do.
FIRST = """
import os, signal, socket, subprocess, sys
name, hosts, first = sys.argv[1:]
if name:
    # machines that are started together would have processes of the same numbers, begun at the same time, in a /tmp that they share
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(first)
    socket.sethostname(name)
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "shm", "/dev/shm"], check=True)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, reap)
print("up", flush=True)
sys.stdin.read()
"""
_numbers = itertools.count(1)


def _first_process() -> int:
    """A number below those of this run's processes on its machines: another run of the tests has others."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    return random.SystemRandom().randrange(0, max(1, most - 30_000), 1000)


FIRST_PROCESS = _first_process()


class Space:
    """A network namespace, with a process table and a hostname of its own when it has a name."""

    def __init__(self, name: str = "", etc_hosts: str = "", first: int = 0) -> None:
        apart = (
            ["--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
            if name
            else []
        )
        self._process = subprocess.Popen(
            ["unshare", "--net", *apart, sys.executable, "-c", FIRST, name, etc_hosts, str(first)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "up\n":
            self.close()
            raise AssertionError("a namespace could not be made")
        own = psutil.Process(self._process.pid)
        self.pid = own.children()[0].pid if name else own.pid
        flags = ["--net", *(["--uts", "--ipc", "--pid", "--mount"] if name else [])]
        self.enter = ["nsenter", "--target", str(self.pid), *flags]
        """What to put before a command that shall run in it."""

    def ip(self, *words: str) -> None:
        """Run ``ip`` in its network."""
        subprocess.run(["nsenter", "--target", str(self.pid), "--net", "ip", *words], check=True)

    def cable(self, mine: str, other: Space, theirs: str) -> None:
        """Join it to another one."""
        self.ip(
            "link",
            "add",
            "name",
            mine,
            "type",
            "veth",
            "peer",
            "name",
            theirs,
            "netns",
            str(other.pid),
        )
        self.ip("link", "set", mine, "up")
        other.ip("link", "set", theirs, "up")

    def close(self) -> None:
        """End it at once, with all that runs in it; twice is safe."""
        processes = [p for p in (_process(self._process.pid),) if p is not None]
        with contextlib.suppress(psutil.Error):
            processes += [child for p in processes for child in p.children(recursive=True)]
        self._process.kill()
        self._process.wait()
        still_there(processes)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Switch:
    """Where all cables end."""

    def __init__(self) -> None:
        self._space = Space()
        self._space.ip("link", "add", "br0", "type", "bridge")
        self._space.ip("link", "set", "br0", "up")

    def plug(self, space: Space, interface: str) -> str:
        """Join an interface of this space to the switch; the name of the port."""
        port = f"p{next(_numbers)}"
        self._space.cable(port, space, interface)
        self.mend(port)
        return port

    def cut(self, port: str) -> None:
        """Let nothing pass any more; nobody is told."""
        self._space.ip("link", "set", port, "nomaster")

    def mend(self, port: str) -> None:
        """Let it pass again."""
        self._space.ip("link", "set", port, "master", "br0")

    def slow(self, port: str, wan: dict[str, float]) -> subprocess.Popen[str]:
        """Join a port to the others by a slow wire, which ends with its standard input."""
        number = next(_numbers)
        self.cut(port)
        self._space.cable(f"n{number}", self._space, f"f{number}")
        self.mend(f"f{number}")
        return wire(self._space, port, f"n{number}", wan)

    def close(self) -> None:
        """Throw it away with all cables."""
        self._space.close()


def wire(space: Space, near: str, far: str, wan: dict[str, float]) -> subprocess.Popen[str]:
    """A slow wire between two interfaces of a space; it is there when this returns."""
    words = [f"{key}={value}" for key, value in wan.items()]
    made = subprocess.Popen(
        [*space.enter, sys.executable, str(WAN), near, far, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert made.stdout is not None
    assert made.stdout.readline() == "ok\n"
    return made


class Machine(Host):
    """A machine of its own; see Host for what else it can suffer."""

    def boot(self, switch: Switch, number: int) -> None:
        """Switch it on, with its sshd."""
        self.switch, self.number, self.port = switch, number, 22
        etc_hosts = self.folder / "etc_hosts"
        etc_hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        self.space = Space(self.name, str(etc_hosts), first=FIRST_PROCESS + 1000 * number)
        try:
            self._cable = switch.plug(self.space, "eth0")
            self.space.ip("link", "set", "eth0", "address", f"02:00:00:00:00:{number:02x}")
            self.space.ip("addr", "add", f"{self.address}/24", "dev", "eth0")
            self.start()
        except BaseException:
            self.close()
            raise

    def reboot(self) -> None:
        """Switch it on again after a power cut: other processes, the same address and keys."""
        self.boot(self.switch, self.number)

    def cut(self) -> None:
        """Pull its network cable; nobody is told."""
        self.switch.cut(self._cable)

    def mend(self) -> None:
        """Put its network cable back."""
        self.switch.mend(self._cable)

    @contextmanager
    def slow(self, **wan: float) -> Iterator[None]:
        """Have a slow wire in its cable until the end of the block: delay_ms (one way), rate_mbit, loss."""
        process = self.switch.slow(self._cable, wan)
        try:
            yield
        finally:
            process.kill()
            process.communicate()
            self.mend()

    def power_cut(self) -> None:
        """Kill all that runs on it, at once; its last words (a network outlives its processes a little) are not heard."""
        self.cut()
        self.space.close()
        self.stop()

    def close(self) -> list[str]:
        """End it; what still ran on it although nobody is connected any more, in words."""
        left = super().close()
        self.space.close()
        return left

    def _inside(self) -> list[str]:
        return self.space.enter


class Link:
    """The client's connection to the switch, by way of a slow wire where one is asked for."""

    def __init__(self, switch: Switch, wan: dict[str, float]) -> None:
        self._switch = switch
        self.address = f"{NETWORK}.{CLIENT}"
        self.client = Space()
        self._middle: Space | None = None
        self._wire: subprocess.Popen[str] | None = None
        try:
            self._port = self._stretched(wan) if wan else switch.plug(self.client, "eth0")
            self.client.ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        except BaseException:
            self.close()
            raise

    def _stretched(self, wan: dict[str, float]) -> str:
        """Join the client to the switch by a slow wire."""
        self._middle = Space()
        self._middle.cable("near", self.client, "eth0")
        port = self._switch.plug(self._middle, "far")
        self._wire = wire(self._middle, "near", "far", wan)
        return port

    def change(self, **wan: float) -> None:
        """Change the slow wire: delay_ms (one way), rate_mbit, loss (a share)."""
        assert self._wire is not None, "ask for a delay or a rate first"
        assert self._wire.stdin is not None
        self._wire.stdin.write(" ".join(f"{key}={value}" for key, value in wan.items()) + "\n")
        self._wire.stdin.flush()
        self._answered()

    def _answered(self) -> None:
        assert self._wire is not None
        assert self._wire.stdout is not None
        assert self._wire.stdout.readline() == "ok\n"

    def cut(self) -> None:
        """Let nothing pass; nobody is told."""
        self._switch.cut(self._port)

    def mend(self) -> None:
        """Let it pass again."""
        self._switch.mend(self._port)

    def move(self) -> None:
        """Give the client another address: connections from the old one are dead, and nobody is told."""
        self.client.ip("addr", "del", f"{self.address}/24", "dev", "eth0")
        head, _, tail = self.address.rpartition(".")
        self.address = f"{head}.{int(tail) + 1}"
        self.client.ip("addr", "add", f"{self.address}/24", "dev", "eth0")

    def traffic(self) -> tuple[int, int]:
        """Bytes that the client has sent and received, headers included."""
        for line in Path(f"/proc/{self.client.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "eth0":
                words = numbers.split()
                return int(words[8]), int(words[0])
        raise AssertionError("the client has no link")

    def close(self) -> None:
        """End the wire and the client's network."""
        if self._wire is not None:
            self._wire.kill()
            self._wire.communicate()
        for space in (self._middle, self.client):
            if space is not None:
                space.close()


class Machines(Hosts):
    """Some machines, and the link to them."""

    link: Link


@contextmanager
def machines(
    folder: Path,
    count: int = 2,
    *,
    env: dict[str, str] | None = None,
    options: Sequence[str] = (),
    **wan: float,
) -> Iterator[Machines]:
    """So many machines; mark the test ``needs("sshd", "namespaces")``. At the end nothing may run on them any more.

    Args:
        folder: an empty folder; the homes are in it.
        count: how many.
        env: further variables of their sessions.
        options: lines of sshd_config, before all others.
        wan: delay_ms (one way), rate_mbit, loss of the client's link; see wan.py.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = keygen(folder / "key")
    with ExitStack() as stack:
        switch = Switch()
        stack.callback(switch.close)
        link = Link(switch, wan)
        stack.callback(link.close)
        made: list[Machine] = []
        stack.enter_context(closing(made))
        for number in range(1, count + 1):
            name = f"h{number}"
            machine = Machine(
                name, f"{NETWORK}.{number}", folder / name, Path(f"{key}.pub"), env or {}, options
            )
            machine.boot(switch, number)
            made.append(machine)
        hosts = Machines(folder, made, key)
        hosts.link = link
        hosts.write()
        stack.enter_context(on_network(link.client))
        yield hosts


@contextmanager
def on_network(space: Space) -> Iterator[None]:
    """The calling thread, and what it starts, on another network."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    other = os.open(f"/proc/{space.pid}/ns/net", os.O_RDONLY)
    try:
        _setns(other)
        try:
            yield
        finally:
            _setns(own)
    finally:
        os.close(other)
        os.close(own)


def _setns(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None
