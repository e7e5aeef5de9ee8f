"""known_hosts: whether a host's key is the one that the user knows; pure apart from reading the files."""

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
class Entry:
    """One line of a known_hosts file."""

    file: str
    line: int
    revoked: bool
    patterns: str
    kind: str
    key: str
    """Base64, as in the file."""

    def matches(self, name: str) -> bool:
        """Whether the line speaks of this host; format of sshd(8), SSH_KNOWN_HOSTS."""
        if self.patterns.startswith("|"):
            return _hashed(self.patterns, name)
        words = self.patterns.lower().split(",")
        if any(_fits(word[1:], name) for word in words if word.startswith("!")):
            return False
        return any(_fits(word, name) for word in words)


@dataclass(frozen=True)
class Verdict:
    """What is known of a key that a host has shown."""

    state: str
    """known, unknown, changed or revoked."""
    entries: tuple[Entry, ...] = ()
    """The lines that say so."""


class Known:
    """The lines of some known_hosts files.

    Args:
        files: their paths; those that are not there are skipped.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self.entries = tuple(entry for file in files for entry in _read(file))

    def of(self, names: Iterable[str]) -> list[Entry]:
        """The lines that speak of a host under any of these names, revoked keys left out."""
        return [e for e in self.entries if not e.revoked and any(e.matches(n) for n in names)]

    def judge(self, names: tuple[str, ...], kind: str, key: str) -> Verdict:
        """What these lines say of a key.

        Args:
            names: the host's names in the file: with a port that is not 22 ``[name]:port``.
            kind: ``ssh-ed25519``, ….
            key: base64.
        """
        revoked = [e for e in self.entries if e.revoked and e.key == key and any(e.matches(n) for n in names)]
        if revoked:
            return Verdict("revoked", tuple(revoked))
        mine = self.of(names)
        same = [e for e in mine if (e.kind, e.key) == (kind, key)]
        if same:
            return Verdict("known", tuple(same))
        return Verdict("changed", tuple(mine)) if mine else Verdict("unknown")


def known_hosts_name(name: str, port: int) -> str:
    """How a host is called in known_hosts."""
    return name.lower() if port == 22 else f"[{name.lower()}]:{port}"


def fingerprint(key: bytes) -> str:
    """As ssh-keygen shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def _read(file: str) -> Iterable[Entry]:
    try:
        lines = Path(file).read_text(errors="replace").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        # a certificate authority's line speaks of certificates, which paramiko does not read from hosts
        if len(words) >= 3 and not words[0].startswith("#") and marker in ("", "@revoked"):
            yield Entry(file, number, marker == "@revoked", words[0], words[1], words[2])


def _hashed(pattern: str, name: str) -> bool:
    parts = pattern.split("|")
    if len(parts) != 4 or parts[1] != "1":
        return False
    try:
        salt, wanted = base64.b64decode(parts[2]), base64.b64decode(parts[3])
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), "sha1").digest(), wanted)


def _fits(pattern: str, name: str) -> bool:
    expression = "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern)
    return re.fullmatch(expression, name) is not None
