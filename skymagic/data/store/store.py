"""The node store: a private directory of files that one process writes once and every rank of the node maps.

A file is named by its content (xxh3-128) behind a nonce that only this store knows, so that names cannot be guessed
and equal contents need one file. Shared memory holds the files as long as it has room; what does not fit goes to a
directory on disk beside it.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from skymagic.data.store.base import Content, Store
from skymagic.data.store.device import host_pieces

LARGE = 1 << 20
"""Bytes from which a part of a value is worth a file of its own."""

SHARE = 0.5
"""The part of a file system's free space that a store may fill."""

OVERFLOW = ".overflow"
"""A link in a store to the directory on disk."""

_TOLD = 1 << 25
_SHARED_MEMORY = Path("/dev/shm")


@dataclass
class _File:
    """One stored file."""

    name: str
    nbytes: int
    used: float = field(default_factory=time.monotonic)
    """When it was last asked for, in seconds of the monotonic clock."""


def digest(pieces: Iterable[Content]) -> str:
    """The xxh3-128 of all pieces as one stream, in hex."""
    import xxhash

    state = xxhash.xxh3_128()
    for piece in host_pieces(pieces):
        state.update(piece)
    return str(state.hexdigest())


def create(parent: str | os.PathLike[str] | None = None) -> str:
    """A new private directory for a store: in shared memory where that is writable, else in the temp directory."""
    root = Path(parent) if parent is not None else _SHARED_MEMORY
    if not os.access(root, os.W_OK | os.X_OK):
        root = Path(tempfile.gettempdir())
    return tempfile.mkdtemp(prefix="skymagic-", dir=root)


def overflow(directory: str | os.PathLike[str]) -> Path:
    """Where a store at ``directory`` has put what did not fit there; a path that does not exist where all did.

    A link in the store names it, for the temp directory may be another one by now, and its name cannot be guessed.
    """
    try:
        return (Path(directory) / OVERFLOW).readlink()
    except OSError:
        return Path(directory) / OVERFLOW / "none"


def make_overflow(directory: str | os.PathLike[str]) -> Path:
    """The folder of `overflow`, made where there is none; every process that uses the store gets the same one."""
    link = Path(directory) / OVERFLOW
    while not (found := overflow(directory)).is_dir():
        made = Path(tempfile.mkdtemp(prefix=f"{Path(directory).name}-overflow-"))
        try:
            link.symlink_to(made)
        except FileExistsError:  # another process was faster, or what it led to is gone
            made.rmdir()
            if not overflow(directory).is_dir():
                link.unlink(missing_ok=True)
    private(found)
    return found


def remove(directory: str | os.PathLike[str]) -> None:
    """Delete a store's directory and its overflow, whoever wrote them; twice is safe."""
    shutil.rmtree(overflow(directory), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


class NodeStore(Store):
    """The files of one directory, content-addressed.

    Every process may open a store on the directory.

    Args:
        directory: made with mode 0700 when it does not exist.
        share: the part of the free space that may be filled, 0 to 1.
        notify: called with one sentence when files are evicted or written to disk instead.

    Raises:
        PermissionError: the directory belongs to another user or is open to others.
    """

    remote = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        share: float = SHARE,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(notify)
        self.directory = Path(directory)
        self.share = share
        self._nonce = os.urandom(8).hex()
        self._files: dict[str, _File] = {}
        private(self.directory)

    def put(
        self,
        key: str | None,
        pieces: Iterable[Content],
        nbytes: int,
        progress: Callable[[int], None] | None = None,
    ) -> str:
        if key is not None and not self.missing([key]):
            return key
        with Partial(self._place(nbytes), lambda: self._spill(nbytes)) as partial:
            for view in host_pieces(pieces):
                for start in range(0, view.nbytes, STEP):
                    partial.write(view[start : start + STEP])
                    if progress is not None and partial.nbytes % _TOLD < STEP:
                        progress(partial.nbytes)
            key = partial.key()
            name = f"{self._nonce}-{key}"
            partial.finish(name)
        with self._lock:
            self._files[key] = _File(name, partial.nbytes)
        return key

    def read(self, name: str) -> Iterator[bytes]:
        """A file's bytes, for sending elsewhere: in pieces of `LARGE` bytes."""
        with self.path(name).open("rb", buffering=0) as file:
            while piece := file.read(LARGE):
                yield piece

    def path(self, name: str) -> Path:
        """Where the file of that name lies."""
        if os.sep in name or name.startswith("."):
            raise ValueError(f"not a name of this store: {name!r}")
        path = self.directory / name
        return path if path.exists() else overflow(self.directory) / name

    def map(self, name: str) -> memoryview:
        """The file's bytes, mapped privately: writable, seen by nobody else, shared until written.

        The mapping lives as long as something holds the view or a slice of it; no descriptor stays open.
        """
        return map_private(self.path(name))

    def give(self, pieces: Iterable[Content], nbytes: int) -> str:
        """Write a file for another process, which unlinks it with ``take``; returns its name."""
        with self._lock:
            key = self.put(None, pieces, nbytes)
            file = self._files.pop(key)
            path = self.path(file.name)
            name = f"{self._nonce}-{os.urandom(16).hex()}"
            path.rename(path.with_name(name))
            return name

    def take(self, name: str, node: int = 0) -> memoryview:
        path = self.path(name)
        view = map_private(path)
        path.unlink()
        return view

    def discard(self, name: str, node: int = 0) -> None:
        self.path(name).unlink(missing_ok=True)

    def drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                file = self._files.pop(key, None)
                if file is not None:
                    self.path(file.name).unlink(missing_ok=True)

    def move(self, directory: str | os.PathLike[str]) -> None:
        """Another directory from now on, with no files yet: that of an agent in the place of one that ended."""
        private(Path(directory))
        with self._lock:
            self._files.clear()
            self.directory = Path(directory)

    def close(self) -> None:
        self.drop(list(self._files))

    def _place(self, nbytes: int) -> Path:
        """Where a file of this size goes; evicts what is too much."""
        if self._room(self.directory, nbytes):
            return self.directory
        return self._spill(nbytes)

    def _spill(self, nbytes: int) -> Path:
        """The directory on disk, made when it is needed first."""
        directory = make_overflow(self.directory)
        self._notify(
            f"{nbytes / 1e6:,.0f} MB do not fit in {self.directory.parent}: kept on disk, in {directory.parent}"
        )
        return directory

    def _room(self, directory: Path, nbytes: int) -> bool:
        """Whether a file fits, after evicting the files that were not asked for the longest."""
        with self._lock:
            here = {
                key: file for key, file in self._files.items() if (directory / file.name).exists()
            }
            ours = sum(file.nbytes for file in here.values())
            room = (available(directory) + ours) * self.share - ours
            evicted = self._victims(here, room, nbytes)
            if evicted is None:
                return False
            if evicted:
                self.drop(evicted)
                self._notify(
                    f"the node store is full: {len(evicted)} of its oldest values will be sent again when used"
                )
            return True


def private(directory: Path) -> None:
    """Make the directory for this user alone, or make sure that it is."""
    directory.mkdir(mode=0o700, parents=False, exist_ok=True)
    status = directory.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise PermissionError(f"{directory} is not private to this user; remove it and try again")


def available(directory: Path) -> int:
    """Bytes that a user may still write to the file system of a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


# -- a file that is being written ------------------------------------------------------------------


STEP = 1 << 18
"""Bytes copied, hashed and written at a time: small enough to stay in the processor's cache, where hashing is free."""


class Partial:
    """A file that has no name to be found by until it is complete; hashed as it is written.

    Args:
        directory: where it goes.
        spill: makes another directory when this one is full.
        prefix: of its name until then, for those who look for what was left.
    """

    def __init__(self, directory: Path, spill: Callable[[], Path], prefix: str = "") -> None:
        import xxhash

        self._prefix = prefix
        self.nbytes = 0
        self._spill: Callable[[], Path] | None = spill
        self._hash = xxhash.xxh3_128()
        self._scratch = memoryview(bytearray(STEP))
        self._open(directory)

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    def write(self, view: memoryview) -> None:
        """Append at most STEP bytes."""
        # The copy is what makes hash and file agree while other threads write to the value.
        copy = self._scratch[: view.nbytes]
        copy[:] = view
        self._hash.update(copy)
        self.nbytes += copy.nbytes
        while copy:
            try:
                copy = copy[os.write(self._descriptor, copy) :]
            except OSError as problem:
                if problem.errno not in (errno.ENOSPC, errno.EDQUOT) or self._spill is None:
                    raise
                self._move(self._spill())

    def key(self) -> str:
        """The hash of what was written so far."""
        return str(self._hash.hexdigest())

    def read(self, offset: int, nbytes: int) -> bytes:
        """What was written, from an offset on."""
        return os.pread(self._descriptor, nbytes, offset)

    def finish(self, name: str) -> None:
        """Give the file its name."""
        self._path.rename(self._path.with_name(name))

    def _open(self, directory: Path) -> None:
        self._path = directory / f"{self._prefix}{os.urandom(16).hex()}.part"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def _move(self, directory: Path) -> None:
        """Go on in another directory, with what there is."""
        descriptor, path = self._descriptor, self._path
        self._spill = None
        try:
            self._open(directory)
            size, done = os.fstat(descriptor).st_size, 0
            while done < size:
                done += os.sendfile(self._descriptor, descriptor, done, size - done)
        finally:
            os.close(descriptor)
            path.unlink()


# -- private mappings ------------------------------------------------------------------------------


_MUCH = 1 << 26


def map_private(path: Path) -> memoryview:
    """A file's bytes as a writable private mapping, without a descriptor that stays open."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        nbytes = os.fstat(descriptor).st_size
        return _map(descriptor, nbytes) if nbytes else memoryview(bytearray())
    finally:
        os.close(descriptor)


_PROT_READ_WRITE = 3
_MAP_PRIVATE = 2


@cache
def _libc() -> ctypes.CDLL:
    # Before Python 3.13 a mmap object keeps a duplicate of the descriptor: a rank with a thousand arrays would run out.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map(descriptor: int, nbytes: int) -> memoryview:
    address = _libc().mmap(None, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _unmap, address, nbytes).atexit = False
    return memoryview(memory).cast("B")


def _unmap(address: int, nbytes: int) -> None:
    """Give memory back; much of it takes a while, for which nobody needs to wait."""
    if nbytes >= _MUCH:
        try:
            # Not threading.Thread: its locks may be held by whoever is interrupted by this finalizer.
            _thread.start_new_thread(_libc().munmap, (address, nbytes))
            return
        except RuntimeError:  # the interpreter is ending
            pass
    _libc().munmap(address, nbytes)
