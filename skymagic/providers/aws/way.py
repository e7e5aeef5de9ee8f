"""The way to machines that have no public address: through a jump host of the user's, or by a session of AWS Systems Manager (SSM)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from shlex import quote

from skymagic.errors import ProvisionError, RequestError
from skymagic.plan.requests import SSM, CloudSettings
from skymagic.providers.aws.launch import Instance
from skymagic.ssh import connecting, hostlist
from skymagic.ssh.config import Endpoint, SshConfig

PROGRAMS = {
    "aws": "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
    "session-manager-plugin": "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html",
}
"""What carries a session, and where it is from."""


def jump(settings: CloudSettings) -> tuple[Endpoint, ...]:
    """The jump host, as the user's ssh configuration has it; () without one.

    Raises:
        RequestError: its name or the configuration cannot be read, or nobody says from where it connects.
    """
    if settings.via in (None, "", SSM):
        return ()
    if not settings.ssh_from:
        raise RequestError(
            f"via={settings.via!r}: the machines let SSH in from that host alone, so say its address as they see it "
            "(as a rule its private one): ssh_from='10.0.0.5/32'"
        )
    (spec,) = hostlist.expand((str(settings.via),))
    return (SshConfig().endpoint(spec),)


def check(settings: CloudSettings) -> None:
    """Try the way as far as it is there before machines are, so that none is rented that nobody can reach.

    Raises:
        ProvisionError: a program is missing. HostError: the jump host lets nobody in. RequestError: as `jump`.
    """
    for one in jump(settings):
        connecting.connect(one).close()
    if settings.via == SSM:
        missing = [f"{name} ({where})" for name, where in PROGRAMS.items() if shutil.which(name) is None]
        if missing:
            raise ProvisionError(f"via='ssm' needs programs that are not on this machine's PATH: {', '.join(missing)}")


def leading(endpoint: Endpoint, to: Instance, settings: CloudSettings) -> Endpoint:
    """The endpoint of a machine, reached on this way."""
    if settings.via == SSM:
        return replace(endpoint, proxy_command=session(to, settings))
    return replace(endpoint, proxy_jump=jump(settings))


def session(to: Instance, settings: CloudSettings) -> str:
    """The command whose input and output are a connection to a machine's sshd; pure. For sh."""
    words = [
        "aws", "ssm", "start-session", "--target", to.id, "--document-name", "AWS-StartSSHSession",
        "--parameters", f"portNumber={settings.ssh_port}", "--region", to.region,
        *(["--profile", settings.profile] if settings.profile else []),
    ]  # fmt: skip
    return " ".join(map(quote, words))
