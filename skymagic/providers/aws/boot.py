"""First boot of a rented machine: the keys of its pool, a watchdog, and the user data with both.

::

    keys = make_keys(job)        # folder/key (0600), folder/known_hosts
    cloud_config(keys, …)        # puts keys.host.private and the watchdog on the machines
    keys.endpoint(…)             # accepts only that host key

The watchdog is an sh script that ends an unused machine even without a living notebook or AWS
credentials. EC2 terminates a machine that shuts itself down (InstanceInitiatedShutdownBehavior), so
shutting the system down ends the cost. The script reads the record that the node's agent writes
(`wire.record`) and trusts no adjustable clock: time is the kernel's uptime.

User data is JSON, which is valid YAML and needs no further quoting. Every process on the machine
can read it from the metadata service, so it contains no credentials and none of the user's secrets.
It does contain the host's private key, as cloud-init's documentation shows for `ssh_keys`; that key
identifies only this pool's machines.
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
    """An ed25519 key pair in OpenSSH's formats. Its repr hides the private half."""

    private: str
    public: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"


@dataclass(frozen=True)
class PoolKeys:
    """Login key of a pool, and the host key of its machines.

    Attributes:
        folder: folder with the user's key and the known host key, private to this user.
        alias: name of the host key in the known_hosts file. All machines of a launch share one host
            key, because they get the same user data.
    """

    folder: Path
    alias: str
    user: KeyPair
    host: KeyPair

    def endpoint(
        self, label: str, address: str, port: int, user: str, jump: tuple[Endpoint, ...] = ()
    ) -> Endpoint:
        """Return how to reach a machine: with this key, and only if it presents that host key."""
        return Endpoint(
            label,
            address,
            port,
            user,
            identities=(str(self.folder / "key"),),
            identities_given=True,
            identities_only=True,
            agent=None,
            proxy_jump=jump,
            known_hosts=(str(self.folder / "known_hosts"),),
            host_key_alias=self.alias,
            strict="yes",
        )


def keys_folder(job: str) -> Path:
    """Return the folder of a pool's keys.

    It is in the user's state folder, so that a restarted notebook finds the keys.
    """
    return atomic.state_folder("keys") / job


def remove_keys(job: str) -> None:
    """Delete the keys of a pool. Twice is safe."""
    if job and Path(job).name == job:  # it may come from a tag
        shutil.rmtree(keys_folder(job), ignore_errors=True)


def make_keys(job: str) -> PoolKeys:
    """Create keys in a new folder."""
    at = keys_folder(job)
    keys = PoolKeys(at, job.lower(), generate_key("skymagic"), generate_key("skymagic host"))
    atomic.private_folder(at.parent)
    at.mkdir(mode=0o700)
    _write(at / "key", keys.user.private)
    _write(at / "known_hosts", f"{keys.alias} {keys.host.public}\n")
    return keys


def kept_keys(job: str) -> PoolKeys:
    """Load the keys of a pool that another notebook created.

    Keeps the user key and adds a new host key for further machines, next to the first one.

    Raises:
        OSError: the keys are not on this machine.
    """
    from cryptography.hazmat.primitives import serialization as forms

    at = keys_folder(job)
    private = (at / "key").read_text()
    key = forms.load_ssh_private_key(private.encode(), None)
    public = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    keys = PoolKeys(
        at,
        job.lower(),
        KeyPair(private, f"{public.decode()} skymagic"),
        generate_key("skymagic host"),
    )
    with (at / "known_hosts").open("a") as file:
        file.write(f"{keys.alias} {keys.host.public}\n")
    return keys


def generate_key(comment: str) -> KeyPair:
    """Generate a new key pair."""
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
"""Seconds until a machine must run its first agent: packages for many GPUs take minutes."""
GONE = 300.0
"""Seconds a machine waits for another agent after its own has ended.

Ranks are restarted within that time.
"""
IDLE_MARGIN = 120.0
"""Seconds beyond --idle after which the machine ends even if its agent has failed to end itself."""


@dataclass(frozen=True)
class WatchdogBounds:
    """Time limits after which a machine ends itself, in seconds.

    Attributes:
        idle: time without a cell.
        lifetime: time since boot.
        bootstrap: time without a first agent.
        absent_after: time since the last agent ended.
        margin: extra idle time that leaves the agent the chance to end itself first.
        interval: time between two checks.
    """

    idle: float
    lifetime: float
    bootstrap: float = BOOTSTRAP
    absent_after: float = GONE
    margin: float = IDLE_MARGIN
    interval: float = 10.0


def watchdog_script(job: str, user: str, bounds: WatchdogBounds) -> str:
    """Return the watchdog as POSIX sh. It never exits before its machine ends.

    Args:
        job: job ID whose agents count.
        user: user that runs them.
    """
    settings = {
        "job": job,
        "user": user,
        "idle": _seconds(bounds.idle + bounds.margin),
        "lifetime": _seconds(bounds.lifetime),
        "bootstrap": _seconds(bounds.bootstrap),
        "gone": _seconds(bounds.absent_after),
        "interval": f"{bounds.interval:g}",
    }
    assigned = "\n".join(f"{name}={quote(value)}" for name, value in settings.items())
    return f"#!/bin/sh\n# skymagic: ends this machine when nobody uses it\n{assigned}\n{_LOOP}"


def watchdog_unit() -> str:
    """Return the systemd unit that runs the watchdog and always restarts it."""
    return (
        "[Unit]\nDescription=skymagic: ends this machine when nobody uses it\n"
        f"[Service]\nExecStart=/bin/sh {WATCHDOG_PATH}\nRestart=always\nRestartSec=5\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def _seconds(value: float) -> str:
    return str(max(1, round(value)))


# /run is empty after each boot. The boot ID is the one of wire.record: an agent's file may be older
# than this boot.
_LOOP = r"""
state=${SKYMAGIC_WATCHDOG_STATE:-/run/skymagic-watchdog}
mkdir -p "$state"
uid=$(id -u "$user" 2>/dev/null || echo none)
home=$(getent passwd "$user" | cut -d: -f6)

uptime() { cut -d. -f1 /proc/uptime; }

# The time since when something is so, kept over restarts of this script: since NAME VALUE
since() {
    [ "$(sed -n 1p "$state/$1" 2>/dev/null)" = "$2" ] ||
        printf '%s\n%s\n' "$2" "$(uptime)" >"$state/$1"
    sed -n 2p "$state/$1"
}

over() { [ $(($(uptime) - $(since "$1" "$2"))) -ge "$3" ]; }

# When a process was started, in ticks since boot: it distinguishes the process from a later one
# with the same number.
ticks() {
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
    set -- ${stat##*) }
    echo "${20}"
}

lives() {
    [ "$3" = "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)" ] &&
        [ "$2" != "" ] && [ "$(ticks "$1")" = "$2" ]
}

# The records of agents that live.
agents() {
    for file in "/tmp/skymagic-daemon-$uid-$job"-*/record \
        "$home/.skymagic/run/skymagic-daemon-$uid-$job"-*/record \
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
    echo "$1" |
        sed -n 's/.*"busy_since": *\([0-9.]*\).*"idle_since": *\([0-9.]*\).*/\1 \2/p' |
        while read -r busy idle; do
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
    if over use "$idle_since" "$idle" && [ "$idle_since" != busy ]; then
        echo "no cell for $idle s"
    fi
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


MOST_BYTES = 16384  # EC2's limit, before base64


def cloud_config(keys: PoolKeys, job: str, user: str, ssh_port: int, bounds: WatchdogBounds) -> str:
    """Return the user data for all machines of a pool.

    Raises RequestError if it exceeds EC2's limit.
    """
    config = {
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": keys.host.private, "ed25519_public": keys.host.public},
        "ssh_authorized_keys": [keys.user.public],
        "ssh_pwauth": False,
        "package_update": False,
        "package_upgrade": False,
        "bootcmd": _boot_commands(bounds),
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


def _boot_commands(bounds: WatchdogBounds) -> list[list[str]]:
    """Return commands that run before anything else.

    They enforce the lifetime even if everything later fails, and prevent updates from taking apt's
    lock or rebooting.
    """
    timers = "apt-daily.timer apt-daily-upgrade.timer unattended-upgrades.service"
    # a systemd timer, because this early in a boot the service behind `shutdown` may not run yet
    return [
        ["systemd-run", f"--on-active={max(60, round(bounds.lifetime))}s", "systemctl", "poweroff"],
        ["sh", "-c", f"systemctl mask --now {timers} || true"],
    ]
