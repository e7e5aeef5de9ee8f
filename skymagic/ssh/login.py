"""SSH handshake, host key check and public-key authentication over paramiko.

Also keeps paramiko from sending packets to closed channels.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymagic.errors import HostError
from skymagic.ssh.config import Endpoint
from skymagic.ssh.dial import Cancellation
from skymagic.ssh.keys import (
    KeyAttempts,
    KnownHosts,
    KnownKey,
    candidates,
    fingerprint,
    known_hosts_name,
)

if TYPE_CHECKING:
    import paramiko

    from skymagic.ssh.proxy_command import PipeStream

    Stream = socket.socket | paramiko.Channel | PipeStream


# -- closed channels -------------------------------------------------------------------------------


def send_nothing_after_close(transport: paramiko.Transport) -> None:
    """Make a transport drop packets for a channel after its CLOSE; call this before it is started.

    A paramiko channel decides under its lock what to send, but sends it after releasing the lock.
    When a process ends, the reply to that (CLOSE) can overtake a packet that another thread is
    about to send (EOF, data). OpenSSH ends the whole connection at such a packet (``ieof packet
    referred to nonexistent channel``).
    """
    from paramiko.common import (
        MSG_CHANNEL_CLOSE,
        MSG_CHANNEL_DATA,
        MSG_CHANNEL_EOF,
        MSG_CHANNEL_EXTENDED_DATA,
        MSG_CHANNEL_OPEN_SUCCESS,
    )

    patched: Any = transport
    send, open_channel = patched._send_message, patched.open_channel
    closed: set[bytes] = set()
    """The host's channel numbers, as they appear in packets (RFC 4254, 5.3)."""

    def send_message(data: Any) -> None:
        """Send a packet. Calls are serialized: paramiko holds a lock around them."""
        packet = data.asbytes()
        kind, number = packet[0], packet[1:5]
        if (
            kind in (MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA, MSG_CHANNEL_EOF)
            and number in closed
        ):
            return
        if kind == MSG_CHANNEL_CLOSE:
            closed.add(number)
        elif kind == MSG_CHANNEL_OPEN_SUCCESS:  # a channel that the host opened
            closed.discard(number)
        send(data)

    def open_patched(*args: Any, **kwargs: Any) -> paramiko.Channel:
        """Open a channel; the host may reuse the number of a closed one."""
        channel: paramiko.Channel = open_channel(*args, **kwargs)
        closed.discard(channel.remote_chanid.to_bytes(4, "big"))
        return channel

    patched._send_message, patched.open_channel = send_message, open_patched


class UnsupportedLogin(HostError):
    """The host requires a login that paramiko does not support, and OpenSSH may support."""


# -- the handshake ---------------------------------------------------------------------------------


LOGGER = "skymagic.ssh.paramiko"
SECURITY_KEYS = ("~/.ssh/id_ecdsa_sk", "~/.ssh/id_ed25519_sk")
"""Hardware keys that OpenSSH uses by default, and paramiko only through an agent."""
PREFERRED_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
"""Ciphers to prefer: in paramiko, AES-GCM is several times faster than counter mode with a separate
MAC.
"""


def handshake(stream: Stream, endpoint: Endpoint, cancellation: Cancellation) -> paramiko.Transport:
    """Do the SSH key exchange over a stream; the host is unverified until `check_host_key`.

    Raises:
        HostError: it is not an SSH server.
    """
    import paramiko

    known_keys = KnownHosts(endpoint.known_hosts).entries_for(_known_hosts_names(endpoint))
    # PipeStream has the methods that paramiko calls
    transport = paramiko.Transport(stream)  # type: ignore[arg-type]
    send_nothing_after_close(transport)
    try:
        _silence_log(transport)
        _prefer_known_algorithms(transport, [entry.key_type for entry in known_keys])
        done = threading.Event()
        transport.start_client(event=done)
        if not cancellation.wait(done, endpoint.timeout) or not transport.is_active():
            raise _no_ssh_server(endpoint, transport.get_exception())
        return transport
    except BaseException:
        close(transport)
        raise


def close(transport: paramiko.Transport) -> None:
    """Close a transport and join its thread, which its own close does not. Safe to call twice."""
    transport.close()
    if transport.ident is not None and transport is not threading.current_thread():
        transport.join(timeout=5.0)


def check_host_key(transport: paramiko.Transport, endpoint: Endpoint) -> None:
    """Verify the host's key against known_hosts.

    Raises:
        HostError: it is unknown, changed or revoked.
    """
    offered, names = transport.get_remote_server_key(), _known_hosts_names(endpoint)
    key_type, key, known_hosts = (
        offered.get_name(),
        offered.get_base64(),
        KnownHosts(endpoint.known_hosts),
    )
    status = known_hosts.check(names, key_type, key)
    # As in OpenSSH, a line without a port counts for every port.
    if status.state == "unknown" and endpoint.port != 22 and not endpoint.host_key_alias:
        portless = known_hosts.check((known_hosts_name(endpoint.hostname, 22),), key_type, key)
        status = portless if portless.state in ("known", "revoked") else status
    description = f"{key_type} {fingerprint(offered.asbytes())}"
    if status.state == "unknown":
        raise _unknown_key(endpoint, description)
    if status.state != "known":
        raise _changed_key(endpoint, names[0], description, status.entries, status.state)


def authenticate(
    transport: paramiko.Transport,
    endpoint: Endpoint,
    ask: Callable[[str], str] | None,
    cancellation: Cancellation,
) -> None:
    """Log in with one of the user's keys.

    Args:
        ask: asks the user for the passphrase of a key; None if the notebook is unattended.
        cancellation: ends the wait for the host's answers.

    Raises:
        UnsupportedLogin: the host requires more than a key, or OpenSSH may be able to log in.
        HostError: the host accepts none of the keys.
    """
    import paramiko

    attempts = KeyAttempts()
    for name, key in candidates(endpoint, ask, attempts):
        done = threading.Event()
        try:
            transport.auth_publickey(endpoint.user, key, event=done)
            answered = cancellation.wait(done, 30.0)
        except (paramiko.SSHException, OSError, EOFError):
            answered = True
        if transport.is_authenticated():
            return
        attempts.refused.append(name)
        problem = transport.get_exception()
        partial = isinstance(problem, paramiko.ssh_exception.PartialAuthentication)
        if isinstance(
            problem, paramiko.ssh_exception.PartialAuthentication | paramiko.BadAuthenticationType
        ):
            methods = ", ".join(problem.allowed_types)
            raise UnsupportedLogin(
                endpoint.label,
                f"the host requires more than a key: {methods}"
                if partial
                else f"the host accepts no keys, but: {methods}",
                "with --ssh openssh, ssh asks you for a password or code",
                code="host-other-login",
            )
        if not answered or not transport.is_active():
            break
    failure = _no_key_accepted(endpoint, attempts, transport.is_active())
    if _more_to_try(transport, endpoint):
        raise UnsupportedLogin(endpoint.label, failure.reason, failure.hint, code=failure.code)
    raise failure


def _more_to_try(transport: paramiko.Transport, endpoint: Endpoint) -> bool:
    """Return True if OpenSSH could try more: passwords, codes, Kerberos, hardware keys."""
    import paramiko

    names = (*endpoint.identities, *(() if endpoint.identities_given else SECURITY_KEYS))
    if any(name.endswith("_sk") and Path(name).expanduser().exists() for name in names):
        return True
    try:
        transport.auth_none(endpoint.user)
    except paramiko.BadAuthenticationType as problem:
        return set(problem.allowed_types) != {"publickey"}
    except (paramiko.SSHException, OSError, EOFError):
        pass
    return False


def _silence_log(transport: paramiko.Transport) -> None:
    """Keep paramiko's log out of the notebook, unless a level was set.

    It contains tracebacks of problems that skymagic reports as errors anyway.
    """
    log = logging.getLogger(LOGGER)
    if log.level == logging.NOTSET:
        log.setLevel(logging.CRITICAL + 1)
    transport.set_log_channel(LOGGER)


def _prefer_known_algorithms(transport: paramiko.Transport, key_types: list[str]) -> None:
    """Offer fast ciphers, and the host key types in known_hosts, first.

    The host then shows a key that can be verified.
    """
    options = transport.get_security_options()
    options.ciphers = preferred_first(PREFERRED_CIPHERS, tuple(options.ciphers))
    rsa = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
    preferred = tuple(
        itertools.chain.from_iterable(rsa.get(key_type, (key_type,)) for key_type in key_types)
    )
    options.key_types = preferred_first(preferred, tuple(options.key_types))


def preferred_first(preferred: Sequence[str], available: Sequence[str]) -> tuple[str, ...]:
    """Return what is available, preferred items first."""
    return tuple(dict.fromkeys([*(item for item in preferred if item in available), *available]))


def _known_hosts_names(endpoint: Endpoint) -> tuple[str, ...]:
    """Return the host's names in known_hosts."""
    if endpoint.host_key_alias:
        return (endpoint.host_key_alias.lower(),)
    return (known_hosts_name(endpoint.hostname, endpoint.port),)


def _unknown_key(endpoint: Endpoint, offered: str) -> HostError:
    remedy = f"if that is the host's key, accept it once in a terminal: {_command(endpoint)}"
    if endpoint.strict in ("no", "off", "accept-new"):
        remedy += (
            f"\n  (StrictHostKeyChecking {endpoint.strict} is ignored, because skymagic sends your "
            "data and secrets to the host)"
        )
    return HostError(
        endpoint.label, f"its host key is not known: {offered}", remedy, code="host-key-unknown"
    )


def _changed_key(
    endpoint: Endpoint, name: str, offered: str, entries: tuple[KnownKey, ...], state: str
) -> HostError:
    lines = ", ".join(dict.fromkeys(f"{entry.file} line {entry.line}" for entry in entries))
    if state == "revoked":
        return HostError(
            endpoint.label,
            f"its host key {offered} is revoked by {lines}",
            "ask who runs the host",
            code="host-key-revoked",
        )
    return HostError(
        endpoint.label,
        f"its host key has CHANGED: it shows {offered}, and {lines} has another one. "
        "Somebody may be listening in",
        f"only if you know why it changed: ssh-keygen -R '{name}' -f {entries[0].file}, "
        f"then once: {_command(endpoint)}",
        code="host-key-changed",
    )


def _command(endpoint: Endpoint) -> str:
    """Return the ssh command line that reaches this endpoint."""
    name, _, port = endpoint.label.rpartition(":")
    if name and port.isdigit() and (name.count(":") == 0 or name.endswith("]")):
        return f"ssh -p {port} {name.replace('[', '').replace(']', '')}"
    return f"ssh {endpoint.label}"


def _no_ssh_server(endpoint: Endpoint, problem: BaseException | None) -> HostError:
    address = f"{endpoint.hostname} port {endpoint.port}"
    if problem is None:
        reason = f"{address} accepted the connection, but sent nothing for {endpoint.timeout:.0f} s"
        return HostError(
            endpoint.label,
            reason,
            "is that sshd's port, or is the host overloaded?",
            code="host-no-ssh",
        )
    if "Incompatible" in str(problem) or type(problem).__name__ == "IncompatiblePeer":
        return HostError(
            endpoint.label,
            f"{address} supports none of the algorithms that paramiko supports: {problem}",
            "",
            code="host-no-ssh",
        )
    reason = f"{address} does not speak SSH: {str(problem) or 'it closed the connection'}"
    remedy = "is that sshd's port? It may also refuse more connections for now (MaxStartups)"
    return HostError(
        endpoint.label, reason, f"{remedy}. Try: {_command(endpoint)}", code="host-no-ssh"
    )


def _no_key_accepted(endpoint: Endpoint, attempts: KeyAttempts, active: bool) -> HostError:
    keys = ", ".join(attempts.refused) or "none"
    account = f"{endpoint.user}@{endpoint.hostname}"
    reason = f"{account} accepts none of your keys (tried: {keys})"
    if attempts.unused:
        reason += f"; not usable: {', '.join(attempts.unused)}"
    if not active and len(attempts.refused) > 1:
        reason += (
            "; the host ended the connection, maybe for too many keys "
            "(set IdentitiesOnly and IdentityFile in ~/.ssh/config)"
        )
    remedy = (
        f"is {endpoint.user!r} the right user? "
        f"To install a key there: ssh-copy-id -p {endpoint.port} {account}"
    )
    return HostError(endpoint.label, reason, remedy, code="host-no-key")
