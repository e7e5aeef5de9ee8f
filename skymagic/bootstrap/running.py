"""Render sh that manages a user's pools on a host, and parse its output.

The scripts find and stop agents, and list and remove the files that skymagic stores. All
functions are pure. The host needs no Python, and nothing has to be known about the pools.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from shlex import quote

from skymagic.bootstrap.shell import MARK, TELL
from skymagic.wire import processes
from skymagic.wire.record import ENDED, AgentRecord, read

# -- running agents --------------------------------------------------------------------------------


MACHINE = r"""
uid=$(id -u)
records() {
    for parent in /tmp "${HOME-}/.skymagic/run" "${TMPDIR:-/var/tmp}"; do
        for file in "$parent/skymagic-daemon-$uid-"$1/record; do
            folder=${file%/record}
            if [ -f "$file" ] && [ ! -L "$folder" ] && [ -O "$folder" ]; then
                echo "$file"
            fi
        done
    done | sort -u
}

# When a process was started, in ticks since boot: it distinguishes the process from a later one
# with the same number.
ticks() {
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
    set -- ${stat##*) }
    echo "${20}"
}

# PID TICKS BOOT
lives() {
    now=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)
    if [ -n "$now" ] && [ "$now" != "$3" ]; then return 1; fi
    # a zombie still has a number: its parent was stopped, and has not taken note of its end
    case $(cat "/proc/$1/stat" 2>/dev/null) in *") Z "*) return 1 ;; esac
    kill -0 "$1" 2>/dev/null && { [ "$2" = 0 ] || [ "$(ticks "$1")" = "$2" ]; }
}

running() {
    tell clock "$(date +%s)"
    records '*' | while IFS= read -r file; do
        read -r pid ticks boot <"$file"
        if lives "$pid" "$ticks" "$boot"; then tell record "$(sed -n 2p "$file")"; fi
    done
}
"""
"""Shell functions that find the agents on a machine. ``running`` prints what `parse_list` reads."""


_END = r"""
# PID: the agent's parent, if that is a daemon of ours, and not the one that adopts orphans, or the
# program that has started the agent.
daemon() {
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
    set -- ${stat##*) }
    if tr '\0' '\n' <"/proc/$2/cmdline" 2>/dev/null | grep -qxF "$module"; then echo "$2"; fi
}
# RECORD PID TICKS BOOT
end() {
    # the agent's last words, and its daemon's: else its notebook would take it for a death
    printf '%s\n' "$who" >"${1%/*}/$mark" 2>/dev/null
    shift
    keeper=$(daemon "$1")
    kill -TERM "$1" 2>/dev/null
    n=0
    while lives "$@" && [ $n -lt 50 ]; do n=$((n + 1)); sleep 0.2 2>/dev/null || sleep 1; done
    if lives "$@"; then kill -KILL "-$1" 2>/dev/null; sleep 1; fi
    if lives "$@"; then tell left "$1"; else tell ended "$1"; fi
    # it has told its notebook by now, if there is one, and would wait for another
    if [ -n "$keeper" ]; then kill -TERM "$keeper" 2>/dev/null; kill -CONT "$keeper" 2>/dev/null; fi
}
for job in $jobs; do
    # the number of the node stands behind it
    for file in $(records "$job-[0-9]*"); do
        read -r pid ticks boot <"$file"
        if lives "$pid" "$ticks" "$boot"; then end "$file" "$pid" "$ticks" "$boot"; fi
    done
done
tell end
"""


@dataclass(frozen=True)
class Running:
    """Agents that run on a host.

    Attributes:
        clock: seconds since 1970 by the host's clock, which the records use.
        records: records of live agents.
        unread: number of agents whose records this version cannot read.
    """

    clock: float
    records: tuple[AgentRecord, ...]
    unread: int = 0


def list_script() -> str:
    """Return POSIX sh whose output `parse_list` reads. It changes nothing."""
    return f"{TELL}\n{MACHINE}running\ntell end\n"


def end_script(jobs: Sequence[str], who: str) -> str:
    """Return POSIX sh that stops the agents of these jobs with everything that they started.

    Its output is for `parse_end`. SIGTERM makes an agent stop its ranks and remove its files.
    SIGKILL follows after ten seconds.

    Args:
        jobs: job IDs.
        who: shown in the pools' own notebooks, as in "the pool was ended by …".
    """
    settings = (
        f"jobs={quote(' '.join(jobs))} module={processes.ATTACH} mark={ENDED} who={quote(who)}"
    )
    return f"{TELL}\n{settings}\n{MACHINE}{_END}"


def parse_list(out: str) -> Running:
    """Parse the output of `list_script`.

    Raises:
        ValueError: the script did not run to its end.
    """
    lines = parse_lines(out)
    records = [read(text) for what, text in lines if what == "record"]
    clock = next((float(text) for what, text in lines if what == "clock" and text.isdigit()), 0.0)
    unique_records = {
        (record.job_id, record.node, record.pid): record for record in records if record is not None
    }
    return Running(clock, tuple(unique_records.values()), records.count(None))


def parse_end(out: str) -> tuple[int, int]:
    """Parse the output of `end_script`.

    Returns:
        The number of agents that were stopped, and of those that are still running.

    Raises:
        ValueError: the script did not run to its end.
    """
    keywords = [what for what, _ in parse_lines(out)]
    return keywords.count("ended"), keywords.count("left")


def parse_lines(out: str) -> list[tuple[str, str]]:
    """Return (keyword, text) for each line that one of our scripts printed.

    The last keyword is "end".

    Raises:
        ValueError: the script did not run to its end.
    """
    lines = [
        line.removeprefix(MARK).partition(" ") for line in out.splitlines() if line.startswith(MARK)
    ]
    if not any(what == "end" for what, _, _ in lines):
        raise ValueError("its shell did not run the script to its end")
    return [(what, text.strip()) for what, _, text in lines]


# -- disk use --------------------------------------------------------------------------------------


DAY = 86_400.0
UNUSED_AFTER = 30 * DAY
"""Seconds after which an item that no pool has used counts as unused."""
BEING_MADE = DAY
"""Seconds before an environment that is not ready counts as abandoned."""

_FOLDER = r"""
folder=${SKYMAGIC_HOME:-"${HOME-}/.skymagic"}
mtime() { stat -c %Y "$1" 2>/dev/null || stat -f %m "$1" 2>/dev/null || echo 0; }
# a folder's name as skymagic makes them
ours() { case $1 in *[!A-Za-z0-9._-]*) return 1 ;; esac; }
kb() { du -sk "$1" 2>/dev/null | sed 's/[^0-9].*//'; }
"""

_DISK = r"""
free=$(df -Pk "$folder" 2>/dev/null | sed -n '2,$s/.* \([0-9][0-9]*\)  *[0-9-]*%.*/\1/p')
tell folder "${free:-0}" "$folder"
for one in "$folder"/env/*/; do
    one=${one%/}
    ours "${one##*/}" || continue
    stamp=$one
    ready=no
    if [ -f "$one/.ready" ]; then stamp=$one/.ready ready=yes; fi
    has=$(sed -n 's/^version[_a-z]* *= *\([0-9]*\.[0-9]*\).*/Python \1/p' "$one/pyvenv.cfg" \
        2>/dev/null | sed 1q)
    for name in torch jax keras transformers lightning scikit_learn; do
        for info in "$one"/lib/python*/site-packages/"$name"-[0-9]*.dist-info; do
            if [ -d "$info" ]; then
                version=${info##*/"$name"-}
                has="$has, $name ${version%.dist-info}"
            fi
        done
    done
    tell disk env "$(kb "$one")" "$(mtime "$stamp")" "$ready" "${one##*/}" "$has"
done
for one in "$folder"/code/*/; do
    one=${one%/}
    if ours "${one##*/}"; then
        tell disk code "$(kb "$one")" "$(mtime "$one")" yes "${one##*/}"
    fi
done
for one in cache python; do
    if [ -e "$folder/$one" ]; then
        tell disk "$one" "$(kb "$folder/$one")" "$(mtime "$folder/$one")" yes "$one"
    fi
done
"""

_CLEAN = r"""
# A folder that has another name cannot be begun to be used while it goes.
drop() {
    gone=$folder/.removing.$$
    mv "$1" "$gone" 2>/dev/null && rm -rf "$gone" && tell removed "$2"
}
rm -rf "$folder"/.removing.*
"""


@dataclass(frozen=True)
class DiskItem:
    """An item on a host's disk.

    Attributes:
        kind: "env", "code", "cache" or "python".
        nbytes: space that it takes.
        used: time of its last use, in seconds since 1970 by the host's clock.
        ready: False for an environment under construction, or whose construction was cut off.
        name: its name in the folder of its kind, or the folder's own name.
        contents: for an environment, Python's version and frameworks.
    """

    kind: str
    nbytes: int
    used: float
    ready: bool
    name: str
    contents: str = ""

    @property
    def path(self) -> str:
        """Path below skymagic's folder."""
        return f"{self.kind}/{self.name}" if self.kind in ("env", "code") else self.kind


@dataclass(frozen=True)
class Disk:
    """Everything that skymagic keeps on a host.

    Attributes:
        folder: skymagic's folder.
        free: free bytes on its file system.
        items: contents of the folder.
        running: pools that run on the host.
    """

    folder: str
    free: int
    items: tuple[DiskItem, ...]
    running: Running

    def users(self, item: DiskItem) -> list[str]:
        """Return the names of the pools that use an item now."""
        path = f"{self.folder}/{item.path}"
        return sorted({record.pool for record in self.running.records if path in record.uses})


def disk_script() -> str:
    """Return POSIX sh whose output `parse_disk` reads. It changes nothing."""
    return f"{TELL}\n{MACHINE}{_FOLDER}{_DISK}running\ntell end\n"


def parse_disk(out: str) -> Disk:
    """Parse the output of `disk_script`.

    Raises:
        ValueError: the script did not run to its end.
    """
    lines = parse_lines(out)
    free, _, folder = next((text for what, text in lines if what == "folder"), "0 ").partition(" ")
    items = [_item(text) for what, text in lines if what == "disk"]
    return Disk(folder, int(free) * 1024, tuple(items), parse_list(out))


def _item(text: str) -> DiskItem:
    kind, size, used, ready, name, contents = (*text.split(" ", 5), "")[:6]
    return DiskItem(
        kind, int(size or 0) * 1024, float(used or 0), ready == "yes", name, contents.lstrip(", ")
    )


def removable(disk: Disk, include_all: bool) -> list[DiskItem]:
    """Return the items that may be removed.

    These are environments and code that no pool has used for `UNUSED_AFTER`, or with `include_all`,
    all that no pool uses now. Only with `include_all` are package caches removed too, and
    interpreters if no environment is left.
    """
    now = disk.running.clock

    def unused(item: DiskItem) -> bool:
        limit = 0.0 if include_all else UNUSED_AFTER
        # Another pool may be creating it at this moment.
        if item.kind == "env" and not item.ready:
            limit = max(limit, BEING_MADE)
        return now - item.used >= limit and not disk.users(item)

    to_remove = [item for item in disk.items if item.kind in ("env", "code") and unused(item)]
    if include_all:
        # The environments that stay still need the interpreters that uv fetched.
        has_environments = any(item.kind == "env" and item not in to_remove for item in disk.items)
        whole_kinds = ("cache",) if has_environments else ("cache", "python")
        to_remove += [item for item in disk.items if item.kind in whole_kinds]
    return to_remove


def clean_script(items: Sequence[DiskItem]) -> str:
    """Return POSIX sh that removes these items. `parse_clean` reads its output."""
    calls = [f'drop "$folder"/{quote(item.path)} {quote(item.path)}' for item in items]
    return "\n".join([TELL, _FOLDER, _CLEAN, *calls, "tell end", ""])


def parse_clean(out: str) -> Collection[str]:
    """Return the paths that `clean_script` removed.

    Raises:
        ValueError: the script did not run to its end.
    """
    return {text for what, text in parse_lines(out) if what == "removed"}
