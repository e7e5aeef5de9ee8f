"""Files that a node has already, put into its store without a copy, for other nodes to follow."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from itertools import compress
from operator import not_
from pathlib import Path

from skymagic.content.chunks import new_hash
from skymagic.content.store import STEP, Partial
from skymagic.kernels.store.incoming import PREFIX, StoreFolder
from skymagic.wire.codec import CHUNK
from skymagic.wire.store import Adopt, Adopted


def adopt(store: StoreFolder, order: Adopt) -> Iterator[Adopted]:
    """Yield the files of an order as they are in the store, and one archive of all small ones.

    Raises:
        OSError: a file cannot be read, or the store is full.
    """
    base = Path(order.folder)
    files = [
        path
        for folder in order.below
        for path in sorted((base / folder).rglob("*"))
        if path.is_file() and not path.is_symlink()
    ]
    is_small = [path.stat().st_size < CHUNK for path in files]
    for path in compress(files, map(not_, is_small)):
        yield _link(store, order, path, base)
    if small := list(compress(files, is_small)):
        yield _pack(store, order, small, base)


def _link(store: StoreFolder, order: Adopt, path: Path, base: Path) -> Adopted:
    state = new_hash(store.hash)
    with path.open("rb", buffering=0) as file:
        while data := file.read(CHUNK):
            state.update(data)
        nbytes, mode = file.tell(), os.fstat(file.fileno()).st_mode & 0o777
    name = f"{order.nonce}-{state.hexdigest()}"
    try:
        os.link(path, store.directory / name)
    except FileExistsError:  # another file has the same content
        pass
    except OSError:  # another file system
        shutil.copyfile(path, store.directory / name)
    return Adopted(name, nbytes, str(path.relative_to(base)), mode)


def _pack(store: StoreFolder, order: Adopt, files: list[Path], base: Path) -> Adopted:
    with Partial(store.directory, store.overflow_folder, PREFIX, store.hash) as partial:
        with tarfile.open(fileobj=_Sink(partial), mode="w|", bufsize=STEP) as archive:
            for path in files:
                archive.add(path, str(path.relative_to(base)), recursive=False)
        name = f"{order.nonce}-{partial.key()}"
        partial.finish(name)
        return Adopted(name, partial.nbytes)


class _Sink(io.RawIOBase):
    """Stream into a file of the store."""

    def __init__(self, partial: Partial) -> None:
        self._partial = partial

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        view = memoryview(data)
        for start in range(0, len(view), STEP):
            self._partial.write(view[start : start + STEP])
        return len(view)
