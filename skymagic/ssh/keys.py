"""Private keys of the user (ssh-agent, files, passphrases) and public keys of hosts (known_hosts).

A passphrase is asked for once per process.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from skymagic.ssh.config import Endpoint

if TYPE_CHECKING:
    import paramiko

PASSPHRASE_ATTEMPTS = 3
_decrypted: dict[tuple[str, int], paramiko.PKey] = {}
"""Decrypted keys, by path and mtime."""
_asking_lock = threading.Lock()


@dataclass
class KeyAttempts:
    """Keys tried in a login, for the error if none was accepted."""

    refused: list[str] = field(default_factory=list)
    """Keys that the host refused."""
    unused: list[str] = field(default_factory=list)
    """Keys that could not be used, each with the reason."""


def candidates(
    endpoint: Endpoint, ask: Callable[[str], str] | None, attempts: KeyAttempts
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield (name, key) in the order to try: the agent's configured keys, its other keys, files,
    encrypted files.
    """
    with contextlib.ExitStack() as stack:
        files = [
            path
            for path in endpoint.identities
            if Path(path).exists() or Path(f"{path}.pub").exists()
        ]
        missing = set(endpoint.identities) - set(files) if endpoint.identities_given else ()
        attempts.unused += [
            f"{path} (there is no such file)" for path in endpoint.identities if path in missing
        ]
        agent_keys = {key.asbytes(): key for key in _agent_keys(endpoint, stack, attempts)}
        first = {
            path: agent_keys.pop(blob) for path in files if (blob := _public(path)) in agent_keys
        }
        yield from ((f"{path} (agent)", key) for path, key in first.items())
        if not endpoint.identities_only:
            for key in agent_keys.values():
                yield f"{getattr(key, 'comment', '') or key.get_name()} (agent)", key
        encrypted = []
        for path in (path for path in files if path not in first):
            loaded = _load(path, None, attempts)
            if loaded is _ENCRYPTED:
                encrypted.append(path)
            elif loaded is not None:
                yield path, loaded  # type: ignore[misc]
        for path in encrypted:
            if (decrypted := _decrypt(path, ask, attempts)) is not None:
                yield path, decrypted


_ENCRYPTED = object()


def _load(path: str, passphrase: str | None, attempts: KeyAttempts) -> object | None:
    """Return a key, _ENCRYPTED if it needs another passphrase, or None if it is unusable."""
    import paramiko

    try:
        return paramiko.PKey.from_path(
            path,
            passphrase.encode() if passphrase else None,  # type: ignore[arg-type]
        )
    # Only its public half is here: the agent has the private one.
    except FileNotFoundError:
        attempts.unused.append(
            f"{path} (only its public half is here, and the agent does not have it)"
        )
    except (TypeError, paramiko.PasswordRequiredException):
        return _ENCRYPTED
    except (ValueError, OSError, paramiko.SSHException) as problem:
        if passphrase is not None:
            return _ENCRYPTED
        reason = getattr(problem, "strerror", None) or "paramiko cannot read this private key"
        attempts.unused.append(f"{path} ({reason})")
    # paramiko.UnknownKeyType: hardware keys (sk-…) work through the agent only
    except Exception as problem:
        attempts.unused.append(f"{path} ({type(problem).__name__}: use it through ssh-agent)")
    return None


def _decrypt(
    path: str, ask: Callable[[str], str] | None, attempts: KeyAttempts
) -> paramiko.PKey | None:
    """Decrypt a key file; threads that need the same key wait for a single answer."""
    with _asking_lock:
        cache_key = (path, Path(path).stat().st_mtime_ns)
        if cache_key in _decrypted:
            return _decrypted[cache_key]
        if ask is None:
            attempts.unused.append(
                f"{path} (it has a passphrase, and there is no prompt here: ssh-add {path})"
            )
            return None
        for attempt in range(PASSPHRASE_ATTEMPTS):
            again = "wrong passphrase; " if attempt else ""
            passphrase = ask(f"{again}passphrase of {path}: ")
            if not passphrase:
                break
            key = _load(path, passphrase, attempts)
            if key is not None and key is not _ENCRYPTED:
                _decrypted[cache_key] = key  # type: ignore[assignment]
                return _decrypted[cache_key]
        attempts.unused.append(f"{path} (its passphrase was not given: ssh-add {path})")
        return None


def _public(path: str) -> bytes:
    """Return the public key blob (RFC 4253), to find the key in the agent without its passphrase,
    or b"".
    """
    try:
        return base64.b64decode(Path(f"{path}.pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return b""


def _agent_keys(
    endpoint: Endpoint, stack: contextlib.ExitStack, attempts: KeyAttempts
) -> tuple[paramiko.PKey, ...]:
    """Return the agent's keys; () without an agent."""
    import paramiko
    from paramiko.agent import AgentSSH

    if endpoint.agent is None:
        return ()
    try:
        if not endpoint.agent:
            agent = stack.enter_context(contextlib.closing(paramiko.Agent()))
            return agent.get_keys()
        # paramiko.Agent connects to $SSH_AUTH_SOCK only
        sock = stack.enter_context(socket.socket(getattr(socket, "AF_UNIX", 1), socket.SOCK_STREAM))
        sock.connect(endpoint.agent)
        other = AgentSSH()
        other._connect(sock)  # type: ignore[attr-defined]
        return other.get_keys()
    except (paramiko.SSHException, OSError, EOFError) as problem:
        attempts.unused.append(f"the keys of ssh-agent ({problem})")
        return ()


# -- host key verification with known_hosts; format: sshd(8), SSH_KNOWN_HOSTS FILE FORMAT ----------


@dataclass(frozen=True)
class KnownKey:
    """A line of a known_hosts file."""

    file: str
    line: int
    revoked: bool
    patterns: str
    key_type: str
    key: str
    """Key in base64, as in the file."""

    def matches(self, name: str) -> bool:
        """Return True if the line applies to this host."""
        if self.patterns.startswith("|"):
            return _matches_hash(self.patterns, name)
        fields = self.patterns.lower().split(",")
        if any(_matches_glob(word[1:], name) for word in fields if word.startswith("!")):
            return False
        return any(_matches_glob(word, name) for word in fields)


@dataclass(frozen=True)
class KeyStatus:
    """Result of comparing a host's key with known_hosts."""

    state: str
    """known, unknown, changed or revoked."""
    entries: tuple[KnownKey, ...] = ()
    """The matching lines."""


class KnownHosts:
    """The lines of known_hosts files.

    Args:
        files: their paths; missing ones are skipped.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self.entries = tuple(entry for file in files for entry in _read(file))

    def entries_for(self, names: Iterable[str]) -> list[KnownKey]:
        """Return the lines for a host under any of these names, without revoked keys."""
        return [e for e in self.entries if not e.revoked and any(e.matches(n) for n in names)]

    def check(self, names: tuple[str, ...], key_type: str, key: str) -> KeyStatus:
        """Verify a key.

        Args:
            names: the host's names in the file: ``[name]:port`` if the port is not 22.
            key_type: ``ssh-ed25519``, ….
            key: in base64.
        """
        revoked = [
            e
            for e in self.entries
            if e.revoked and e.key == key and any(e.matches(n) for n in names)
        ]
        if revoked:
            return KeyStatus("revoked", tuple(revoked))
        entries = self.entries_for(names)
        same = [e for e in entries if (e.key_type, e.key) == (key_type, key)]
        if same:
            return KeyStatus("known", tuple(same))
        return KeyStatus("changed", tuple(entries)) if entries else KeyStatus("unknown")


def known_hosts_name(name: str, port: int) -> str:
    """Return a host's name in known_hosts: ``name``, or ``[name]:port`` if the port is not 22."""
    return name.lower() if port == 22 else f"[{name.lower()}]:{port}"


def fingerprint(key: bytes) -> str:
    """Return the fingerprint of a key, as ssh-keygen shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def _read(file: str) -> Iterable[KnownKey]:
    try:
        lines = Path(file).read_text(errors="replace").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        # Skip @cert-authority lines: paramiko reads no host certificates.
        if len(fields) >= 3 and not fields[0].startswith("#") and marker in ("", "@revoked"):
            yield KnownKey(file, number, marker == "@revoked", fields[0], fields[1], fields[2])


def _matches_hash(pattern: str, name: str) -> bool:
    parts = pattern.split("|")
    if len(parts) != 4 or parts[1] != "1":
        return False
    try:
        salt, digest = base64.b64decode(parts[2]), base64.b64decode(parts[3])
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), "sha1").digest(), digest)


def _matches_glob(pattern: str, name: str) -> bool:
    expression = "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern)
    return re.fullmatch(expression, name) is not None
