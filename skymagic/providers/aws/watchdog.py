"""The watchdog of a rented machine: sh that ends it when nobody uses it, with no notebook alive and no AWS credentials; pure.

EC2 terminates what shuts itself down (InstanceInitiatedShutdownBehavior), so that ending the system ends the cost. The script
reads what the node's agent writes of itself (`wire.record`) and trusts no clock that is set: time is the kernel's uptime.
"""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote

PATH = "/usr/local/lib/skymagic/watchdog"
UNIT = "skymagic-watchdog"
BOOTSTRAP = 1800.0
"""Seconds that a machine has until its first agent runs: packages for many GPUs take minutes."""
GONE = 300.0
"""Seconds for which a machine waits for another agent when its own has ended: ranks are started anew within that."""
IDLE_MARGIN = 120.0
"""Seconds beyond --idle after which the machine ends although its agent, which should have ended itself by then, has not."""


@dataclass(frozen=True)
class Bounds:
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


def script(job: str, user: str, bounds: Bounds) -> str:
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


def unit() -> str:
    """The systemd unit that runs it; started again whatever ends it."""
    return (
        "[Unit]\nDescription=skymagic: ends this machine when nobody uses it\n"
        f"[Service]\nExecStart=/bin/sh {PATH}\nRestart=always\nRestartSec=5\n"
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
