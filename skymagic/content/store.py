"""The node store: a private directory of files that one process writes once and every rank maps.

A file's name is its content hash (xxh3-128) after a nonce known only to this store, so that names
cannot be guessed and equal contents need one file. Files are kept in shared memory as long as there
is space; the others go to a directory on disk.
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

from skymagic.content.base import Content, Store
from skymagic.content.chunks import new_hash
from skymagic.content.device import host_pieces
from skymagic.wire.store import XXH3

LARGE = 1 << 20
"""Parts of a value with at least this many bytes are stored in separate files."""

SHARE = 0.5
"""Fraction of a file system's free space that a store may fill."""

OVERFLOW = ".overflow"
"""Name of the link in a store to its directory on disk."""

_TOLD = 1 << 25
_SHARED_MEMORY = Path("/dev/shm")


@dataclass
class _File:
    """Record of a stored file."""

    name: str
    nbytes: int
    used: float = field(default_factory=time.monotonic)
    """Monotonic time of the last use in seconds."""


def create(parent: str | os.PathLike[str] | None = None) -> str:
    """Create a private directory for a store.

    It is in shared memory if that is writable, otherwise in the temp directory.
    """
    root = Path(parent) if parent is not None else _SHARED_MEMORY
    if not os.access(root, os.W_OK | os.X_OK):
        root = Path(tempfile.gettempdir())
    return tempfile.mkdtemp(prefix="skymagic-", dir=root)


def overflow(directory: str | os.PathLike[str]) -> Path:
    """Return the directory on disk with the files that did not fit into the store at `directory`.

    The returned path does not exist if all files did fit. The directory is found by a link in the
    store, because the temp directory may have changed since, and its name cannot be guessed.
    """
    try:
        return (Path(directory) / OVERFLOW).readlink()
    except OSError:
        return Path(directory) / OVERFLOW / "none"


def make_overflow(directory: str | os.PathLike[str]) -> Path:
    """Return the directory of `overflow`, creating it if necessary.

    Every process that uses the store gets the same one.
    """
    link = Path(directory) / OVERFLOW
    while not (target := overflow(directory)).is_dir():
        created = Path(tempfile.mkdtemp(prefix=f"{Path(directory).name}-overflow-"))
        try:
            link.symlink_to(created)
        except FileExistsError:  # another process was faster, or the link's target is gone
            created.rmdir()
            if not overflow(directory).is_dir():
                link.unlink(missing_ok=True)
    # The temp directory is shared: what the link leads to must belong to this user.
    private(target)
    return target


def remove(directory: str | os.PathLike[str]) -> None:
    """Delete a store's directory and its overflow, including files of other processes.

    Safe to call twice.
    """
    # The overflow first, because the link to it is in the store's directory.
    shutil.rmtree(overflow(directory), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


class NodeStore(Store):
    """Content-addressed files in one directory.

    Every process may open a store on the directory.

    Args:
        directory: created with mode 0700 if it does not exist.
        share: fraction of the free space that may be filled, 0 to 1.
        notify: called with one sentence when files are evicted, or written to disk instead.

    Raises:
        PermissionError: the directory belongs to another user or is accessible to others.
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
        # Others may fill the directory meanwhile, so the file may still move to disk.
        with Partial(self._directory_for(nbytes), lambda: self._spill(nbytes)) as partial:
            for view in host_pieces(pieces):
                for start in range(0, view.nbytes, STEP):
                    partial.write(view[start : start + STEP])
                    # At most STEP bytes are added at a time, so this holds once in `_TOLD` bytes.
                    if progress is not None and partial.nbytes % _TOLD < STEP:
                        progress(partial.nbytes)
            # Not the given key: another thread may have changed the value meanwhile.
            key = partial.key()
            name = f"{self._nonce}-{key}"
            partial.finish(name)
        with self._lock:
            self._files[key] = _File(name, partial.nbytes)
        return key

    def read(self, name: str) -> Iterator[bytes]:
        """Iterate over a file's bytes in pieces of `LARGE` bytes, to send them elsewhere."""
        with self.path(name).open("rb", buffering=0) as file:
            while piece := file.read(LARGE):
                yield piece

    def path(self, name: str) -> Path:
        """Return the path of the file with this name."""
        if os.sep in name or name.startswith("."):
            raise ValueError(f"not a name of this store: {name!r}")
        path = self.directory / name
        return path if path.exists() else overflow(self.directory) / name

    def map(self, name: str) -> memoryview:
        """Map a file privately: writable, invisible to other processes, and shared until written.

        The mapping lives as long as the view or a slice of it; no descriptor stays open.
        """
        return map_private(self.path(name))

    def give(self, pieces: Iterable[Content], nbytes: int) -> str:
        """Write a file for another process, which unlinks it with `take`, and return its name."""
        # Held throughout, so that no other thread evicts the file before it has its new name.
        with self._lock:
            key = self.put(None, pieces, nbytes)
            file = self._files.pop(key)
            path = self.path(file.name)
            # The file leaves the index: another process will unlink it, so its name must be unique.
            name = f"{self._nonce}-{os.urandom(16).hex()}"
            path.rename(path.with_name(name))
            return name

    def take(self, name: str, node: int = 0) -> memoryview:
        path = self.path(name)
        view = map_private(path)
        # The mapping outlives the file's name.
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
        """Switch to another, empty directory: that of a new agent that replaces one that ended."""
        private(Path(directory))
        with self._lock:
            self._files.clear()
            self.directory = Path(directory)

    def close(self) -> None:
        self.drop(list(self._files))

    def _directory_for(self, nbytes: int) -> Path:
        """Return the directory for a file of this size, evicting others if necessary."""
        if self._ensure_room(self.directory, nbytes):
            return self.directory
        return self._spill(nbytes)

    def _spill(self, nbytes: int) -> Path:
        """Return the directory on disk, creating it when it is first needed."""
        directory = make_overflow(self.directory)
        self._notify(
            f"{nbytes / 1e6:,.0f} MB do not fit in {self.directory.parent}: "
            f"kept on disk, in {directory.parent}"
        )
        return directory

    def _ensure_room(self, directory: Path, nbytes: int) -> bool:
        """Return True if a file fits, after evicting the least recently used files."""
        with self._lock:
            files = {
                key: file for key, file in self._files.items() if (directory / file.name).exists()
            }
            used_bytes = sum(file.nbytes for file in files.values())
            # The store's own files count as free space, so that the share does not shrink as it
            # fills.
            room = (available(directory) + used_bytes) * self.share - used_bytes
            evicted = self._files_to_evict(files, room, nbytes)
            if evicted is None:
                return False
            if evicted:
                self.drop(evicted)
                self._notify(
                    f"the node store is full: {len(evicted)} of its oldest values "
                    "will be sent again when used"
                )
            return True


def private(directory: Path) -> None:
    """Create the directory for this user alone, or check that it is private.

    Raises:
        PermissionError: it belongs to another user or is accessible to others.
    """
    directory.mkdir(mode=0o700, parents=False, exist_ok=True)
    # Not `stat`: the owner of a link could change where it leads.
    status = directory.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise PermissionError(f"{directory} is not private to this user; remove it and try again")


def available(directory: Path) -> int:
    """Return the bytes that a user may still write to the directory's file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


# -- files while they are written ------------------------------------------------------------------


STEP = 1 << 18
"""Bytes to copy, hash and write at a time.

This fits into the processor's cache, where hashing costs nothing extra.
"""


class Partial:
    """File with a temporary name until it is complete; hashed while it is written.

    Args:
        directory: directory of the file.
        spill: creates another directory when this one is full.
        prefix: prefix of the temporary name, used to find leftovers.
        kind: the hash.
    """

    def __init__(
        self, directory: Path, spill: Callable[[], Path], prefix: str = "", kind: str = XXH3
    ) -> None:
        self._prefix = prefix
        self.nbytes = 0
        self._spill: Callable[[], Path] | None = spill
        self._hash = new_hash(kind)
        self._scratch = memoryview(bytearray(STEP))
        self._open(directory)

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)
        # After `finish` no file has this name.
        self._path.unlink(missing_ok=True)

    def write(self, view: memoryview) -> None:
        """Append at most `STEP` bytes."""
        # Copy first, so that hash and file agree even if other threads write to the value.
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
        """Return the hash of the bytes written so far."""
        return str(self._hash.hexdigest())

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return written bytes from an offset on."""
        return os.pread(self._descriptor, nbytes, offset)

    def finish(self, name: str) -> None:
        """Rename the file to its final name."""
        # Atomic: other processes see the whole file or none.
        self._path.rename(self._path.with_name(name))

    def _open(self, directory: Path) -> None:
        self._path = directory / f"{self._prefix}{os.urandom(16).hex()}.part"
        # Readable too, because the file may be read before it is complete.
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def _move(self, directory: Path) -> None:
        """Continue in another directory, with the bytes written so far."""
        # Only once: if the second directory is full too, the write fails.
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
    """Return a file's bytes as a writable private mapping, without keeping a descriptor open."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        nbytes = os.fstat(descriptor).st_size
        # `mmap` fails for a length of 0.
        return _map(descriptor, nbytes) if nbytes else memoryview(bytearray())
    finally:
        os.close(descriptor)


_PROT_READ_WRITE = 3
_MAP_PRIVATE = 2


@cache
def _libc() -> ctypes.CDLL:
    # Before Python 3.13 an mmap object keeps a duplicate of the descriptor: a rank with a thousand
    # arrays would run out of descriptors.
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
    # Each slice of the view keeps this array alive, and with it the mapping.
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit, when the operating system unmaps everything anyway.
    weakref.finalize(memory, _unmap, address, nbytes).atexit = False
    return memoryview(memory).cast("B")


def _unmap(address: int, nbytes: int) -> None:
    """Unmap memory, in the background if it is large, because that takes a while."""
    if nbytes >= _MUCH:
        try:
            # Not threading.Thread: the code that this finalizer interrupts may hold its locks.
            _thread.start_new_thread(_libc().munmap, (address, nbytes))
            return
        except RuntimeError:  # the interpreter is shutting down
            pass
    _libc().munmap(address, nbytes)
