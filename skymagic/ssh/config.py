"""ssh_config(5) evaluated for a host.

Sources are ~/.ssh/config, /etc/ssh/ssh_config, and options on the magic's line.

``ssh -G`` cannot be used instead: it prints several UserKnownHostsFile without quotes (a path with
a space becomes two), leaves the tokens of ProxyCommand unexpanded, ignores $HOME, and ssh may not
be installed.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from skymagic.errors import RequestError
from skymagic.plan.requests import SSH_CLIENTS
from skymagic.plan.suggest import did_you_mean
from skymagic.ssh.hostlist import HostSpec, expand

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
DEFAULT_KEYS = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
CONNECT_TIMEOUT = 15.0
"""Seconds that a connect may take, unless ConnectTimeout is given."""
MAX_INCLUDE_DEPTH = 16
ONLY_OPENSSH = ("proxyusefdpass", "pkcs11provider", "revokedhostkeys")
OPENSSH_MATCH = re.compile(
    r"(?im)^\s*match\s.*\b(exec|tagged|localnetwork|sessiontype|version|command)\b.*$"
)


@dataclass(frozen=True)
class Endpoint:
    """A host as resolved by the configuration, with everything needed to connect.

    Paths are absolute. A `HostSpec` is the host as written.
    """

    label: str
    """Name given by the user, shown in output and errors."""
    hostname: str
    port: int = 22
    user: str = ""
    identities: tuple[str, ...] = ()
    """Private keys, in the order to try them."""
    identities_given: bool = False
    """True if `identities` come from the user's configuration; default ones need not exist."""
    identities_only: bool = False
    """Use no agent keys except those in `identities`."""
    agent: str | None = ""
    """The agent's socket, "" for the environment's, None for no agent."""
    proxy_jump: tuple[Endpoint, ...] = ()
    proxy_command: str | None = None
    known_hosts: tuple[str, ...] = ()
    host_key_alias: str | None = None
    strict: str = "ask"
    """StrictHostKeyChecking as written; in any case, skymagic never accepts unknown keys."""
    timeout: float = CONNECT_TIMEOUT
    client: str = "paramiko"
    """SSH client: an item of `plan.requests.SSH_CLIENTS`.

    OpenSSH reads its configuration itself and uses only `label`.
    """


class UnreadConfig(RequestError):
    """Configuration that paramiko cannot follow, but OpenSSH may."""


def endpoints(hosts: Iterable[str], client: str = "auto") -> list[Endpoint]:
    """Resolve hosts, as users write them, for one of `SSH_CLIENTS`.

    Raises:
        RequestError: the names contain mistakes (all are listed), or the configuration cannot be
            read.
    """
    specs = expand(hosts)
    if client not in SSH_CLIENTS:
        raise RequestError(
            f"no SSH client is called {client!r}{did_you_mean(client, SSH_CLIENTS)}; "
            f"available: {', '.join(SSH_CLIENTS)}",
            code="no-ssh-client",
            names=[client],
        )
    config = SshConfig() if client != "openssh" else None

    def resolved(spec: HostSpec) -> Endpoint:
        try:
            if config is not None:
                return replace(config.endpoint(spec), client=client)
        except UnreadConfig:
            if client != "auto" or shutil.which("ssh") is None:
                raise
        return Endpoint(spec.text, spec.name, spec.port or 22, spec.user or "", client="openssh")

    return [resolved(spec) for spec in specs]


class SshConfig:
    """The user's ssh configuration.

    Args:
        path: read only this file; by default ~/.ssh/config, then the system's. Missing files count
            as empty.

    Raises:
        RequestError: others could write ~/.ssh/config, or a file that it includes, and so have the
            user run their ProxyCommand.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        home = Path.home() / ".ssh"
        self._text = _included(
            Path(path) if path else home / "config", home, 0, private=path is None
        )
        if path is None:
            self._text += "\nHost *\n" + _included(SYSTEM_CONFIG, SYSTEM_CONFIG.parent, 0)

    def endpoint(self, spec: HostSpec, path: tuple[str, ...] = ()) -> Endpoint:
        """Resolve a host; `path` lists the hosts whose ProxyJump led to it.

        Raises:
            RequestError: the configuration cannot be read.
        """
        if spec.text in path:
            raise RequestError(
                f"ProxyJump goes in a circle: {' → '.join((*path, spec.text))}", code="ssh-config"
            )
        settings = self._lookup(spec)
        alias = settings.host_key_alias
        tokens = {
            "%": "%",
            "h": settings.hostname,
            "n": spec.name,
            "p": str(settings.port),
            "r": settings.user,
            "u": getpass.getuser(),
            "d": str(Path.home()),
            "k": settings.hostname if alias is None else alias,
        }
        jumps, command = self._proxy(settings, spec, (*path, spec.text))
        key_files = DEFAULT_KEYS if settings.identity_files is None else settings.identity_files
        return Endpoint(
            label=spec.text,
            hostname=settings.hostname,
            port=settings.port,
            user=settings.user,
            identities=tuple(
                _expand_path(name, tokens) for name in key_files if name.lower() != "none"
            ),
            identities_given=settings.identity_files is not None,
            identities_only=settings.identities_only,
            agent=_agent_socket(settings.identity_agent, tokens),
            proxy_jump=jumps,
            proxy_command=command,
            known_hosts=_known_hosts(settings, tokens),
            host_key_alias=alias,
            strict=settings.strict,
            timeout=float(settings.timeout) or CONNECT_TIMEOUT,
        )

    def _lookup(self, spec: HostSpec) -> HostSettings:
        import paramiko

        # paramiko applies a block with an unknown criterion to every host, and runs the command of
        # a criterion with the kernel's input.
        if match := OPENSSH_MATCH.search(re.sub(r'"[^"\n]*"', "", self._text)):
            raise UnreadConfig(
                f"the ssh configuration has what only --ssh openssh follows: {match[0].strip()}"
            )
        # The first value found wins, so the options on the magic's line come first.
        overrides = f"Host *\nPort {spec.port}\n" if spec.port else ""
        overrides += f'Host *\nUser "{spec.user}"\n' if spec.user else ""
        try:
            settings = paramiko.SSHConfig.from_text(f"{overrides}Host *\n{self._text}").lookup(
                spec.name
            )
        except (paramiko.SSHException, ImportError, ValueError, KeyError, OSError) as problem:
            raise UnreadConfig(
                f"the ssh configuration cannot be read for {spec.text}: {problem}"
            ) from problem
        if unread := [
            name for name in ONLY_OPENSSH if settings.get(name, "no") not in ("no", "none")
        ]:
            raise UnreadConfig(
                f"{spec.text} has in the ssh configuration what only --ssh openssh follows: "
                f"{unread[0]}"
            )
        return HostSettings.parse(settings, spec)

    def _proxy(
        self, settings: HostSettings, spec: HostSpec, path: tuple[str, ...]
    ) -> tuple[tuple[Endpoint, ...], str | None]:
        if settings.proxy_command is not None:
            return (), settings.proxy_command
        if settings.proxy_jump is None or settings.proxy_jump.lower() == "none":
            return (), None
        jumps = _jump_hosts(settings.proxy_jump, spec)
        first, *further = [self.endpoint(jump, path) for jump in jumps]
        # The first jump is reached as its own settings say, each further one through its
        # predecessor.
        return (
            first,
            *(replace(jump, proxy_jump=(), proxy_command=None) for jump in further),
        ), None


def aliases() -> tuple[str, ...]:
    """Return the host names in the configuration, without patterns.

    Raises RequestError as `SshConfig` does.
    """
    lines = [line.replace("=", " ", 1).split() for line in SshConfig()._text.splitlines()]
    names = [
        name
        for first, *names_of_line in filter(None, lines)
        if first.lower() == "host"
        for name in names_of_line
    ]
    return tuple(dict.fromkeys(name for name in names if not set(name) & set('*?!"')))


def _jump_hosts(value: str, spec: HostSpec) -> list[HostSpec]:
    try:
        jumps = [word.strip().removeprefix("ssh://").rstrip("/") for word in value.split(",")]
        return [host for word in jumps for host in expand([word])]
    except RequestError as refused:
        raise RequestError(
            [f"ProxyJump of {spec.text}: {mistake}" for mistake in refused.mistakes]
        ) from None


@dataclass(frozen=True)
class HostSettings:
    """Settings of the SSH configuration that apply to one host, with OpenSSH's defaults."""

    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...] | None
    """Keys that the configuration names; None without such a setting."""
    identities_only: bool
    identity_agent: str
    proxy_jump: str | None
    proxy_command: str | None
    """At most one of the two proxies is set: the first in the configuration."""
    user_known_hosts: str | None
    global_known_hosts: str | None
    host_key_alias: str | None
    strict: str
    timeout: int

    @classmethod
    def parse(cls, settings: Mapping[str, object], spec: HostSpec) -> HostSettings:
        """Return the settings that `paramiko.SSHConfig.lookup` options.

        Raises:
            RequestError: a number is malformed.
        """

        def text(key: str) -> str | None:
            return None if (value := settings.get(key)) is None else str(value)

        # The first value wins, also between ProxyCommand and ProxyJump.
        proxy = next((key for key in settings if key in ("proxycommand", "proxyjump")), None)
        keys = settings.get("identityfile")
        return cls(
            hostname=text("hostname") or spec.name,
            port=_number(settings, "port", 22, spec),
            user=text("user") or getpass.getuser(),
            identity_files=tuple(map(str, keys)) if isinstance(keys, list) else None,
            identities_only=(text("identitiesonly") or "no").lower() == "yes",
            identity_agent=text("identityagent") or "",
            proxy_jump=text("proxyjump") if proxy == "proxyjump" else None,
            proxy_command=text("proxycommand") if proxy == "proxycommand" else None,
            user_known_hosts=text("userknownhostsfile"),
            global_known_hosts=text("globalknownhostsfile"),
            host_key_alias=text("hostkeyalias"),
            strict=(text("stricthostkeychecking") or "ask").lower(),
            timeout=_number(settings, "connecttimeout", int(CONNECT_TIMEOUT), spec),
        )


def _number(settings: Mapping[str, object], key: str, default: int, spec: HostSpec) -> int:
    value = str(settings.get(key, default))
    if not (value.isascii() and value.isdigit()):
        raise RequestError(
            f"the ssh configuration gives {spec.text} the {key} {value!r}, which is no number",
            code="ssh-config",
            names=[key],
        )
    return int(value)


def _agent_socket(value: str, tokens: Mapping[str, str]) -> str | None:
    if value.lower() == "none":
        return None
    return "" if value in ("", "SSH_AUTH_SOCK") else _expand_path(value, tokens)


def _known_hosts(settings: HostSettings, tokens: Mapping[str, str]) -> tuple[str, ...]:
    home = Path.home() / ".ssh"
    user_files = settings.user_known_hosts
    if user_files is None:
        user_files = f'"{home / "known_hosts"}" "{home / "known_hosts2"}"'
    all_users = settings.global_known_hosts
    if all_users is None:
        all_users = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
    # paramiko removes quotes only from a value that is quoted as a whole.
    paths = [
        word
        for value in (user_files, all_users)
        for word in ([value] if Path(value).exists() else shlex.split(value))
    ]
    return tuple(_expand_path(word, tokens) for word in paths if word.lower() != "none")


def _expand_path(text: str, tokens: Mapping[str, str]) -> str:
    return str(
        Path(re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)).expanduser()
    )


def _check_private(path: Path) -> None:
    """Raise RequestError unless a file belongs to the user or root and others cannot write it, as
    OpenSSH.
    """
    state = path.stat()
    if os.name == "posix" and (
        state.st_uid not in (0, os.getuid()) or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise RequestError(
            f"others may write {path}, so it is not used, as in ssh: chmod go-w '{path}', "
            "and see whose it is",
            code="ssh-config-exposed",
            names=[str(path)],
        )


def _included(path: Path, home: Path, depth: int, *, private: bool = False) -> str:
    """Return a configuration file with its includes.

    The enclosing block continues after an Include.

    Host blocks in an included file also count if the Include stands within another block.

    Args:
        private: refuse files that others can write.
    """
    try:
        if private:
            _check_private(path)
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    out, block = [], "Host *"
    for line in lines:
        word, _, arguments = line.strip().replace("=", " ", 1).partition(" ")
        if word.lower() in ("host", "match"):
            block = line
        if word.lower() == "include" and depth < MAX_INCLUDE_DEPTH:
            for name in shlex.split(arguments):
                pattern = home / Path(name).expanduser()
                names = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
                out += [_included(file, home, depth + 1, private=private) for file in sorted(names)]
            line = block
        out.append(line)
    return "\n".join(out)
