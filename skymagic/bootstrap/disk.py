"""What skymagic keeps on a host's disk: sh that lists and removes it, and what of it may go; pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from shlex import quote

from skymagic.bootstrap.quoting import TELL
from skymagic.bootstrap.running import MACHINE, Running, parse_list, said

DAY = 86_400.0
UNUSED_AFTER = 30 * DAY
"""Seconds after which something that no pool has used counts as unused."""
BEING_MADE = DAY
"""Seconds for which an environment that is not ready may be somebody's who makes it."""

_FOLDER = r"""
folder=${SKYMAGIC_HOME:-"${HOME-}/.skymagic"}
mtime() { stat -c %Y "$1" 2>/dev/null || stat -f %m "$1" 2>/dev/null || echo 0; }
# a folder's name as skymagic makes them
ours() { case $1 in *.held | *[!A-Za-z0-9._-]*) return 1 ;; esac; }
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
for one in values cache python; do
    if [ -e "$folder/$one" ]; then tell disk "$one" "$(kb "$folder/$one")" "$(mtime "$folder/$one")" yes "$one"; fi
done
"""

_CLEAN = r"""
# A folder that has another name cannot be begun to be used while it goes.
drop() {
    gone=$folder/.removing.$$
    mv "$1" "$gone" 2>/dev/null && rm -rf "$gone" && tell removed "$2"
}
find "$folder/values" -type f -mtime +30 -exec rm -f {} + 2>/dev/null
rm -rf "$folder"/.removing.*
"""


@dataclass(frozen=True)
class Item:
    """Something on a host's disk.

    Attributes:
        kind: "env", "code", "values", "cache" or "python".
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
        """Its path below skymagic's folder."""
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
    items: tuple[Item, ...]
    running: Running

    def users(self, item: Item) -> list[str]:
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


def _item(text: str) -> Item:
    kind, size, used, ready, name, contents = (*text.split(" ", 5), "")[:6]
    return Item(kind, int(size or 0) * 1024, float(used or 0), ready == "yes", name, contents.lstrip(", "))


def removable(disk: Disk, every: bool) -> list[Item]:
    """What may go: environments and code that no pool has used for `UNUSED_AFTER`, or with `every` all that none uses now.

    Values go one by one, by `clean_script`; all of them, caches of packages, and interpreters when no
    environment is left, with `every` alone.
    """
    now = disk.running.clock

    def unused(item: Item) -> bool:
        limit = 0.0 if every else UNUSED_AFTER
        if item.kind == "env" and not item.ready:
            limit = max(limit, BEING_MADE)
        return now - item.used >= limit and not disk.users(item)

    chosen = [item for item in disk.items if item.kind in ("env", "code") and unused(item)]
    if every:
        kept = any(item.kind == "env" and item not in chosen for item in disk.items)
        whole = ("values", "cache") if kept else ("values", "cache", "python")
        chosen += [item for item in disk.items if item.kind in whole]
    return chosen


def clean_script(items: Sequence[Item]) -> str:
    """POSIX sh that removes these; says what `parse_clean` reads."""
    calls = [f'drop "$folder"/{quote(item.place)} {quote(item.place)}' for item in items]
    return "\n".join([TELL, _FOLDER, _CLEAN, *calls, "tell end", ""])


def parse_clean(out: str) -> Collection[str]:
    """The places that `clean_script` has removed.

    Raises:
        ValueError: it did not come to its end.
    """
    return {text for what, text in said(out) if what == "removed"}
