"""Records of the pools that this user has started from here, and logs of ended pools.

A record is a JSON file that exists until the pool is known to have ended. It also holds the key
with which another notebook attaches (`pool.keys`), so only the user can read it. A log holds the
last lines of rank 0.

Records are hints, not state: the machines know what is running. Losing a record costs nothing but
the hint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from skymagic.errors import PoolError
from skymagic.wire import atomic
from skymagic.wire.processes import NOTEBOOK_JOB
from skymagic.wire.record import answers, identity

KEPT_LOGS = 20  # maximum number of files, each at most a megabyte (`wire.agent.HEAD_CHARACTERS`)
RENTED = ("aws",)
"""Providers whose machines cost money even while idle."""


UNREADABLE = (OSError, ValueError, TypeError, KeyError)
"""Errors of reading a record that is missing or damaged."""


@dataclass(frozen=True)
class SavedKey:
    """Key of a pool as its record stores it.

    Attributes:
        version: version of skymagic that wrote it; no other version can read `pickle`.
        python: version of Python that wrote it.
        interpreter: path of its Python interpreter.
        pickle: the pickled `pool.keys.PoolKey`, in base64.
    """

    version: str
    python: str
    interpreter: str
    pickle: str = field(repr=False)

    @property
    def minor(self) -> list[str]:
        """Major and minor version of Python, such as 3 and 11 of 3.11.2.

        Another minor version cannot unpickle our code and classes.
        """
        return self.python.split(".")[:2]


@dataclass(frozen=True)
class PoolRecord:
    """A pool on other machines, or on this one.

    Attributes:
        hosts: names of the hosts as the user gave them.
        started: time of the start, in seconds since 1970.
        folder: working folder of the notebook.
        machine: the notebook's machine; several machines may share a home folder.
        process: identity of the notebook's process, distinct from later ones with its PID
            (`wire.record.identity`); "" if no notebook has the pool.
        held: time at which the current notebook got the pool.
        outlives: True if the pool outlives its notebook. If not, the record only informs the next
            notebook in this folder.
        notebook: name of the notebook that was last executed on the pool (`api.notebooks`); "" once
            another notebook has the pool.
        key: everything that another notebook needs to attach; None until the pool is ready.
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
    key: SavedKey | None = field(default=None, repr=False)

    def plain(self) -> dict[str, object]:
        """Return the record without its key, for programs."""
        return {name: value for name, value in vars(self).items() if name != "key"}


def folder() -> Path:
    """Return the folder of the records."""
    return atomic.state_folder("pools")


def write(record: PoolRecord) -> None:
    """Write a record; if the home folder is not writable, nothing is recorded."""
    atomic.keep(_path(record.job_id), encode(record))


def release(record: PoolRecord) -> PoolRecord:
    """Record that no notebook uses the pool any more, and return the new record."""
    released = replace(record, process="")
    write(released)
    return released


def encode(record: PoolRecord) -> bytes:
    """Return the content of a record's file."""
    # JSON and not pickle: every notebook of this user reads all records, also those of other
    # versions
    return json.dumps(asdict(record)).encode()


def save_key(job_id: str, key: SavedKey) -> None:
    """Store the key of a pool in its record, if this process still has the pool."""
    # another notebook may take the pool over between the read and the write
    with locked("records"):
        if (record := of_job(job_id)) is not None and record.process == identity():
            write(replace(record, key=key))


def hand_over(record: PoolRecord) -> None:
    """Make this process the owner in a pool's record, keeping the key that was saved last."""
    with locked("records"):
        # Read again: the previous owner may have saved another key since `record` was read, for
        # example because a machine was replaced.
        write(_with_this_owner(of_job(record.job_id) or record))


@contextlib.contextmanager
def locked(name: str, waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a lock that all notebooks of this user share.

    On a file system without locks, or if nothing can be written, the lock excludes no one.

    Args:
        name: name of the lock.
        waits: called if another process holds the lock, before waiting for it.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            atomic.private_folder(folder())
            # The file is never removed: a process that waits for the old file and one that creates
            # the new file would both get the lock. A process that dies releases it.
            file = os.open(folder() / f"{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, file)
            # without waiting at first, so that the user is told only if there is a wait
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def note_local(record: PoolRecord) -> None:
    """Record a pool that ends with this process, replacing the folder's previous such record.

    The next notebook in this folder is informed of the pool.
    """
    for other in _local():
        remove(other.job_id)
    write(replace(record, outlives=False))


def forget_local(name: str) -> None:
    """Remove the record of a local pool that the user has ended; safe to call twice."""
    for record in _local():
        if record.name == name:
            remove(record.job_id)


def ended_with_kernel(name: str | None = None) -> str:
    """Explain that the last local pool of this folder ended with its kernel.

    Returns:
        The message, or "" without such a pool named `name`.
    """
    for record in _local():
        if name in (None, record.name) and is_left(record):
            return (
                f"pool {record.name!r} was on this machine and ended with its kernel; %sky_pool "
                f"{record.name} … --detach starts one that outlives it"
            )
    return ""


def _local() -> list[PoolRecord]:
    """Return the records of pools of this folder that end with their notebook."""
    with contextlib.suppress(OSError):  # the folder was deleted
        cwd = str(Path.cwd())
        return [record for record in _readable() if not record.outlives and record.folder == cwd]
    return []


def taken_message(record: PoolRecord) -> str:
    """Explain why a second pool of this name is not rented, and what to do."""
    return (
        f"{record_text(record)}: end that notebook, take the pool away from it (%sky_attach "
        f"{record.name} --take-over), "
        "or give the new one another name (%sky_pool NAME …)"
    )


def left_message(record: PoolRecord) -> str:
    """Explain why a pool cannot have the name of one that its notebook has left, and what to do."""
    return (
        f"{record_text(record)}, and it still runs: continue with it (%sky_attach {record.name}), "
        f"end it (%sky_down {record.job_id}{_hosts_option(record)}), or give the new one another "
        "name (%sky_pool NAME …)"
    )


def claim(record: PoolRecord) -> None:
    """Record a pool that is about to be made. If two notebooks do so at once, one is refused.

    Raises:
        PoolError: a live notebook has a pool of this name to which other notebooks could attach.
    """
    # The check and the write are one step for other notebooks: two that start a pool of the same
    # name at once would otherwise rent two sets of machines.
    with locked("rented"):
        for other in readable_records():
            # names of rented pools and of pools on the user's own machines are independent, as in
            # `pool.start`
            is_rival = (other.provider in RENTED) == (record.provider in RENTED)
            if (
                is_rival
                and other.name == record.name
                and other.process != record.process
                and not is_left(other)
            ):
                raise PoolError(taken_message(other), code="pool-held")
        write(record)


def _with_this_owner(record: PoolRecord) -> PoolRecord:
    return replace(
        record,
        machine=socket.gethostname(),
        process=identity(),
        folder=str(Path.cwd()),
        held=time.time(),
        # a job keeps the name of the notebook that it executes; anybody else continues without it
        notebook=record.notebook if NOTEBOOK_JOB in os.environ else "",
    )


def bring(text: bytes, state: bytes) -> PoolRecord:
    """Import the record of a pool that a notebook on another machine has started.

    Args:
        state: state of that notebook, "alive" or "gone".
    """
    record = _read(text.decode())
    # Only the other machine can tell whether its process lives. Without a process, the record
    # counts as left; with one of another machine, as held.
    if state == b"gone":
        record = replace(record, machine=socket.gethostname(), process="")
    write(record)
    return record


def remove(job_id: str) -> None:
    """Remove all files of a pool that has ended; safe to call twice."""
    with contextlib.suppress(OSError):
        for path in folder().glob(f"{job_id}.*"):
            path.unlink(missing_ok=True)


def is_own(job_id: str) -> bool:
    """Return True if a pool still belongs to this process and was not taken over."""
    record = of_job(job_id)
    return record is not None and record.process == identity()


def of_job(job_id: str) -> PoolRecord | None:
    """Return the record of a pool that outlives its notebook; None if there is no readable one."""
    with contextlib.suppress(*UNREADABLE):
        record = _read(_path(job_id).read_text())
        return record if record.outlives else None
    return None


def readable_records() -> list[PoolRecord]:
    """List the readable records of pools that outlive their notebooks, the oldest first.

    Damaged files are left alone. Records of pools on this machine that were left and have ended
    since are removed.
    """
    records = [record for record in _readable() if record.outlives]
    # Only for pools of this machine, whose daemons listen on a socket here: to ask other hosts
    # would delay each listing by a login.
    for record in [
        record
        for record in records
        if record.provider == "local" and is_left(record) and not answers(f"{record.job_id}-0")
    ]:
        records.remove(record)
        remove(record.job_id)
    return sorted(records, key=lambda record: record.started)


def latest(name: str) -> PoolRecord | None:
    """Return the newest record of this name or job ID, or None.

    Pools that end with their notebook are included.
    """
    matching = [record for record in _readable() if name in (record.name, record.job_id)]
    return max(matching, key=lambda record: record.started, default=None)


def _readable() -> list[PoolRecord]:
    records = []
    with contextlib.suppress(OSError):
        for path in folder().glob("*.json"):
            # damaged, of another version, or removed by another notebook since the listing
            with contextlib.suppress(*UNREADABLE):
                records.append(_read(path.read_text()))
    return records


def is_left(record: PoolRecord) -> bool:
    """Return True if the notebook that has the pool is known to have ended.

    A notebook on another machine counts as alive, unless the record names no process.
    """
    # a home folder may be shared by machines, and a process ID means nothing on another one
    if record.machine != socket.gethostname():
        return not record.process
    # The identity includes the time of the process's start, because its ID may be in use again.
    pid, _, _ = record.process.partition(" ")
    return not pid.isdigit() or identity(int(pid)) != record.process or not _is_alive(int(pid))


def named(name: str) -> PoolRecord:
    """Find a pool's record by name or job ID. Raises PoolError unless exactly one matches."""
    matches = [record for record in readable_records() if name in (record.name, record.job_id)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        listing = "\n".join(record_text(record) for record in matches)
        raise PoolError(
            f"several pools are called {name!r}; name one by its job id, as in %sky_attach "
            f"{matches[0].job_id}:\n{listing}",
            code="pool-ambiguous",
            names=[name],
        )
    if message := ended_with_kernel(name):
        raise PoolError(message, code="pool-ended")
    names = ", ".join(sorted({record.name for record in readable_records()}))
    available = f"; available: {names}" if names else ""
    raise PoolError(
        f"no pool {name!r} was left from here{available}: %sky_status --hosts … shows what runs on "
        "hosts",
        code="no-pool",
        names=[name],
    )


def left_on_this_machine(name: str | None) -> list[PoolRecord]:
    """List the pools left on this machine that have this name or job ID; all if it is None."""
    return [
        entry
        for entry in readable_records()
        if name in (None, entry.name, entry.job_id) and entry.provider == "local" and is_left(entry)
    ]


def record_text(record: PoolRecord) -> str:
    """Describe a record in a line."""
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started))
    owner = (
        "which has ended"
        if is_left(record)
        else f"process {record.process.partition(' ')[0]} on {record.machine}"
    )
    return (
        f"{record.name} ({record.job_id}) on {','.join(record.hosts)}, since {started}, by a "
        f"notebook in {record.folder}, {owner}"
    )


def owner_message(record: PoolRecord) -> str:
    """State which notebook has a pool."""
    return f"pool {record.name!r} is in use by {holder(record)}"


def holder(record: PoolRecord) -> str:
    """Describe the notebook that has a pool, and since when."""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.held))
    notebook = f"{record.notebook}, executed" if record.notebook else "the notebook"
    return (
        f"{notebook} in {record.folder} (process {record.process.partition(' ')[0]} on "
        f"{record.machine}) since {since}"
    )


def reminders(records: Sequence[PoolRecord]) -> list[str]:
    """Remind the user of pools whose notebooks have ended without ending the pools."""
    return [_reminder(record) for record in records if is_left(record)]


def _reminder(record: PoolRecord) -> str:
    was_left = (
        f"pool {record.name!r} was left on {', '.join(record.hosts)} by a notebook that is gone"
    )
    if record.provider == "aws":
        return (
            f"{was_left}: %sky_attach {record.name} continues with it, "
            f"%sky_down {record.name} ends it, and it ends itself at its --idle"
        )
    command = f"%sky_down {record.job_id}{_hosts_option(record)}"
    return f"{was_left}: %sky_attach {record.name} continues with it, {command} ends it"


def _hosts_option(record: PoolRecord) -> str:
    """Return the option that names a pool's hosts if a command must reach them, else ""."""
    return f" --hosts {','.join(record.hosts)}" if record.provider == "ssh" else ""


def forget(hosts: Collection[str], jobs: Collection[str]) -> None:
    """Remove the records of pools that are gone.

    A pool is gone if its notebook has ended and all of its hosts, queried just now, run only
    `jobs`.
    """
    for record in readable_records():
        if is_left(record) and set(record.hosts) <= set(hosts) and record.job_id not in jobs:
            remove(record.job_id)


def private(job_id: str) -> PoolRecord:
    """Read the record of a pool to use its key.

    Raises:
        OSError: there is no such record.
        PoolError: other users could have read or written it.
    """
    path = _path(job_id)
    with open(path, "rb") as file:
        # of the open file, not of the path, which could lead to another file a moment later; the
        # key in it is unpickled, so whoever can write it could run code here
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PoolError(
                f"{path} is open to other users and is not used: chmod 600 it if nobody has "
                "changed it",
                code="key-exposed",
                names=[job_id],
            )
        return _read(file.read().decode())


def _read(text: str) -> PoolRecord:
    """Parse a record, and ignore fields that another version has added."""
    values = json.loads(text)
    # missing fields have defaults, so records of older versions are read too
    arguments = {
        name: values[name] for name in (item.name for item in fields(PoolRecord)) if name in values
    }
    key = arguments.pop("key", None)
    return PoolRecord(
        **{**arguments, "hosts": tuple(map(str, values["hosts"]))},
        key=SavedKey(**{item.name: key[item.name] for item in fields(SavedKey)}) if key else None,
    )


def _path(job_id: str) -> Path:
    return folder() / f"{job_id}.json"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # no permission: a process of another user, for example in a container with a shared home
    except OSError:
        return True
    return True


@dataclass(frozen=True)
class KeptLog:
    """Last lines of a log.

    Attributes:
        ended: time at which its pool ended, in seconds since 1970.
    """

    name: str
    job_id: str
    ended: float
    text: str


def keep_log(name: str, job_id: str, text: str) -> None:
    """Write the end of a log, and remove the oldest logs over the limit.

    If the home folder is not writable, nothing is written. Safe to call twice.
    """
    if not text:
        return
    # in the file itself: a copy or a backup of the folder changes the times of files
    heading = json.dumps({"name": name, "ended": time.time()})
    atomic.keep(
        atomic.state_folder("logs") / f"{job_id}.log", f"{heading}\n{text}".encode(errors="replace")
    )
    with contextlib.suppress(OSError):
        for path in _newest_first()[KEPT_LOGS:]:
            path.unlink(missing_ok=True)


def kept_log(name: str) -> KeptLog | None:
    """Return the last lines of the most recently ended pool of this name or job ID, or None.

    Damaged files are skipped.
    """
    with contextlib.suppress(OSError):
        for path in _newest_first():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                heading, _, text = path.read_bytes().decode(errors="replace").partition("\n")
                fields_read = json.loads(heading)
                if name in (fields_read["name"], path.stem):
                    return KeptLog(
                        fields_read["name"], path.stem, float(fields_read["ended"]), text
                    )
    return None


def _newest_first() -> list[Path]:
    paths = []
    for path in atomic.state_folder("logs").glob("*.log"):
        with contextlib.suppress(OSError):  # another notebook has dropped it
            paths.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(paths, reverse=True)]
