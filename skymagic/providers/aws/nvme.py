"""A machine's own NVMe disks as the place for environments and values: sh that mounts them at ``~/.skymagic``; pure, and who runs it.

They are many times faster than the system disk, and lost with the machine. Not done by user data: that runs before the user and its
home are there, and what goes wrong in it nobody hears.
"""

from __future__ import annotations

from shlex import quote

from skymagic.bootstrap.quoting import MARK, TELL
from skymagic.providers.provider import Say
from skymagic.ssh.connection import Connection

MODEL = "Amazon EC2 NVMe Instance Storage"
"""What these disks call themselves; EBS volumes are "Amazon Elastic Block Store"."""
SECONDS = 120.0
"""A file system on 8 disks of 1 TB is made within seconds."""

_USER = r"""
main() {
    place=${SKYMAGIC_HOME:-$HOME/.skymagic}
    as_root="sudo -n"
    if [ "$(id -u)" = 0 ]; then as_root=; fi
    if ! $as_root true 2>/dev/null; then tell nvme "$(id -un) may not become root"; return; fi
    $as_root sh -c "$root" sh "$place" "$(id -u):$(id -g)" "$sys" "$model" "$ready" </dev/null
}
main 2>&1
"""

_ROOT = r"""
place=$1 owner=$2 sys=$3 model=$4 ready=$5
mounted() { grep -q " $1 " /proc/mounts; }

# Whether somebody has a disk already: a part of it, a volume made of it, or the whole is in use.
taken() {
    for one in "$sys/$1/holders/"* "$sys/$1/$1"p*; do
        if [ -e "$one" ]; then return 0; fi
    done
    grep -q "^/dev/$1 " /proc/mounts
}

own() { chown "$owner" "$1" && chmod 700 "$1"; }

# One file system over all of them
made() {
    if [ $# -gt 1 ] && command -v mdadm >/dev/null; then
        mdadm --create /dev/md/skymagic --run --force --quiet --level=0 --raid-devices=$# "$@" && set -- /dev/md/skymagic
    fi
    mkfs.ext4 -q -F -m 0 -E nodiscard,lazy_itable_init=1 "$1" && mount -o noatime "$1" "$place"
}

main() {
    if mounted "$place"; then tell nvme; return; fi
    if [ -n "$(ls -A "$place" 2>/dev/null)" ]; then tell nvme "there is something in $place already"; return; fi
    mkdir -p "$place" || return
    own "$place"
    if mounted "$ready"; then  # the image has mounted them itself
        mkdir -p "$ready/skymagic" && mount --bind "$ready/skymagic" "$place" && own "$place" && tell nvme
        return
    fi
    disks=
    for file in "$sys"/*/device/model; do
        [ -r "$file" ] || continue
        name=${file#"$sys"/} name=${name%%/*}
        case $(cat "$file") in "$model"*) taken "$name" || disks="$disks /dev/$name" ;; esac
    done
    if [ -z "$disks" ]; then tell nvme "there is none that is not in use"; return; fi
    made $disks && own "$place" && tell nvme
}
main
"""


def script(sys: str = "/sys/block", ready: str = "/opt/dlami/nvme") -> str:
    """sh that mounts the disks, run as the machine's user; twice is safe.

    Args:
        sys: where the kernel lists disks. ready: where an image for deep learning has mounted them.
    """
    values = {"root": f"{TELL}\n{_ROOT}", "sys": sys, "model": MODEL, "ready": ready}
    return "\n".join([TELL, *(f"{name}={quote(value)}" for name, value in values.items()), _USER])


def use(host: Connection, say: Say) -> None:
    """Mount a machine's own disks; where that cannot be, its system disk serves, and a line says why.

    Raises:
        HostError: the connection is lost.
    """
    done = host.run(script(), timeout=SECONDS)
    told = [
        line.removeprefix(f"{MARK}nvme").strip() for line in done.out.splitlines() if line.startswith(f"{MARK}nvme")
    ]
    if told == [""]:
        return
    why = told[-1] if told else " ".join((done.out + done.err).split())[-300:] or f"exit code {done.status}"
    say(f"{host.label}: environments are on its system disk, for its own disks cannot be used: {why}")
