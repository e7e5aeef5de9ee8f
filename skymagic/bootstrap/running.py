"""What of a user's pools is on a host: sh that finds and ends what runs, and lists and removes what skymagic keeps on the disk; pure.

No Python is needed there, and nothing is known of the pools before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from shlex import quote

from skymagic.bootstrap.shell import MARK, TELL
from skymagic.wire import processes
from skymagic.wire.record import ENDED, AgentRecord, read

# -- what runs ------------------------------------------------------------------------------------------------------------


MACHINE = r"""
uid=$(id -u)
records() {
    for parent in /tmp "${HOME-}/.skymagic/run" "${TMPDIR:-/var/tmp}"; do
        for file in "$parent/skymagic-daemon-$uid-"$1/record; do
            folder=${file%/record}
            if [ -f "$file" ] && [ ! -L "$folder" ] && [ -O "$folder" ]; then echo "$file"; fi
        done
    done | sort -u
}

# When a process was started, in ticks since boot: what tells it from a later one of the same number.
ticks() {
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
    set -- ${stat##*) }
    echo "${20}"
}

# PID TICKS BOOT
lives() {
    now=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)
    if [ -n "$now" ] && [ "$now" != "$3" ]; then return 1; fi
    # one that has ended and that its parent does not take note of, for that was stopped, is a number only
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
"""Functions that know of the agents on a machine; ``running`` says what `parse_list` reads."""


_END = r"""
# The agent's parent, if that is a daemon of ours: else it may be whoever looks after orphans, or what has started it.
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
    """What runs on a host.

    Attributes:
        clock: seconds since 1970 by the host's clock, as the records count.
        records: of agents that live.
        unread: how many more there are whose record this version cannot read.
    """

    clock: float
    records: tuple[AgentRecord, ...]
    unread: int = 0


def list_script() -> str:
    """POSIX sh that says what `parse_list` reads; it changes nothing."""
    return f"{TELL}\n{MACHINE}running\ntell end\n"


def end_script(jobs: Sequence[str], who: str) -> str:
    """Return POSIX sh that ends the agents of these jobs, with all that they have started, and says what `parse_end` reads.

    SIGTERM, upon which an agent ends its ranks and removes what it has written; SIGKILL after ten seconds.

    Args:
        who: what the pools' own notebooks are told, as in "the pool was ended by …".
    """
    settings = (
        f"jobs={quote(' '.join(jobs))} module={processes.ATTACH} mark={ENDED} who={quote(who)}"
    )
    return f"{TELL}\n{settings}\n{MACHINE}{_END}"


def parse_list(out: str) -> Running:
    """What `list_script` has said.

    Raises:
        ValueError: it did not come to its end.
    """
    lines = said(out)
    records = [read(text) for what, text in lines if what == "record"]
    clock = next((float(text) for what, text in lines if what == "clock" and text.isdigit()), 0.0)
    found = {(one.job_id, one.node, one.pid): one for one in records if one is not None}
    return Running(clock, tuple(found.values()), records.count(None))


def parse_end(out: str) -> tuple[int, int]:
    """(how many agents were ended, how many are still there), of what `end_script` has said.

    Raises:
        ValueError: it did not come to its end.
    """
    words = [what for what, _ in said(out)]
    return words.count("ended"), words.count("left")


def said(out: str) -> list[tuple[str, str]]:
    """(what, text) of each line that a script of ours has said, the last one "end".

    Raises:
        ValueError: it did not come to its end.
    """
    lines = [
        line.removeprefix(MARK).partition(" ") for line in out.splitlines() if line.startswith(MARK)
    ]
    if not any(what == "end" for what, _, _ in lines):
        raise ValueError("its shell did not run the script to its end")
    return [(what, text.strip()) for what, _, text in lines]


# -- what is on the disk --------------------------------------------------------------------------------------------------


DAY = 86_400.0
UNUSED_AFTER = 30 * DAY
"""Seconds after which something that no pool has used counts as unused."""
BEING_MADE = DAY
"""Seconds for which an environment that is not ready may be somebody's who makes it."""

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
    has=$(sed -n 's/^version[_a-z]* *= *\([0-9]*\.[0-9]*\).*/Python \1/p' "$one/pyvenv.cfg" 2>/dev/null | sed 1q)
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
    if ours "${one##*/}"; then tell disk code "$(kb "$one")" "$(mtime "$one")" yes "${one##*/}"; fi
done
for one in cache python; do
    if [ -e "$folder/$one" ]; then tell disk "$one" "$(kb "$folder/$one")" "$(mtime "$folder/$one")" yes "$one"; fi
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
    """Something on a host's disk.

    Attributes:
        kind: "env", "code", "cache" or "python".
        nbytes: what it takes.
        used: when it was used last, seconds since 1970 by the host's clock.
        ready: False for an environment that somebody makes, or whose making was cut off.
        name: its name in its kind's folder, or the folder's own.
        contents: Python's version and frameworks, of an environment.
    """

    kind: str
    nbytes: int
    used: float
    ready: bool
    name: str
    contents: str = ""

    @property
    def place(self) -> str:
        """Path below skymagic's folder."""
        return f"{self.kind}/{self.name}" if self.kind in ("env", "code") else self.kind


@dataclass(frozen=True)
class Disk:
    """What skymagic keeps on a host.

    Attributes:
        folder: where. free: bytes that are free there.
        running: the pools that live there.
    """

    folder: str
    free: int
    items: tuple[DiskItem, ...]
    running: Running

    def users(self, item: DiskItem) -> list[str]:
        """The pools that use it now."""
        path = f"{self.folder}/{item.place}"
        return sorted({one.pool for one in self.running.records if path in one.uses})


def disk_script() -> str:
    """POSIX sh that says what `parse_disk` reads; it changes nothing."""
    return f"{TELL}\n{MACHINE}{_FOLDER}{_DISK}running\ntell end\n"


def parse_disk(out: str) -> Disk:
    """What `disk_script` has said.

    Raises:
        ValueError: it did not come to its end.
    """
    lines = said(out)
    free, _, folder = next((text for what, text in lines if what == "folder"), "0 ").partition(" ")
    items = [_item(text) for what, text in lines if what == "disk"]
    return Disk(folder, int(free) * 1024, tuple(items), parse_list(out))


def _item(text: str) -> DiskItem:
    kind, size, used, ready, name, contents = (*text.split(" ", 5), "")[:6]
    return DiskItem(
        kind, int(size or 0) * 1024, float(used or 0), ready == "yes", name, contents.lstrip(", ")
    )


def removable(disk: Disk, every: bool) -> list[DiskItem]:
    """What may go: environments and code that no pool has used for `UNUSED_AFTER`, or with `every` all that none uses now.

    Caches of packages, and interpreters when no environment is left, go with `every` alone.
    """
    now = disk.running.clock

    def unused(item: DiskItem) -> bool:
        limit = 0.0 if every else UNUSED_AFTER
        if item.kind == "env" and not item.ready:
            limit = max(limit, BEING_MADE)
        return now - item.used >= limit and not disk.users(item)

    chosen = [item for item in disk.items if item.kind in ("env", "code") and unused(item)]
    if every:
        kept = any(item.kind == "env" and item not in chosen for item in disk.items)
        whole = ("cache",) if kept else ("cache", "python")
        chosen += [item for item in disk.items if item.kind in whole]
    return chosen


def clean_script(items: Sequence[DiskItem]) -> str:
    """POSIX sh that removes these; says what `parse_clean` reads."""
    calls = [f'drop "$folder"/{quote(item.place)} {quote(item.place)}' for item in items]
    return "\n".join([TELL, _FOLDER, _CLEAN, *calls, "tell end", ""])


def parse_clean(out: str) -> Collection[str]:
    """The places that `clean_script` has removed.

    Raises:
        ValueError: it did not come to its end.
    """
    return {text for what, text in said(out) if what == "removed"}
