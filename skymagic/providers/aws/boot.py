"""What a rented machine is told at its first boot: the keys of its pool, a watchdog, and the user data that carries both.

::

    keys = make_keys(job)        # folder/key (0600), folder/known_hosts
    cloud_config(keys, …)        # puts keys.host.private and the watchdog on the machines
    keys.endpoint(…)             # accepts that host key alone

The watchdog is sh that ends a machine when nobody uses it, with no notebook alive and no AWS credentials. EC2 terminates what shuts
itself down (InstanceInitiatedShutdownBehavior), so that ending the system ends the cost. The script reads what the node's agent
writes of itself (`wire.record`) and trusts no clock that is set: time is the kernel's uptime.

User data is JSON, which is YAML and needs no quoting of ours. Every process of the machine can read it (from the metadata service), so
no credential and no secret of the user's is in it; the host's own private key is, as `ssh_keys` of cloud-init's documentation has it,
and belongs to nobody else.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from skymagic.errors import RequestError
from skymagic.ssh.config import Endpoint
from skymagic.wire import atomic


@dataclass(frozen=True)
class KeyPair:
    """An ed25519 key in OpenSSH's formats; the private half is not shown."""

    private: str
    public: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"


@dataclass(frozen=True)
class PoolKeys:
    """A pool's key for logins, and its machines' host key.

    Attributes:
        folder: where the user's key and the known host key are; for this user alone.
        alias: the name under which the host key stands there. All machines of a launch have one key: they get the same user data.
    """

    folder: Path
    alias: str
    user: KeyPair
    host: KeyPair

    def endpoint(
        self, label: str, address: str, port: int, user: str, jump: tuple[Endpoint, ...] = ()
    ) -> Endpoint:
        """How a machine is reached: with this key, and only if it shows that host key."""
        return Endpoint(
            label, address, port, user,
            identities=(str(self.folder / "key"),), identities_given=True, identities_only=True, agent=None,
            proxy_jump=jump, known_hosts=(str(self.folder / "known_hosts"),), host_key_alias=self.alias, strict="yes",
        )  # fmt: skip


def keys_folder(job: str) -> Path:
    """Where the keys of a pool lie: in the user's state folder, so that a restarted notebook finds them."""
    return atomic.state_folder("keys") / job


def remove_keys(job: str) -> None:
    """Delete the keys of a pool; twice is safe."""
    if job and Path(job).name == job:  # it may come from a tag
        shutil.rmtree(keys_folder(job), ignore_errors=True)


def make_keys(job: str) -> PoolKeys:
    """Fresh keys in a folder of their own."""
    at = keys_folder(job)
    made = PoolKeys(at, job.lower(), generate_key("skymagic"), generate_key("skymagic host"))
    atomic.private_folder(at.parent)
    at.mkdir(mode=0o700)
    _write(at / "key", made.user.private)
    _write(at / "known_hosts", f"{made.alias} {made.host.public}\n")
    return made


def kept_keys(job: str) -> PoolKeys:
    """The keys of a pool that another notebook has made: the user's, and for machines to come another host key, known beside the first.

    Raises:
        OSError: they are not here.
    """
    from cryptography.hazmat.primitives import serialization as forms

    at = keys_folder(job)
    private = (at / "key").read_text()
    key = forms.load_ssh_private_key(private.encode(), None)
    public = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    made = PoolKeys(
        at,
        job.lower(),
        KeyPair(private, f"{public.decode()} skymagic"),
        generate_key("skymagic host"),
    )
    with (at / "known_hosts").open("a") as file:
        file.write(f"{made.alias} {made.host.public}\n")
    return made


def generate_key(comment: str) -> KeyPair:
    """A fresh key."""
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption()
    )
    public = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    return KeyPair(private.decode(), f"{public.decode()} {comment}")


def _write(path: Path, text: str) -> None:
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


SSHD_PORT = "/etc/ssh/sshd_config.d/10-skymagic.conf"
WATCHDOG_PATH = "/usr/local/lib/skymagic/watchdog"
WATCHDOG_UNIT = "skymagic-watchdog"
BOOTSTRAP = 1800.0
"""Seconds that a machine has until its first agent runs: packages for many GPUs take minutes."""
GONE = 300.0
"""Seconds for which a machine waits for another agent when its own has ended: ranks are started anew within that."""
IDLE_MARGIN = 120.0
"""Seconds beyond --idle after which the machine ends although its agent, which should have ended itself by then, has not."""


@dataclass(frozen=True)
class WatchdogBounds:
    """When a machine ends by itself; seconds.

    Attributes:
        idle: without a cell. lifetime: since it was booted. bootstrap: without a first agent. gone: since the last agent has ended.
        interval: between two looks.
    """

    idle: float
    lifetime: float
    bootstrap: float = BOOTSTRAP
    gone: float = GONE
    margin: float = IDLE_MARGIN
    interval: float = 10.0


def watchdog_script(job: str, user: str, bounds: WatchdogBounds) -> str:
    """POSIX sh that never ends before its machine does.

    Args:
        job: whose agents count. user: as whom they run.
    """
    settings = {
        "job": job, "user": user, "idle": _seconds(bounds.idle + bounds.margin), "lifetime": _seconds(bounds.lifetime),
        "bootstrap": _seconds(bounds.bootstrap), "gone": _seconds(bounds.gone), "interval": f"{bounds.interval:g}",
    }  # fmt: skip
    assigned = "\n".join(f"{name}={quote(value)}" for name, value in settings.items())
    return f"#!/bin/sh\n# skymagic: ends this machine when nobody uses it\n{assigned}\n{_LOOP}"


def watchdog_unit() -> str:
    """The systemd unit that runs it; started again whatever ends it."""
    return (
        "[Unit]\nDescription=skymagic: ends this machine when nobody uses it\n"
        f"[Service]\nExecStart=/bin/sh {WATCHDOG_PATH}\nRestart=always\nRestartSec=5\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def _seconds(value: float) -> str:
    return str(max(1, round(value)))


# /run is empty after each boot. "boot id" as in wire.record: an agent's file may be older than this boot.
_LOOP = r"""
state=${SKYMAGIC_WATCHDOG_STATE:-/run/skymagic-watchdog}
mkdir -p "$state"
uid=$(id -u "$user" 2>/dev/null || echo none)
home=$(getent passwd "$user" | cut -d: -f6)

uptime() { cut -d. -f1 /proc/uptime; }

# The time since when something is so, kept over restarts of this script: since NAME VALUE
since() {
    [ "$(sed -n 1p "$state/$1" 2>/dev/null)" = "$2" ] || printf '%s\n%s\n' "$2" "$(uptime)" >"$state/$1"
    sed -n 2p "$state/$1"
}

over() { [ $(($(uptime) - $(since "$1" "$2"))) -ge "$3" ]; }

# When a process was started, in ticks since boot: what tells it from a later one of the same number.
ticks() {
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
    set -- ${stat##*) }
    echo "${20}"
}

lives() {
    [ "$3" = "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)" ] && [ "$2" != "" ] && [ "$(ticks "$1")" = "$2" ]
}

# The records of agents that live.
agents() {
    for file in "/tmp/skymagic-daemon-$uid-$job"-*/record "$home/.skymagic/run/skymagic-daemon-$uid-$job"-*/record \
        "/var/tmp/skymagic-daemon-$uid-$job"-*/record; do
        # anybody can make a folder in a shared place, with the process id of anything that lives
        for part in "${file%/record}" "$file"; do
            [ ! -L "$part" ] && [ "$(stat -c %u "$part" 2>/dev/null)" = "$uid" ] || continue 2
        done
        [ -f "$file" ] || continue
        read -r pid started boot <"$file" || continue
        if lives "$pid" "$started" "$boot"; then sed -n 2p "$file"; fi
    done
}

# "busy", or since when the last one of them is idle.
use() {
    echo "$1" | sed -n 's/.*"busy_since": *\([0-9.]*\).*"idle_since": *\([0-9.]*\).*/\1 \2/p' | while read -r busy idle; do
        case $busy in 0|0.0) echo "$idle" ;; *) echo busy ;; esac
    done | sort -n | tail -n 1
}

reason() {
    if over begun now "$lifetime"; then echo "its lifetime of $lifetime s is over"; return; fi
    found=$(agents)
    if [ -z "$found" ]; then
        if [ -e "$state/seen" ]; then
            if over agent gone "$gone"; then echo "no agent for $gone s"; fi
        elif over begun now "$bootstrap"; then echo "no agent within $bootstrap s"; fi
        return
    fi
    : >"$state/seen"
    since agent there >/dev/null
    idle_since=$(use "$found")
    [ -n "$idle_since" ] || idle_since=busy  # another version's record: the lifetime bounds it
    if over use "$idle_since" "$idle" && [ "$idle_since" != busy ]; then echo "no cell for $idle s"; fi
}

tries=0
while :; do
    why=$(reason)
    if [ -n "$why" ]; then
        tries=$((tries + 1))
        echo "skymagic: this machine ends: $why" | tee "$state/reason" >&2
        if [ $tries -lt 4 ]; then shutdown -P now; else poweroff -f; fi
    fi
    sleep "$interval"
done
"""


MOST_BYTES = 16384  # what EC2 takes, before base64


def cloud_config(keys: PoolKeys, job: str, user: str, ssh_port: int, bounds: WatchdogBounds) -> str:
    """The user data of all machines of a pool. Raises RequestError: it is larger than EC2 takes."""
    config = {
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": keys.host.private, "ed25519_public": keys.host.public},
        "ssh_authorized_keys": [keys.user.public],
        "ssh_pwauth": False,
        "package_update": False,
        "package_upgrade": False,
        "bootcmd": _at_boot(bounds),
        "write_files": [
            {
                "path": WATCHDOG_PATH,
                "permissions": "0755",
                "content": watchdog_script(job, user, bounds),
            },
            {"path": f"/etc/systemd/system/{WATCHDOG_UNIT}.service", "content": watchdog_unit()},
            *([{"path": SSHD_PORT, "content": f"Port {ssh_port}\n"}] if ssh_port != 22 else []),
        ],
        "runcmd": [
            ["systemctl", "daemon-reload"],
            ["systemctl", "enable", "--now", WATCHDOG_UNIT],
            *(
                [["sh", "-c", "systemctl restart ssh.socket ssh sshd || true"]]
                if ssh_port != 22
                else []
            ),
        ],
    }
    text = f"#cloud-config\n{json.dumps(config, indent=1)}\n"
    if len(text.encode()) > MOST_BYTES:
        raise RequestError(
            f"the user data has {len(text.encode())} bytes, and EC2 takes {MOST_BYTES}"
        )
    return text


def _at_boot(bounds: WatchdogBounds) -> list[list[str]]:
    """Before anything else: the lifetime holds although all that follows may fail, and no update takes apt's lock or reboots."""
    timers = "apt-daily.timer apt-daily-upgrade.timer unattended-upgrades.service"
    # a timer of systemd's own: so early in a boot `shutdown` may find nobody who keeps its time
    return [
        ["systemd-run", f"--on-active={max(60, round(bounds.lifetime))}s", "systemctl", "poweroff"],
        ["sh", "-c", f"systemctl mask --now {timers} || true"],
    ]
