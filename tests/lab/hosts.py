"""Real hosts for the tests: sshd's on loopback addresses, each with a home and a key of its own.

::

    with loopback(tmp_path, 2) as hosts:
        hosts.config                       # an ssh_config in which they are called h1, h2
        hosts[0].kill_sessions()           # what a host can suffer

A host's processes carry its name in their environment, so that what is left of them is found and reported.
"""

from __future__ import annotations

import atexit
import contextlib
import getpass
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from skymagic.runtime.rendezvous import free_port
from skymagic.ssh.keys import known_hosts_name
from tests.conftest import MARK
from tests.lab.ending import cmdline, end, program, with_variable

SBIN = os.pathsep.join(
    [os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"]
)
NAME = "SKYMAGIC_TEST_HOST"
DEADLINE = 10.0


def keygen(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A fresh key pair; the path of its private half."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path)],
        check=True,
    )
    return path


@dataclass
class Host:
    """One sshd, and what runs behind it. The processes of a host are this machine's; its home is its own.

    Attributes:
        name: its name in the ssh_config.
        env: what its sessions have in their environment.
        options: further lines of its sshd_config.
        before: sh that runs before its sshd, with mounts of its own; mark the test ``needs("namespaces")`` for it.
    """

    name: str
    address: str
    folder: Path
    authorized: Path
    env: dict[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    home_name: str = "home"
    before: str = ""

    port: int = 0
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.home = self.folder / self.home_name
        self.home.mkdir()
        self.hostkey = keygen(self.folder / "hostkey")
        self.mark = f"{self.name}-{uuid.uuid4().hex}"
        self._news = threading.Condition()
        self._sshd: subprocess.Popen[str] | None = None
        self._known: set[psutil.Process] = set()
        self._thread: threading.Thread | None = None

    # -- the listener --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start its sshd, on the port that it had before if it had one; it listens when this returns."""
        for _ in range(5):
            port = self.port or free_port(self.address)
            begun = len(self.log)
            self._sshd = self._listen(port)
            if self.wait_log("Server listening on", begun):
                self.port = port
                return
            self.stop()
        raise AssertionError(f"sshd did not start:\n{chr(10).join(self.log)}")

    def _listen(self, port: int) -> subprocess.Popen[str]:
        config = self.folder / "sshd_config"
        config.write_text(self._config(port))
        program = shutil.which("sshd", path=SBIN)
        assert program is not None, "the test lacks needs('sshd')"
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        sshd = subprocess.Popen(
            [*self._inside(), program, "-D", "-e", "-f", str(config)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read_log, args=(sshd,), daemon=True)
        self._thread.start()
        return sshd

    def _inside(self) -> list[str]:
        """What enters the machine that it is on; here what ends sshd when the tests are killed."""
        apart = ["unshare", "-m"] if self.before else []
        start = f"set -e; HOME={shlex.quote(str(self.home))}\n{self.before}\n"
        return [
            *apart,
            "sh",
            "-c",
            start + 'exec 3<&0; (read end <&3; kill -9 $$) & exec "$@" </dev/null 3<&-',
            "sh",
        ]

    def _listener(self) -> psutil.Process | None:
        if self._sshd is None:
            return None
        try:
            first = psutil.Process(self._sshd.pid)
            return next(
                (p for p in (first, *first.children()) if program(p).startswith("sshd")), None
            )
        except psutil.Error:
            return None

    def _config(self, port: int) -> str:
        # only the first SetEnv counts
        env = {"HOME": str(self.home), NAME: self.mark, MARK: os.environ.get(MARK, ""), **self.env}
        lines = [
            *self.options,
            f"ListenAddress {self.address}", f"Port {port}", f"HostKey {self.hostkey}", "PidFile none",
            f'AuthorizedKeysFile "{self.authorized}"', "StrictModes no", "UsePAM no", "PasswordAuthentication no",
            "KbdInteractiveAuthentication no", "PermitRootLogin prohibit-password", "UseDNS no", "X11Forwarding no",
            "PrintMotd no", "MaxStartups 100", "MaxSessions 100", "LogLevel VERBOSE",
            "SetEnv " + " ".join(f'"{key}={value}"' for key, value in env.items()),
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _read_log(self, sshd: subprocess.Popen[str]) -> None:
        assert sshd.stderr is not None
        for line in sshd.stderr:
            with self._news:
                self.log.append(line.rstrip())
                self._news.notify_all()
        sshd.stderr.close()
        with self._news:
            self._news.notify_all()

    def wait_log(self, text: str, begun: int = 0) -> bool:
        """Whether its sshd's log says so, from this line on, before it ends."""

        def told() -> bool:
            return any(text in line for line in self.log[begun:])

        def ended() -> bool:
            return self._sshd is None or self._sshd.poll() is not None

        with self._news:
            self._news.wait_for(lambda: told() or ended(), DEADLINE)
            return told()

    def stop(self) -> None:
        """End the listener; the sessions go on."""
        if self._sshd is not None:
            self._daemons()  # the sessions are nobody's children from here on
            _kill([listener for listener in [self._listener()] if listener is not None])
            self._sshd.kill()
            self._sshd.wait()
            assert self._sshd.stdin is not None
            self._sshd.stdin.close()
            self._sshd = None

    # -- what a host can suffer ----------------------------------------------------------------------------------------

    def sessions(self) -> list[psutil.Process]:
        """The sshd processes of its connections."""
        listener = self._listener()
        return [process for process in self._daemons() if process != listener]

    def kill_sessions(self) -> None:
        """Kill the sshd processes of its connections, as ``kill -9`` of them does; what they started may go on."""
        _kill(self.sessions())

    def freeze(self) -> None:
        """Stop (SIGSTOP) all of its sshd: connections hang, and nobody is told."""
        for process in self._daemons():
            _signal(process, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let its sshd go on."""
        for process in self._daemons():
            _signal(process, signal.SIGCONT)

    def power_cut(self) -> None:
        """Kill its sshd and all that was ever started over it."""
        self.stop()
        _kill([*self.sessions(), *self.processes()])

    def processes(self) -> list[psutil.Process]:
        """What runs on it, daemons too; sshd is not among them."""
        return with_variable(NAME, self.mark)

    def _daemons(self) -> list[psutil.Process]:
        """All sshd processes; those of sessions overwrite their environment, so they are found from the listener down."""
        if (listener := self._listener()) is not None:
            with contextlib.suppress(psutil.Error):
                found = listener.children(recursive=True)
                self._known |= {listener, *(p for p in found if program(p).startswith("sshd"))}
        self._known = {
            process
            for process in self._known
            if process.is_running() and program(process).startswith("sshd")
        }
        return list(self._known)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> list[str]:
        """End it; what still ran on it although nobody is connected any more, in words."""
        self.thaw()
        self.kill_sessions()
        self.stop()
        words = self._left()
        if self._thread is not None:
            self._thread.join(timeout=DEADLINE)
        return words

    def renew(self) -> list[str]:
        """Let it listen, with an empty home and log, for another test; what still ran on it, in words."""
        self.thaw()
        self.kill_sessions()
        words = self._left()
        if self._sshd is None:
            self.start()
        shutil.rmtree(self.home)
        self.home.mkdir()
        self.log.clear()
        return words

    def _left(self) -> list[str]:
        left = still_there(self.processes())
        words = [f"{self.name}: {shlex.join(cmdline(process))}" for process in left]
        end(self.processes)
        return words


class Hosts(Sequence[Host]):
    """Some hosts, and the user's side of them: a key, known_hosts, an ssh_config.

    Attributes:
        config: the path of an ssh_config in which each host stands under its name.
        key: the path of the key that they all accept.
        known_hosts: the path of the file with their host keys.
    """

    def __init__(self, folder: Path, hosts: Sequence[Host], key: Path) -> None:
        self.folder, self.key = folder, key
        self.config, self.known_hosts = folder / "ssh_config", folder / "known_hosts"
        self._hosts = list(hosts)

    def __getitem__(self, index):
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def names(self) -> tuple[str, ...]:
        """Their names in the ssh_config."""
        return tuple(host.name for host in self._hosts)

    def write(self, *more: str) -> None:
        """Write known_hosts and ssh_config, with these lines at the end of each host's block."""
        keys = [
            f"{known_hosts_name(host.address, host.port)} {' '.join(Path(f'{host.hostkey}.pub').read_text().split()[:2])}"
            for host in self._hosts
        ]
        self.known_hosts.write_text("\n".join(keys) + "\n")
        self.config.write_text("\n".join(self.block(host, *more) for host in self._hosts))

    def block(self, host: Host, *more: str) -> str:
        """A host's lines in the ssh_config."""
        lines = (
            f"HostName {host.address}", f"Port {host.port}", f"User {getpass.getuser()}", f'IdentityFile "{self.key}"',
            "IdentitiesOnly yes", "IdentityAgent none", f'UserKnownHostsFile "{self.known_hosts}"',
            "GlobalKnownHostsFile none", *more,
        )  # fmt: skip
        return f"Host {host.name}\n" + "".join(f"  {line}\n" for line in lines)


@contextmanager
def masters(hosts: Hosts, *lines: str) -> Iterator[dict[str, str]]:
    """Variables with which OpenSSH's client knows the hosts, and has its masters in a folder of their own, whose name is short as a socket's
    must be. The masters end with the hosts' sessions."""
    with tempfile.TemporaryDirectory(prefix="masters-", dir="/tmp") as folder:
        home = Path(folder, "home")
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh" / "config").write_text(
            "".join(f"{line}\n" for line in lines) + hosts.config.read_text()
        )
        yield {"HOME": str(home), "XDG_RUNTIME_DIR": folder}


@contextmanager
def codes(folder: Path, accepted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Arguments of `loopback` for a host that wants a key and then a code, by PAM; each of these codes lets in once.

    Mark the test ``needs("root", "namespaces")``: PAM's configuration is the host's own, in a mount.
    """
    services = folder / "pam.d"
    services.mkdir(parents=True)
    (folder / "codes").write_text("".join(f"{code}\n" for code in accepted))
    check = folder / "check"
    check.write_text(
        f'#!/bin/sh\ncode=$(tr -d \'\\0\')\ngrep -qx "$code" {folder}/codes && sed -i "/^$code$/d" {folder}/codes\n'
    )
    check.chmod(0o755)
    rules = [f"auth required pam_exec.so quiet expose_authtok {check}"]
    rules += ["auth required pam_permit.so"]  # pam_exec sets no credentials
    rules += [f"{kind} required pam_permit.so" for kind in ("account", "session", "password")]
    (services / "sshd").write_text("\n".join(rules) + "\n")
    options = ["UsePAM yes", "KbdInteractiveAuthentication yes", "AuthenticationMethods publickey,keyboard-interactive",
               "PermitRootLogin yes"]  # fmt: skip  # otherwise sshd gives PAM another code than root's
    yield {"options": options, "before": f"mount --bind {shlex.quote(str(services))} /etc/pam.d"}


@cache
def shared_code() -> Path:
    """Where all hosts and pods of this process have skymagic's code."""
    folder = Path(tempfile.mkdtemp(prefix="code-of-hosts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def share_code(home: Path) -> None:
    """Let a host's HOME have skymagic's code once any has: to unpack and compile it in each takes 0.6 s of CPU; twice is safe."""
    own = home / ".skymagic"
    own.mkdir(mode=0o700, exist_ok=True)
    if not (own / "code").exists():
        (own / "code").symlink_to(shared_code())


@contextmanager
def loopback(
    folder: Path,
    count: int = 1,
    *,
    env: dict[str, str] | None = None,
    options: Sequence[str] = (),
    home: str = "home",
    names: Sequence[str] = (),
    before: str = "",
) -> Iterator[Hosts]:
    """Unprivileged sshd's on 127.0.0.2, 127.0.0.3, …; mark the test ``needs("sshd")``.

    They share this machine's network, files and hostname. At the end nothing may run on them any more.

    Args:
        folder: an empty folder; the hosts' homes are in it.
        count: how many.
        env: further variables of their sessions.
        options: lines of sshd_config, before all others: the first one of a kind counts.
        home: the name of the folder that is a host's HOME.
        names: what they are called, instead of h1, h2, …
        before: sh that each runs first (`Host`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = keygen(folder / "key")
    hosts: list[Host] = []
    with closing(hosts):
        for number, name in enumerate(names or [f"h{number}" for number in range(1, count + 1)], 1):
            address = f"127.0.0.{number + 1}"
            hosts.append(
                Host(
                    name,
                    address,
                    folder / name,
                    Path(f"{key}.pub"),
                    env or {},
                    options,
                    home,
                    before,
                )
            )
            hosts[-1].start()
        made = Hosts(folder, hosts, key)
        made.write()
        yield made


@contextmanager
def lent(hosts: Hosts, folder: Path) -> Iterator[Hosts]:
    """The same hosts for another test: to start two with their keys takes 0.3 s.

    Args:
        folder: what the test writes into (`Hosts.folder`).
    """
    accepted = Path(f"{hosts.key}.pub")
    private, public = hosts.key.read_text(), accepted.read_text()
    hosts.folder = folder
    try:
        yield hosts
    finally:
        left = [words for host in hosts for words in host.renew()]
        hosts.key.write_text(private)
        hosts.key.chmod(0o600)
        accepted.write_text(public)
        hosts.write()
    assert not left, f"still running on the hosts: {left}"


@contextmanager
def closing(hosts: Sequence[Host]) -> Iterator[None]:
    """Close these hosts at the end; what still runs on them then is a failure, unless there is another."""
    try:
        yield
    except BaseException:
        for host in hosts:
            host.close()
        raise
    left = [words for host in hosts for words in host.close()]
    assert not left, f"still running on the hosts: {left}"


def _signal(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(signum)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        _signal(process, signal.SIGKILL)
    still_there(processes)


def still_there(
    processes: Sequence[psutil.Process], timeout: float = DEADLINE
) -> list[psutil.Process]:
    """Those of these processes that have not ended when so many seconds have gone by; returns as soon as all have."""
    end = time.monotonic() + timeout
    left = {fd: each for each in processes if (fd := _pidfd(each)) is not None}
    with selectors.DefaultSelector() as selector:
        for fd in left:
            selector.register(fd, selectors.EVENT_READ)
        alive = dict(left)
        while alive and (remaining := end - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                selector.unregister(key.fd)
                del alive[key.fd]
    for fd in left:
        os.close(fd)
    return list(alive.values())


def _pidfd(process: psutil.Process) -> int | None:
    """Readable once the process has ended, also while nobody has asked for its status: an orphan's may stay for seconds."""
    try:
        return os.pidfd_open(process.pid) if process.is_running() else None
    except OSError:
        return None
