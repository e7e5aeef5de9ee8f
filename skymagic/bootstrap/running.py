"""sh that finds and ends what of a user's pools runs on a host: no Python is needed there, and nothing is known of the pools before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from skymagic.bootstrap.quoting import MARK, TELL
from skymagic.wire import processes
from skymagic.wire.record import AgentRecord, read

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
end() {
    keeper=$(daemon "$1")
    kill -TERM "$1" 2>/dev/null
    n=0
    while lives "$@" && [ $n -lt 50 ]; do n=$((n + 1)); sleep 0.2 2>/dev/null || sleep 1; done
    if lives "$@"; then kill -KILL "-$1" 2>/dev/null; sleep 1; fi
    if lives "$@"; then tell left "$1"; else tell ended "$1"; fi
    # it has told its notebook by now, if there is one, and would wait for another
    if [ -n "$keeper" ]; then kill -TERM "$keeper" 2>/dev/null; fi
}
for job in $jobs; do
    # the number of the node stands behind it
    for file in $(records "$job-[0-9]*"); do
        read -r pid ticks boot <"$file"
        if lives "$pid" "$ticks" "$boot"; then end "$pid" "$ticks" "$boot"; fi
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


def end_script(jobs: Sequence[str]) -> str:
    """POSIX sh that ends the agents of these jobs, with all that they have started, and says what `parse_end` reads.

    SIGTERM, upon which an agent ends its ranks and removes what it has written; SIGKILL after ten seconds.
    """
    return f"{TELL}\njobs={quote(' '.join(jobs))} module={processes.ATTACH}\n{MACHINE}{_END}"


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
    lines = [line.removeprefix(MARK).partition(" ") for line in out.splitlines() if line.startswith(MARK)]
    if not any(what == "end" for what, _, _ in lines):
        raise ValueError("its shell did not run the script to its end")
    return [(what, text.strip()) for what, _, text in lines]
