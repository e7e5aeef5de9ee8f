"""OpenSSH's own client, for logins and host key checks that paramiko does not support.

These are one-time codes, Kerberos, hardware keys and a site's ProxyCommand.

A **master** is an ssh process that holds the connection (ssh_config(5), ControlMaster). It listens
on a socket, and each channel is another ssh process that asks it for a shell, without another
login. If the user has a master open, it is used. Otherwise one is opened, and its prompts appear
here::

    ssh -fNM ──▶ master ◀── SOCKET ◀── ssh -S SOCKET … 'exec /bin/sh -s'     a channel
       └─ SSH_ASKPASS ──▶ a socket of this process ──▶ ask()                 a notebook prompt

An answer appears in no argument, file or log. A master opened here stays for ten minutes after its
last channel, so that another pool, or another kernel that attaches, does not have to ask again.
"""

from __future__ import annotations

import contextlib
import logging
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

logger = logging.getLogger(__name__)

Ask = Callable[[str], str]
LOGIN_SECONDS = 60.0
"""Seconds that a login may take while no prompt is open."""
REFUSED_SECONDS = 60.0
"""Seconds for which a failed login is not retried in the background, because sites lock accounts.

A master that the user opens is used at once.
"""
HELLO_BYTES = 12
"""Length of a master's greeting (OpenSSH's PROTOCOL.mux): a length, MUX_MSG_HELLO and a version."""
LOST = 255
"""Exit status of ssh if it does not know the shell's."""
OPTIONS = (
    "-T",
    "-x",
    "-a",
    "-oClearAllForwardings=yes",
    "-oPermitLocalCommand=no",
    "-oLogLevel=ERROR",
)
"""Options of a master opened here; they disable everything meant for an interactive session."""
DEFAULTS = {
    "controlpersist": ("no", "600"),
    "serveraliveinterval": ("0", "5"),
    "connecttimeout": ("none", f"{CONNECT_TIMEOUT:.0f}"),
}
"""Defaults for settings that the user has not made: OpenSSH's → skymagic's.

A master stays for 600 seconds after its last channel. A host that does not answer for 15 s is lost,
as over paramiko.
"""
NO_CONFIG = ("-F", "none", "-o", "ControlMaster=no", "-o", "ProxyCommand=false")
"""A channel needs no configuration, and must not log in by itself if its master is gone."""
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
"""Master's socket → time until which a failed login is not retried in the background, and its
error.
"""


class OpenSSHConnection(ChannelConnection):
    """Shells on a host over a master.

    Args:
        label: the user's name for the host.
        path: the master's socket.
        held: a connection to the master, which stays until it is closed. It ends once the master is
            gone.
    """

    def __init__(self, label: str, path: str, held: socket.socket) -> None:
        command = ("ssh", *NO_CONFIG, "-S", path, "skymagic")
        trial = f"ssh -S {shlex.quote(path)} {label} true"
        super().__init__(label, trial, lambda timeout: CommandChannel(command, os.environ, LOST))
        self.path, self._held = path, held

    @property
    def alive(self) -> bool:
        """True while its master runs; a master opened here ends when the host stops answering."""
        try:
            return self._open and bool(self._held.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def release(self) -> None:
        """End all channels, but not the master. Safe to call twice."""
        super().release()
        self._held.close()


def connect(endpoint: Endpoint, ask: Ask | None, cancellation: Cancellation) -> OpenSSHConnection:
    """Return a connection over the existing master, or a new one.

    Args:
        ask: answers ssh's prompts; called on this thread. Without it a login with a prompt fails.

    Raises:
        HostError: ssh is not available here, or cannot log in, with its own message.
    """
    if shutil.which("ssh") is None or os.name == "nt":
        reason = (
            "OpenSSH on Windows has no ControlMaster"
            if os.name == "nt"
            else "there is no program ssh on the PATH"
        )
        raise HostError(
            endpoint.label,
            f"--ssh openssh does not work here: {reason}",
            "--ssh paramiko needs no program",
            code="openssh-missing",
        )
    output = _run_client(
        endpoint.label, _ssh(endpoint, "-G"), cancellation, None, f"ssh {endpoint.label}"
    )
    settings = dict(line.split(" ", 1) for line in output.splitlines() if " " in line)
    path = settings.get("controlpath", "none")
    if path == "none":
        path = str(_folder() / sha256(output.encode()).hexdigest()[:16])
    by_hand = shlex.join(_ssh(endpoint, "-fNM", "-S", path))
    with _opening_lock(path, cancellation):
        if (held := _connect_to_master(endpoint.label, path)) is None:
            until, failure = _refused.get(path, (0.0, None))
            if failure is not None and ask is None and time.monotonic() < until:
                raise failure
            try:
                _run_client(
                    endpoint.label,
                    _master(endpoint, path, settings, ask),
                    cancellation,
                    ask,
                    by_hand,
                )
            except HostError as failed:
                if ask is None:
                    logger.warning(
                        "login refused, not tried again for a while: host=%s seconds=%s",
                        endpoint.label,
                        REFUSED_SECONDS,
                    )
                    _refused[path] = time.monotonic() + REFUSED_SECONDS, failed
                raise
            held = _connect_to_master(endpoint.label, path)
    if held is None:
        raise HostError(
            endpoint.label,
            f"its OpenSSH master is not at {path}",
            f"try: {by_hand}",
            code="openssh-no-master",
        )
    logger.info("connection over OpenSSH is up: host=%s", endpoint.label)
    return OpenSSHConnection(endpoint.label, path, held)


def _master(
    endpoint: Endpoint, path: str, settings: Mapping[str, str], ask: Ask | None
) -> list[str]:
    """Return the ssh command that opens a master and goes to the background."""
    defaults = (
        f"-o{name}={value}"
        for name, (unset, value) in DEFAULTS.items()
        if settings.get(name, unset) == unset
    )
    # The user's allowed ciphers, reordered: AES-GCM is a third faster here than the default.
    ciphers = "-oCiphers=" + ",".join(
        preferred_first(PREFERRED_CIPHERS, settings["ciphers"].split(","))
    )
    # Never accept a key silently, whatever the user has set: secrets go there.
    strict = "yes" if settings.get("stricthostkeychecking") in ("true", "yes") else "ask"
    asking = (f"-oStrictHostKeyChecking={strict}", f"-oBatchMode={'no' if ask else 'yes'}")
    return _ssh(endpoint, "-fNM", "-S", path, *OPTIONS, *defaults, ciphers, *asking)


def _ssh(endpoint: Endpoint, *options: str) -> list[str]:
    """Return the ssh command for a host.

    It follows $HOME as skymagic does, which ssh alone does not.
    """
    import pwd

    (spec,) = expand((endpoint.label,))
    config, home = Path.home() / ".ssh" / "config", Path(pwd.getpwuid(os.getuid()).pw_dir)
    config_option = (
        ["-F", str(config)] if Path.home().resolve() != home.resolve() and config.exists() else []
    )
    port, user = ["-p", str(spec.port)] if spec.port else [], ["-l", spec.user] if spec.user else []
    return ["ssh", *options, *config_option, *port, *user, "--", spec.name]


def _folder() -> Path:
    """Return the folder for sockets of masters.

    It is on this machine, because homes are shared and sockets need short names. Another user can
    occupy the usual name in a shared folder first. Then a folder with a random name is used, which
    later calls and other processes find again, because it is this user's alone.
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
def _opening_lock(path: str, cancellation: Cancellation) -> Iterator[None]:
    """Serialize the opening of a master between threads and processes.

    If two opened one at once, they would ask twice, and one would be left without a socket.
    """
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


def _connect_to_master(label: str, path: str) -> socket.socket | None:
    """Connect to the master at this path, or return None if there isn't one.

    Remove a dead one's socket.
    """
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
            label,
            reason,
            f"end it: ssh -S {shlex.quote(path)} -O exit {label}",
            code="openssh-master-hangs",
        ) from problem
    sock.close()
    return None


# -- prompts of ssh --------------------------------------------------------------------------------


def _run_client(
    label: str, command: Sequence[str], cancellation: Cancellation, ask: Ask | None, by_hand: str
) -> str:
    """Run ssh and return its output; `ask` answers its prompts meanwhile.

    Args:
        by_hand: a command line with which the user can do the same in a terminal.

    Raises:
        HostError: it failed, took too long, or a prompt was not answered.
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
            answered = _answer_prompts(program, asking, cancellation, ask)
        finally:
            if program.poll() is None:  # otherwise a master may be about to leave this group
                os.killpg(program.pid, signal.SIGKILL)  # includes its askpass
                program.wait()
        outputs = [
            os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace") for file in (out, errors)
        ]
    if program.returncode == 0:
        return outputs[0]
    lines = [line for line in outputs[1].splitlines() if line.strip(" @\r")]
    reason = "\n  ".join(line.strip("@ ") for line in lines[-20:]) or "nothing was said"
    why = "" if answered and ask else "nobody could be asked; "
    remedy = f"log in once in a terminal, and skymagic uses that connection: {by_hand}"
    raise HostError(label, f"OpenSSH cannot log in: {why}{reason}", remedy, code="openssh-login")


def _askpass(folder: str) -> dict[str, str]:
    """Return an environment in which ssh sends its prompts to the socket in this folder."""
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
    # before OpenSSH 8.4, SSH_ASKPASS is used only with a DISPLAY and no terminal
    return {"DISPLAY": "none", **os.environ, **asks}


def _answer_prompts(
    program: subprocess.Popen[bytes],
    asking: socket.socket,
    cancellation: Cancellation,
    ask: Ask | None,
) -> bool:
    """Answer a program's prompts until it ends or takes too long.

    Return False if a prompt stays unanswered.
    """
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
                prompt = sanitized(prompt)  # the text may come from the host
                note = kind == "none"  # a hardware key waits for a touch; ssh expects no answer
                answer = (
                    ask(f"{prompt} (then press Enter here) " if note else prompt) if ask else ""
                )
                if not (answer or note):
                    return False
                client.sendall(answer.encode() if not note else b"")
            end = time.monotonic() + LOGIN_SECONDS
    return True
