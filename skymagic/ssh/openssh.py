"""OpenSSH's own client: logins that paramiko has not (one-time codes, Kerberos, hardware keys, a site's ProxyCommand), and host keys as it checks them.

A **master** is an ssh process that holds the connection (ssh_config(5), ControlMaster). It listens at a socket, and each channel is one more
ssh that asks it for a shell: nobody logs in again. One that the user has open is used; else one is opened, and what it asks is asked here::

    ssh -fNM ──▶ master ◀── SOCKET ◀── ssh -S SOCKET … 'exec /bin/sh -s'     a channel
       └─ SSH_ASKPASS ──▶ a socket of this process ──▶ ask()                 a prompt in the notebook: in no argument, file or log

A master that was opened here stays for ten minutes after its last channel, so that another pool, or another kernel that attaches, asks nobody.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from skymagic.errors import HostError
from skymagic.ssh.command import CommandChannel
from skymagic.ssh.config import CONNECT_TIMEOUT, Endpoint
from skymagic.ssh.dial import POLL_INTERVAL, Cancellation
from skymagic.ssh.host import ChannelConnection
from skymagic.ssh.hostlist import expand
from skymagic.ssh.login import PREFERRED_CIPHERS, preferred_first
from skymagic.wire.record import why_unsafe
from skymagic.wire.untrusted import sanitized

Ask = Callable[[str], str]
LOGIN_SECONDS = 60.0
"""For which a login may take while nobody is asked anything."""
REFUSED_SECONDS = 60.0
"""For which a login that failed is not tried again in the background: sites lock accounts. A master that the user opens is used at once."""
HELLO_BYTES = 12
"""What a master says to whoever connects (OpenSSH's PROTOCOL.mux): a length, MUX_MSG_HELLO and a version."""
LOST = 255
"""Exit status of ssh where it does not know the shell's."""
OPTIONS = (
    "-T",
    "-x",
    "-a",
    "-oClearAllForwardings=yes",
    "-oPermitLocalCommand=no",
    "-oLogLevel=ERROR",
)
"""Of a master that is opened here: nothing that is for a person's own session."""
DEFAULTS = {
    "controlpersist": ("no", "600"),
    "serveraliveinterval": ("0", "5"),
    "connecttimeout": ("none", f"{CONNECT_TIMEOUT:.0f}"),
}
"""Of settings that the user has not made: OpenSSH's → ours. A master stays for so many seconds after its last channel; a host that does not
answer for 15 s is lost, as over paramiko."""
NO_CONFIG = ("-F", "none", "-o", "ControlMaster=no", "-o", "ProxyCommand=false")
"""A channel needs no configuration, and where its master is gone it must not log in by itself."""
ASKPASS = """\
import os, socket, sys
asker = socket.socket(socket.AF_UNIX)
asker.connect(os.environ["SKYMAGIC_ASKPASS"])
asker.sendall(f"{os.environ.get('SSH_ASKPASS_PROMPT', '')}\\0{sys.argv[1]}".encode())
asker.shutdown(socket.SHUT_WR)
answer = asker.makefile("rb").read()
sys.stdout.buffer.write(answer)
sys.exit(not answer)
"""


_refused: dict[str, tuple[float, HostError]] = {}
"""By a master's socket: when a login that failed in the background may be tried again there, and how it failed."""


class OpenSSHConnection(ChannelConnection):
    """Shells on a host over a master.

    Args:
        label: what the user calls the host.
        path: the master's socket. held: a connection to it: at its end once the master is gone, and until then the master stays.
    """

    def __init__(self, label: str, path: str, held: socket.socket) -> None:
        command = ("ssh", *NO_CONFIG, "-S", path, "skymagic")
        trial = f"ssh -S {shlex.quote(path)} {label} true"
        super().__init__(label, trial, lambda timeout: CommandChannel(command, os.environ, LOST))
        self.path, self._held = path, held

    @property
    def alive(self) -> bool:
        """Whether its master is there; one that was opened here ends when the host does not answer any more."""
        try:
            return self._open and bool(self._held.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def release(self) -> None:
        """End all channels, and leave the master; twice is safe."""
        super().release()
        self._held.close()


def connect(endpoint: Endpoint, ask: Ask | None, cancellation: Cancellation) -> OpenSSHConnection:
    """Shells on a host, over the master that is there, or a new one.

    Args:
        ask: answers what ssh asks; called on this thread. Without it a login that asks anything fails.

    Raises:
        HostError: there is no such client here, or it cannot log in: in its own words.
    """
    if shutil.which("ssh") is None or os.name == "nt":
        why = (
            "OpenSSH on Windows has no ControlMaster"
            if os.name == "nt"
            else "there is no program ssh on the PATH"
        )
        raise HostError(
            endpoint.label,
            f"--ssh openssh does not work here: {why}",
            "--ssh paramiko needs no program",
        )
    told = _ran(endpoint.label, _ssh(endpoint, "-G"), cancellation, None, f"ssh {endpoint.label}")
    settings = dict(line.split(" ", 1) for line in told.splitlines() if " " in line)
    path = settings.get("controlpath", "none")
    if path == "none":
        path = str(_folder() / sha256(told.encode()).hexdigest()[:16])
    by_hand = shlex.join(_ssh(endpoint, "-fNM", "-S", path))
    with _turn(path, cancellation):
        if (held := _held(endpoint.label, path)) is None:
            until, failure = _refused.get(path, (0.0, None))
            if failure is not None and ask is None and time.monotonic() < until:
                raise failure
            try:
                _ran(
                    endpoint.label,
                    _master(endpoint, path, settings, ask),
                    cancellation,
                    ask,
                    by_hand,
                )
            except HostError as failed:
                if ask is None:
                    _refused[path] = time.monotonic() + REFUSED_SECONDS, failed
                raise
            held = _held(endpoint.label, path)
    if held is None:
        raise HostError(endpoint.label, f"its OpenSSH master is not at {path}", f"try: {by_hand}")
    return OpenSSHConnection(endpoint.label, path, held)


def _master(
    endpoint: Endpoint, path: str, settings: Mapping[str, str], ask: Ask | None
) -> list[str]:
    """ssh that opens a master and goes to the background."""
    unsaid = (
        f"-o{name}={value}"
        for name, (unset, value) in DEFAULTS.items()
        if settings.get(name, unset) == unset
    )
    # the ciphers that the user allows, in our order: AES-GCM is a third faster here than the default
    ciphers = "-oCiphers=" + ",".join(
        preferred_first(PREFERRED_CIPHERS, settings["ciphers"].split(","))
    )
    # no key is accepted silently, whatever the user has set: secrets go there
    strict = "yes" if settings.get("stricthostkeychecking") in ("true", "yes") else "ask"
    asking = (f"-oStrictHostKeyChecking={strict}", f"-oBatchMode={'no' if ask else 'yes'}")
    return _ssh(endpoint, "-fNM", "-S", path, *OPTIONS, *unsaid, ciphers, *asking)


def _ssh(endpoint: Endpoint, *options: str) -> list[str]:
    """ssh for a host as the user wrote it; skymagic follows $HOME, which ssh does not."""
    import pwd

    (spec,) = expand((endpoint.label,))
    config, home = Path.home() / ".ssh" / "config", Path(pwd.getpwuid(os.getuid()).pw_dir)
    elsewhere = (
        ["-F", str(config)] if Path.home().resolve() != home.resolve() and config.exists() else []
    )
    port, user = ["-p", str(spec.port)] if spec.port else [], ["-l", spec.user] if spec.user else []
    return ["ssh", *options, *elsewhere, *port, *user, "--", spec.name]


def _folder() -> Path:
    """Return the folder in which masters listen. It is on this machine, for homes are shared, and sockets need short names.

    Another user can occupy the usual name in a shared place first. Then a folder with a random name is used, which later calls
    and other processes find again, because it is this user's alone.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    parent = runtime if runtime.is_dir() else Path("/tmp")
    usual = parent / f"skymagic-ssh-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    for folder in [usual, *sorted(parent.glob(f"{usual.name}-*"))]:
        if why_unsafe(str(folder)) is None:
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=parent))


@contextlib.contextmanager
def _turn(path: str, cancellation: Cancellation) -> Iterator[None]:
    """One after the other, threads and processes: two that open a master at once would ask twice, and one would stay without a socket."""
    import fcntl

    with open(_folder() / f"{sha256(path.encode()).hexdigest()[:16]}.lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                cancellation.check()
                time.sleep(POLL_INTERVAL)
        yield


def _held(label: str, path: str) -> socket.socket | None:
    """A connection to the master at this path; None where there is none. What a dead one has left is removed."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(CONNECT_TIMEOUT)
    try:
        sock.connect(path)
        if len(sock.recv(HELLO_BYTES, socket.MSG_WAITALL)) == HELLO_BYTES:
            sock.setblocking(False)
            return sock
    except ConnectionRefusedError:
        Path(path).unlink(missing_ok=True)
    except (FileNotFoundError, ConnectionResetError):
        pass
    except OSError as problem:
        sock.close()
        reason = f"the OpenSSH master at {path} does not answer: {problem.strerror or problem}"
        raise HostError(
            label, reason, f"end it: ssh -S {shlex.quote(path)} -O exit {label}"
        ) from problem
    sock.close()
    return None


# ------------------------------------------------------------------------------------ what ssh asks


def _ran(
    label: str, command: Sequence[str], cancellation: Cancellation, ask: Ask | None, by_hand: str
) -> str:
    """What ssh has printed, once it has ended well; what it asks meanwhile, `ask` answers.

    Args:
        by_hand: a command line by which the user can do the same in a terminal.

    Raises:
        HostError: it has failed, it takes too long, or nobody has answered.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ask-", dir=_folder(), ignore_cleanup_errors=True)
        )
        out, errors = (stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(2))
        asking = stack.enter_context(socket.socket(socket.AF_UNIX))
        asking.bind(f"{folder}/socket")
        asking.listen()
        asking.settimeout(POLL_INTERVAL)
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=_askpass(folder),
            start_new_session=True,
        )
        try:
            answered = _attended(program, asking, cancellation, ask)
        finally:
            if program.poll() is None:  # else a master may be about to leave this group
                os.killpg(program.pid, signal.SIGKILL)  # its askpass too
                program.wait()
        said = [
            os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace") for file in (out, errors)
        ]
    if program.returncode == 0:
        return said[0]
    lines = [line for line in said[1].splitlines() if line.strip(" @\r")]
    reason = "\n  ".join(line.strip("@ ") for line in lines[-20:]) or "nothing was said"
    why = "" if answered and ask else "nobody could be asked; "
    remedy = f"log in once in a terminal, and skymagic uses that connection: {by_hand}"
    raise HostError(label, f"OpenSSH cannot log in: {why}{reason}", remedy)


def _askpass(folder: str) -> dict[str, str]:
    """An environment in which ssh asks whoever listens in this folder."""
    script = Path(folder, "askpass")
    script.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -ISc {shlex.quote(ASKPASS)} "$1"\n'
    )
    script.chmod(0o700)
    asks = {
        "SSH_ASKPASS": str(script),
        "SSH_ASKPASS_REQUIRE": "force",
        "SKYMAGIC_ASKPASS": f"{folder}/socket",
    }
    return {
        "DISPLAY": "none",
        **os.environ,
        **asks,
    }  # before 8.4, a DISPLAY and no terminal lead to SSH_ASKPASS


def _attended(
    program: subprocess.Popen[bytes],
    asking: socket.socket,
    cancellation: Cancellation,
    ask: Ask | None,
) -> bool:
    """Answer what a program asks until it has ended, or takes too long; False once something stays without an answer."""
    end = time.monotonic() + LOGIN_SECONDS
    while program.poll() is None and time.monotonic() < end:
        cancellation.check()
        with contextlib.suppress(TimeoutError):
            client, _ = asking.accept()
            with client:
                client.settimeout(LOGIN_SECONDS)
                kind, _, prompt = (
                    client.makefile("rb").read().decode(errors="replace").partition("\0")
                )
                prompt = sanitized(prompt)  # the host may have written it
                note = kind == "none"  # a hardware key waits for a touch, and ssh for no answer
                answer = (
                    ask(f"{prompt} (then press Enter here) " if note else prompt) if ask else ""
                )
                if not (answer or note):
                    return False
                client.sendall(answer.encode() if not note else b"")
            end = time.monotonic() + LOGIN_SECONDS
    return True
