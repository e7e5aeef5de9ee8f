"""Which pools were started from here by this user: a file each, while the pool is not known to have ended; and the last lines of rank 0
of pools that have ended.

Records are hints, and no state: what runs is on the machines. A record that is lost costs the hint alone."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from skymagic.errors import PoolError
from skymagic.wire import atomic
from skymagic.wire.processes import NOTEBOOK_JOB
from skymagic.wire.record import answers, identity

KEPT_LOGS = 20  # how many files there are, at most; each is a megabyte at most (`wire.agent.HEAD_CHARACTERS`)
RENTED = ("aws",)
"""Providers whose machines cost money while nobody uses them."""


@dataclass(frozen=True)
class PoolRecord:
    """A pool on other machines, or on this one.

    Attributes:
        hosts: as the user calls them.
        started: seconds since 1970.
        folder: where the notebook ran. machine: on which machine; several may share a home.
        process: the notebook's, as `wire.record.identity` tells it from later ones; "" if nobody has the pool.
        held: since when it has the pool.
        outlives: whether it outlives its notebook; where not, the record is there for the next notebook of its folder to be told.
        notebook: name of the notebook that was executed on the pool last (`api.notebooks`); "" once another one has it.
    """

    name: str
    job_id: str
    provider: str
    hosts: tuple[str, ...]
    folder: str
    machine: str = field(default_factory=socket.gethostname)
    started: float = field(default_factory=time.time)
    process: str = field(default_factory=identity)
    held: float = field(default_factory=time.time)
    notebook: str = ""
    outlives: bool = True


def folder() -> Path:
    """Where the records are."""
    return atomic.state_folder("pools")


def write(record: PoolRecord) -> None:
    """Keep a record; a home that cannot be written keeps none."""
    atomic.keep(_path(record.job_id), json.dumps(asdict(record)).encode())


@contextlib.contextmanager
def locked(name: str, waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a lock that all notebooks of this user share; on a file system without locks, or where nothing can be kept, nobody is kept out.

    Args:
        name: of the lock.
        waits: called where another process has it, before this one waits for it.
    """
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            atomic.private_folder(folder())
            file = os.open(folder() / f"{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def note_local(record: PoolRecord) -> None:
    """Record a pool that ends with this process, in place of the last one from this folder: the folder's next notebook is told of it."""
    for other in _local():
        remove(other.job_id)
    write(replace(record, outlives=False))


def forget_local(name: str) -> None:
    """Remove the record of such a pool, which the user has ended; twice is safe."""
    for record in _local():
        if record.name == name:
            remove(record.job_id)


def ended_with_kernel(name: str | None = None) -> str:
    """Say that the last pool of a notebook in this folder was on this machine and ended with its kernel; "" for none, or none of this name."""
    for record in _local():
        if name in (None, record.name) and left(record):
            return f"pool {record.name!r} was on this machine and ended with its kernel; %sky_pool {record.name} … --detach starts one that outlives it"
    return ""


def _local() -> list[PoolRecord]:
    """Return the records of pools of this folder that end with their notebook."""
    with contextlib.suppress(OSError):  # the folder was deleted
        here = str(Path.cwd())
        return [one for one in _readable() if not one.outlives and one.folder == here]
    return []


def taken_words(record: PoolRecord) -> str:
    """Why a pool of this name is not rented a second time, and what to do."""
    return (
        f"{words(record)}: end that notebook, take the pool away from it (%sky_attach {record.name} --take-over), "
        "or give the new one another name (%sky_pool NAME …)"
    )


def left_words(record: PoolRecord) -> str:
    """Why a second pool is not started under the name of one that its notebook has left, and what to do."""
    return (
        f"{words(record)}, and it still runs: continue with it (%sky_attach {record.name}), "
        f"end it (%sky_down {record.job_id}{_hosts_option(record)}), or give the new one another name (%sky_pool NAME …)"
    )


def claim(record: PoolRecord) -> None:
    """Keep the record of a pool that is about to be made; of two notebooks that do so at once, one is refused.

    Raises:
        PoolError: a notebook that is alive has a pool of this name to which others could attach.
    """
    with locked("rented"):
        for other in every():
            rival = (other.provider in RENTED) == (record.provider in RENTED)
            if (
                rival
                and other.name == record.name
                and other.process != record.process
                and not left(other)
            ):
                raise PoolError(taken_words(other))
        write(record)


def taken(record: PoolRecord) -> PoolRecord:
    """The record of a pool that this process has from now on."""
    return replace(
        record,
        machine=socket.gethostname(),
        process=identity(),
        folder=str(Path.cwd()),
        held=time.time(),
        notebook=record.notebook if NOTEBOOK_JOB in os.environ else "",
    )


def bring(text: bytes, key: bytes, state: bytes) -> None:
    """Keep the record and the key of a pool that a notebook of another machine has made, which is "alive" or "gone" there."""
    record = _read(text.decode())
    write(replace(record, machine=socket.gethostname(), process="") if state == b"gone" else record)
    atomic.keep(folder() / f"{record.job_id}.key", key)


def remove(job_id: str) -> None:
    """The pool has ended; twice is safe."""
    with contextlib.suppress(OSError):
        for path in folder().glob(f"{job_id}.*"):  # its key, and how far it was shown, too
            path.unlink(missing_ok=True)


def own(job_id: str) -> bool:
    """Whether a pool is this process's: another notebook may have taken it over."""
    return any(one.job_id == job_id and one.process == identity() for one in every())


def every() -> list[PoolRecord]:
    """All records of pools that outlive their notebooks and can be read, the oldest first; damaged ones are left where they are.

    Of pools on this machine that were left and have ended since, nothing is kept.
    """
    found = [one for one in _readable() if one.outlives]
    for one in [
        one
        for one in found
        if one.provider == "local" and left(one) and not answers(f"{one.job_id}-0")
    ]:
        found.remove(one)
        remove(one.job_id)
    return sorted(found, key=lambda one: one.started)


def _readable() -> list[PoolRecord]:
    found = []
    with contextlib.suppress(OSError):
        for path in folder().glob("*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                found.append(_read(path.read_text()))
    return found


def left(record: PoolRecord) -> bool:
    """Whether nobody has it: the notebook that started it has ended (never so of one on another machine)."""
    if record.machine != socket.gethostname():
        return not record.process
    pid, _, _ = record.process.partition(" ")
    return not pid.isdigit() or identity(int(pid)) != record.process or not _lives(int(pid))


def named(name: str) -> PoolRecord:
    """The record of a pool by its name, or its job id. Raises PoolError where there is none, or several."""
    found = [one for one in every() if name in (one.name, one.job_id)]
    if len(found) == 1:
        return found[0]
    if found:
        listed = "\n".join(words(one) for one in found)
        raise PoolError(
            f"several pools are called {name!r}; name one by its job id, as in %sky_attach {found[0].job_id}:\n{listed}"
        )
    if gone := ended_with_kernel(name):
        raise PoolError(gone)
    known = ", ".join(sorted({one.name for one in every()}))
    there = f"; available: {known}" if known else ""
    raise PoolError(
        f"no pool {name!r} was left from here{there}: %sky_status --hosts … shows what runs on hosts"
    )


def left_here(name: str | None) -> list[PoolRecord]:
    """The pools of this name, or job id, that were left on this machine; all of them without one."""
    return [
        one
        for one in every()
        if name in (None, one.name, one.job_id) and one.provider == "local" and left(one)
    ]


def words(record: PoolRecord) -> str:
    """A record in a line."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started))
    whose = (
        "which has ended"
        if left(record)
        else f"process {record.process.partition(' ')[0]} on {record.machine}"
    )
    return f"{record.name} ({record.job_id}) on {','.join(record.hosts)}, since {when}, by a notebook in {record.folder}, {whose}"


def held_words(record: PoolRecord) -> str:
    """Say who has a pool."""
    return f"pool {record.name!r} is in use by {holder(record)}"


def holder(record: PoolRecord) -> str:
    """Who has a pool, and since when."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.held))
    what = f"{record.notebook}, executed" if record.notebook else "the notebook"
    return f"{what} in {record.folder} (process {record.process.partition(' ')[0]} on {record.machine}) since {when}"


def reminders(records: Sequence[PoolRecord]) -> list[str]:
    """What to tell a user of pools whose notebooks have ended without them."""
    return [_reminder(one) for one in records if left(one)]


def _reminder(one: PoolRecord) -> str:
    was_left = f"pool {one.name!r} was left on {', '.join(one.hosts)} by a notebook that is gone"
    if one.provider == "aws":
        return f"{was_left}: %sky_attach {one.name} continues with it, %sky_down {one.name} ends it, and it ends itself at its --idle"
    ends = f"%sky_down {one.job_id}{_hosts_option(one)}"
    return f"{was_left}: %sky_attach {one.name} continues with it, {ends} ends it"


def _hosts_option(record: PoolRecord) -> str:
    """The option that names a pool's hosts where a command must reach them; "" elsewhere."""
    return f" --hosts {','.join(record.hosts)}" if record.provider == "ssh" else ""


def forget(hosts: Collection[str], jobs: Collection[str]) -> None:
    """Remove records of pools that are gone: their notebooks have ended, and these hosts, asked now, run these jobs alone."""
    for one in every():
        if left(one) and set(one.hosts) <= set(hosts) and one.job_id not in jobs:
            remove(one.job_id)


def _read(text: str) -> PoolRecord:
    """What another version has added is left out."""
    values = json.loads(text)
    known = {
        name: values[name] for name in (one.name for one in fields(PoolRecord)) if name in values
    }
    return PoolRecord(**{**known, "hosts": tuple(map(str, values["hosts"]))})


def _path(job_id: str) -> Path:
    return folder() / f"{job_id}.json"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@dataclass(frozen=True)
class KeptLog:
    """The end of a log.

    Attributes:
        ended: when its pool has ended, in seconds since 1970.
    """

    name: str
    job_id: str
    ended: float
    text: str


def keep_log(name: str, job_id: str, text: str) -> None:
    """Keep the end of a log, and drop the oldest one too many; a home that cannot be written keeps none. Twice is safe."""
    if not text:
        return
    heading = json.dumps({"name": name, "ended": time.time()})
    atomic.keep(
        atomic.state_folder("logs") / f"{job_id}.log", f"{heading}\n{text}".encode(errors="replace")
    )
    with contextlib.suppress(OSError):
        for old in _newest_first()[KEPT_LOGS:]:
            old.unlink(missing_ok=True)


def kept_log(name: str) -> KeptLog | None:
    """Last lines of the pool of this name, or job id, that has ended last; None where nothing is kept. Damaged files are passed over."""
    with contextlib.suppress(OSError):
        for path in _newest_first():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                heading, _, text = path.read_bytes().decode(errors="replace").partition("\n")
                said = json.loads(heading)
                if name in (said["name"], path.stem):
                    return KeptLog(said["name"], path.stem, float(said["ended"]), text)
    return None


def _newest_first() -> list[Path]:
    times = []
    for path in atomic.state_folder("logs").glob("*.log"):
        with contextlib.suppress(OSError):  # another notebook has dropped it
            times.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(times, reverse=True)]
