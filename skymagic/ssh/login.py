"""From a socket to an authenticated transport: the host's key is checked, then the user's keys are tried."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from skymagic.errors import HostError
from skymagic.ssh.cancellation import Cancellation
from skymagic.ssh.config import Endpoint
from skymagic.ssh.keys import Tried, candidates
from skymagic.ssh.known_hosts import Entry, Known, fingerprint, known_hosts_name

if TYPE_CHECKING:
    import paramiko

    Stream = socket.socket | paramiko.Channel

LOG = "skymagic.ssh.paramiko"
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
"""First choices: several times faster here than counter mode with a separate checksum."""


def start(stream: Stream, endpoint: Endpoint, cancellation: Cancellation) -> paramiko.Transport:
    """An encrypted transport over this stream, to a host that is to be checked before anything is said to it.

    Raises:
        HostError: it is no SSH server.
    """
    import paramiko

    known = Known(endpoint.known_hosts).of(_names(endpoint))
    transport = paramiko.Transport(stream)
    try:
        _quiet(transport)
        _prefer(transport, [entry.kind for entry in known])
        done = threading.Event()
        transport.start_client(event=done)
        if not cancellation.wait(done, endpoint.timeout) or not transport.is_active():
            raise _no_server(endpoint, transport.get_exception())
        return transport
    except BaseException:
        end(transport)
        raise


def end(transport: paramiko.Transport) -> None:
    """Close a transport, and wait for its thread: its own close does not; twice is safe."""
    transport.close()
    if transport.ident is not None and transport is not threading.current_thread():
        transport.join(timeout=5.0)


def check(transport: paramiko.Transport, endpoint: Endpoint) -> None:
    """Hold the key that the host has shown against known_hosts.

    Raises:
        HostError: it is not known there, or another one is.
    """
    shown, names = transport.get_remote_server_key(), _names(endpoint)
    kind, key, known = shown.get_name(), shown.get_base64(), Known(endpoint.known_hosts)
    verdict = known.judge(names, kind, key)
    if verdict.state == "unknown" and endpoint.port != 22 and not endpoint.host_key_alias:
        portless = known.judge((known_hosts_name(endpoint.hostname, 22),), kind, key)
        verdict = portless if portless.state in ("known", "revoked") else verdict
    words = f"{kind} {fingerprint(shown.asbytes())}"
    if verdict.state == "unknown":
        raise _unknown(endpoint, words)
    if verdict.state != "known":
        raise _changed(endpoint, names[0], words, verdict.entries, verdict.state)


def authenticate(
    transport: paramiko.Transport,
    endpoint: Endpoint,
    ask: Callable[[str], str] | None,
    cancellation: Cancellation,
) -> None:
    """Log in with one of the user's keys.

    Raises:
        HostError: the host wants none of them.
    """
    import paramiko

    tried = Tried()
    for name, key in candidates(endpoint, ask, tried):
        done = threading.Event()
        try:
            transport.auth_publickey(endpoint.user, key, event=done)
            came = cancellation.wait(done, 30.0)
        except (paramiko.SSHException, OSError, EOFError):
            came = True
        if transport.is_authenticated():
            return
        tried.refused.append(name)
        problem = transport.get_exception()
        if isinstance(problem, paramiko.ssh_exception.PartialAuthentication):
            wants = ", ".join(problem.allowed_types)
            raise HostError(
                endpoint.label, f"the host wants more than a key: {wants}", "skymagic uses keys alone"
            )
        if isinstance(problem, paramiko.BadAuthenticationType):
            wants = ", ".join(problem.allowed_types)
            raise HostError(
                endpoint.label, f"the host takes no keys, only: {wants}", "skymagic uses keys alone"
            )
        if not came or not transport.is_active():
            break
    raise _refused(endpoint, tried, transport.is_active())


def _quiet(transport: paramiko.Transport) -> None:
    """What paramiko logs (tracebacks of what is an error here anyway) stays out of the notebook, unless somebody sets a level."""
    log = logging.getLogger(LOG)
    if log.level == logging.NOTSET:
        log.setLevel(logging.CRITICAL + 1)
    transport.set_log_channel(LOG)


def _prefer(transport: paramiko.Transport, kinds: list[str]) -> None:
    """The fast ciphers, and those kinds of host key that are known, first."""
    options = transport.get_security_options()
    options.ciphers = _first(CIPHERS, tuple(options.ciphers))
    wanted = [
        k for kind in kinds for k in (("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,))
    ]
    options.key_types = _first(tuple(wanted), tuple(options.key_types))


def _first(wanted: tuple[str, ...], there: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(each for each in wanted if each in there), *there]))


def _names(endpoint: Endpoint) -> tuple[str, ...]:
    """What the host is called in known_hosts; a key without a port speaks for all ports, as openssh has it."""
    if endpoint.host_key_alias:
        return (endpoint.host_key_alias.lower(),)
    return (known_hosts_name(endpoint.hostname, endpoint.port),)


def _unknown(endpoint: Endpoint, shown: str) -> HostError:
    remedy = f"if that is the host's key, accept it once in a terminal: {_command(endpoint)}"
    if endpoint.strict in ("no", "off", "accept-new"):
        remedy += f"\n  (StrictHostKeyChecking {endpoint.strict} is not followed: skymagic sends your data and secrets there)"
    return HostError(endpoint.label, f"its host key is not known: {shown}", remedy)


def _changed(endpoint: Endpoint, name: str, shown: str, entries: tuple[Entry, ...], state: str) -> HostError:
    places = ", ".join(dict.fromkeys(f"{entry.file} line {entry.line}" for entry in entries))
    if state == "revoked":
        return HostError(
            endpoint.label, f"its host key {shown} is revoked by {places}", "ask who runs the host"
        )
    return HostError(
        endpoint.label,
        f"its host key has CHANGED: it shows {shown}, and {places} has another one. Somebody may be listening in",
        f"only if you know why it changed: ssh-keygen -R '{name}' -f {entries[0].file}, then once: {_command(endpoint)}",
    )


def _command(endpoint: Endpoint) -> str:
    """The ssh command line that reaches this endpoint."""
    name, _, port = endpoint.label.rpartition(":")
    if name and port.isdigit() and (name.count(":") == 0 or name.endswith("]")):
        return f"ssh -p {port} {name.replace('[', '').replace(']', '')}"
    return f"ssh {endpoint.label}"


def _no_server(endpoint: Endpoint, problem: BaseException | None) -> HostError:
    where = f"{endpoint.hostname} port {endpoint.port}"
    if problem is None:
        return HostError(
            endpoint.label,
            f"{where} took the connection, and then said nothing for {endpoint.timeout:.0f} s",
            "is that sshd, and is the host overloaded?",
        )
    if "Incompatible" in str(problem) or type(problem).__name__ == "IncompatiblePeer":
        return HostError(endpoint.label, f"{where} has no method in common with us: {problem}", "")
    said = str(problem) or "it closed the connection"
    return HostError(
        endpoint.label,
        f"{where} does not speak SSH with us: {said}",
        f"is that sshd's port? It may also refuse more connections for now (MaxStartups). Try: {_command(endpoint)}",
    )


def _refused(endpoint: Endpoint, tried: Tried, active: bool) -> HostError:
    keys = ", ".join(tried.refused) or "none"
    reason = f"{endpoint.user}@{endpoint.hostname} accepts none of your keys (tried: {keys})"
    if tried.unused:
        reason += f"; not usable: {', '.join(tried.unused)}"
    if not active and len(tried.refused) > 1:
        reason += "; the host ended the connection, maybe for too many keys (IdentitiesOnly yes and an IdentityFile help)"
    return HostError(
        endpoint.label,
        reason,
        f"is {endpoint.user!r} the right user? To install a key there: ssh-copy-id -p {endpoint.port} {endpoint.user}@{endpoint.hostname}",
    )
