"""What a rented machine is told at its first boot, as cloud-init reads it; pure.

JSON is YAML, and needs no quoting of ours. What stands here can be read by every process of the machine (from the metadata
service), so no credential and no secret of the user's is in it; the host's own private key is, as `ssh_keys` of cloud-init's
documentation has it, and belongs to nobody else.
"""

from __future__ import annotations

import json

from skymagic.errors import RequestError
from skymagic.providers.aws import watchdog
from skymagic.providers.aws.keys import PoolKeys
from skymagic.providers.aws.watchdog import Bounds

MOST_BYTES = 16384
"""What EC2 takes, before base64."""


def cloud_config(keys: PoolKeys, job: str, user: str, ssh_port: int, bounds: Bounds) -> str:
    """The user data of all machines of a pool.

    Raises:
        RequestError: it is larger than EC2 takes.
    """
    config = {
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": keys.host.private, "ed25519_public": keys.host.public},
        "ssh_authorized_keys": [keys.user.public],
        "ssh_pwauth": False,
        "package_update": False,
        "package_upgrade": False,
        "bootcmd": _at_boot(bounds),
        "write_files": [
            {"path": watchdog.PATH, "permissions": "0755", "content": watchdog.script(job, user, bounds)},
            {"path": f"/etc/systemd/system/{watchdog.UNIT}.service", "content": watchdog.unit()},
            *([_sshd_port(ssh_port)] if ssh_port != 22 else []),
        ],
        "runcmd": [
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", "--now", watchdog.UNIT],
            *([["sh", "-c", "systemctl restart ssh.socket ssh sshd || true"]] if ssh_port != 22 else []),
        ],
    }
    text = f"#cloud-config\n{json.dumps(config, indent=1)}\n"
    if len(text.encode()) > MOST_BYTES:
        raise RequestError(f"the user data has {len(text.encode())} bytes, and EC2 takes {MOST_BYTES}")
    return text


def _at_boot(bounds: Bounds) -> list[list[str]]:
    """Before anything else: the lifetime holds although all that follows may fail, and no update takes apt's lock or reboots."""
    timers = "apt-daily.timer apt-daily-upgrade.timer unattended-upgrades.service"
    # a timer of systemd's own: so early in a boot `shutdown` may find nobody who keeps its time
    return [
        ["systemd-run", f"--on-active={max(60, round(bounds.lifetime))}s", "systemctl", "poweroff"],
        ["sh", "-c", f"systemctl mask --now {timers} || true"],
    ]


def _sshd_port(port: int) -> dict[str, str]:
    return {"path": "/etc/ssh/sshd_config.d/10-skymagic.conf", "content": f"Port {port}\n"}
