"""Host key verification against known_hosts files; pure apart from reading them. Format: sshd(8), SSH_KNOWN_HOSTS FILE FORMAT."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file."""

    file: str
    line: int
    revoked: bool
    patterns: str
    key_type: str
    key: str
    """Base64, as in the file."""

    def matches(self, name: str) -> bool:
        """Whether the line is for this host."""
        if self.patterns.startswith("|"):
            return _matches_hash(self.patterns, name)
        fields = self.patterns.lower().split(",")
        if any(_matches_glob(word[1:], name) for word in fields if word.startswith("!")):
            return False
        return any(_matches_glob(word, name) for word in fields)


@dataclass(frozen=True)
class KeyStatus:
    """How a key that a host offers compares with known_hosts."""

    state: str
    """known, unknown, changed or revoked."""
    entries: tuple[KnownKey, ...] = ()
    """The matching lines."""


class KnownHosts:
    """The lines of known_hosts files.

    Args:
        files: their paths; those that are not there are skipped.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self.entries = tuple(entry for file in files for entry in _read(file))

    def entries_for(self, names: Iterable[str]) -> list[KnownKey]:
        """The lines for a host under any of these names, without revoked keys."""
        return [e for e in self.entries if not e.revoked and any(e.matches(n) for n in names)]

    def check(self, names: tuple[str, ...], key_type: str, key: str) -> KeyStatus:
        """Verify a key.

        Args:
            names: the host's names in the file: with a port that is not 22 ``[name]:port``.
            kind: ``ssh-ed25519``, ….
            key: base64.
        """
        revoked = [e for e in self.entries if e.revoked and e.key == key and any(e.matches(n) for n in names)]
        if revoked:
            return KeyStatus("revoked", tuple(revoked))
        entries = self.entries_for(names)
        same = [e for e in entries if (e.key_type, e.key) == (key_type, key)]
        if same:
            return KeyStatus("known", tuple(same))
        return KeyStatus("changed", tuple(entries)) if entries else KeyStatus("unknown")


def known_hosts_name(name: str, port: int) -> str:
    """A host's name in known_hosts: ``name``, or ``[name]:port`` for another port than 22."""
    return name.lower() if port == 22 else f"[{name.lower()}]:{port}"


def fingerprint(key: bytes) -> str:
    """As ssh-keygen shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def _read(file: str) -> Iterable[KnownKey]:
    try:
        lines = Path(file).read_text(errors="replace").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        # @cert-authority lines are skipped: paramiko reads no host certificates
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
