"""The user's keys: those of the agent and those in files; a passphrase is asked for once in a process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from skymagic.ssh.config import Endpoint

if TYPE_CHECKING:
    import paramiko

TRIES = 3
_opened: dict[tuple[str, int], paramiko.PKey] = {}
"""Keys whose passphrase was given, by path and time of change."""
_asking = threading.Lock()


@dataclass
class Tried:
    """What was done to log in, for the error when nothing helped."""

    refused: list[str] = field(default_factory=list)
    """Keys that the host did not want."""
    unused: list[str] = field(default_factory=list)
    """Keys that could not be used, each with the reason."""


def candidates(
    endpoint: Endpoint, ask: Callable[[str], str] | None, tried: Tried
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys to try, with a name for each: of the agent those that are configured first, then files, locked ones last."""
    with contextlib.ExitStack() as stack:
        files = [path for path in endpoint.identities if Path(path).exists() or Path(f"{path}.pub").exists()]
        tried.unused += [
            f"{path} (there is no such file)" for path in endpoint.identities
            if endpoint.identities_given and path not in files
        ]  # fmt: skip
        public = {path: _public(path) for path in files}
        held = {key.asbytes(): key for key in _agent(endpoint, stack, tried)}
        first = [(path, held.pop(blob)) for path, blob in public.items() if blob is not None and blob in held]
        yield from ((f"{path} (agent)", key) for path, key in first)
        if not endpoint.identities_only:
            yield from (
                (f"{getattr(key, 'comment', '') or key.get_name()} (agent)", key) for key in held.values()
            )
        locked = []
        for path in files:
            if path in dict(first):
                continue
            key = _load(path, None, tried)
            if key is _LOCKED:
                locked.append(path)
            elif key is not None:
                yield path, key  # type: ignore[misc]
        for path in locked:
            if (unlocked := _unlock(path, ask, tried)) is not None:
                yield path, unlocked


_LOCKED = object()


def _load(path: str, passphrase: str | None, tried: Tried) -> object | None:
    """A key, _LOCKED when it needs another passphrase, None when it is of no use."""
    import paramiko

    try:
        return paramiko.PKey.from_path(path, passphrase.encode() if passphrase else None)  # type: ignore[arg-type]
    except FileNotFoundError:  # only its public half is here: the agent's
        tried.unused.append(f"{path} (only its public half is here, and the agent has not got it)")
    except (TypeError, paramiko.PasswordRequiredException):
        return _LOCKED
    except (ValueError, OSError, paramiko.SSHException) as problem:
        if passphrase is not None:
            return _LOCKED
        tried.unused.append(
            f"{path} ({getattr(problem, 'strerror', None) or 'it is no private key that paramiko reads'})"
        )
    except Exception as problem:  # paramiko.UnknownKeyType: hardware keys (sk-…) work through the agent only
        tried.unused.append(f"{path} ({type(problem).__name__}: use it through ssh-agent)")
    return None


def _unlock(path: str, ask: Callable[[str], str] | None, tried: Tried) -> paramiko.PKey | None:
    """The key in an encrypted file; threads that need the same one wait for the one answer."""
    with _asking:
        mark = (path, Path(path).stat().st_mtime_ns)
        if mark in _opened:
            return _opened[mark]
        if ask is None:
            tried.unused.append(f"{path} (it has a passphrase, and nobody could be asked: ssh-add {path})")
            return None
        for attempt in range(TRIES):
            again = "that was not it; " if attempt else ""
            passphrase = ask(f"{again}passphrase of {path}: ")
            if not passphrase:
                break
            key = _load(path, passphrase, tried)
            if key is not None and key is not _LOCKED:
                _opened[mark] = key  # type: ignore[assignment]
                return _opened[mark]
        tried.unused.append(f"{path} (its passphrase was not given: ssh-add {path})")
        return None


def _public(path: str) -> bytes | None:
    """The public half as the protocol has it, to find the key in the agent without its passphrase."""
    import base64
    import binascii

    try:
        words = Path(f"{path}.pub").read_text().split()
        return base64.b64decode(words[1])
    except (OSError, UnicodeDecodeError, IndexError, binascii.Error):
        return None


def _agent(endpoint: Endpoint, stack: contextlib.ExitStack, tried: Tried) -> tuple[paramiko.PKey, ...]:
    """The agent's keys; nothing without an agent."""
    import paramiko

    if endpoint.agent is None:
        return ()
    try:
        if not endpoint.agent:
            agent = paramiko.Agent()
            stack.callback(agent.close)
            return agent.get_keys()
        return _agent_at(endpoint.agent, stack)
    except (paramiko.SSHException, OSError, EOFError) as problem:
        tried.unused.append(f"the keys of ssh-agent ({problem})")
        return ()


def _agent_at(path: str, stack: contextlib.ExitStack) -> tuple[paramiko.PKey, ...]:
    """The keys of an agent at this socket; paramiko itself knows the environment's only."""
    from paramiko.agent import AgentSSH

    sock = socket.socket(getattr(socket, "AF_UNIX", 1), socket.SOCK_STREAM)
    stack.callback(sock.close)
    sock.connect(path)
    agent = AgentSSH()
    agent._connect(sock)  # type: ignore[attr-defined]
    return agent.get_keys()
