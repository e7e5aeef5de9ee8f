"""A process on the other side: holds values as a rank does, runs code, and packs what it has."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from skymagic.content.base import Store
from skymagic.content.store import NodeStore, create, remove
from skymagic.data.capture.assignments import Assignments
from skymagic.data.shipping.shipper import Manifest, Shipper
from skymagic.wire.outcome import NameChanges
from skymagic.wire.typed import plain, read
from skymagic.wire.values import BindOrder, PackedValue


class Far:
    """One rank, spoken to in JSON lines.

    Args:
        directory: the node store.
        rank: its number.
        folder: where it runs; modules are importable from there only when they have been sent.
        node: the number of its node.
    """

    def __init__(self, directory: str, rank: int, folder: Path | str = "/", node: int = 0) -> None:
        self.rank = rank
        orders_read, orders = os.pipe()
        answers, answers_written = os.pipe()
        self.pid = _forked(
            [directory, rank, node, str(folder), dict(os.environ)], orders_read, answers_written
        )
        """Its process."""
        self._process = os.pidfd_open(self.pid)
        os.close(orders_read)
        os.close(answers_written)
        self._orders, self._answers = os.fdopen(orders, "wb"), os.fdopen(answers, "rb")

    def ask(self, verb: str, argument: Any) -> Any:
        """Send one request and wait for the answer; an error there is an error here."""
        self._orders.write(json.dumps([verb, argument]).encode() + b"\n")
        self._orders.flush()
        answer = json.loads(self._answers.readline())
        if "error" in answer:
            raise FarError(answer["error"], answer["attributes"])
        return answer["value"]

    def bind(self, orders: BindOrder) -> None:
        """Bind what the orders hold."""
        self.ask("bind", plain(orders))

    def run(self, source: str) -> None:
        """Run a cell."""
        self.ask("run", source)

    def eval(self, expression: str) -> Any:
        """Value of an expression that JSON can hold."""
        return self.ask("eval", expression)

    def pack(self, *names: str) -> dict[str, PackedValue]:
        """References to values of names."""
        return {name: read(PackedValue, ref) for name, ref in self.ask("pack", names).items()}

    def close(self) -> None:
        """End the process."""
        self._orders.close()
        assert select.select([self._process], [], [], 60.0)[0], f"rank {self.rank} does not end"
        os.close(self._process)
        self._answers.close()

    def kill(self) -> None:
        """End it at once."""
        signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self.close()


_origin: tuple[socket.socket, subprocess.Popen[bytes]] | None = None
"""The process that ranks are forked from, and the line to it: it has imported what each of them needs, as the forkserver of a pool."""


def _forked(order: list[Any], orders: int, answers: int) -> int:
    """A rank's process id; it reads and writes these descriptors."""
    global _origin
    for _ in range(2):  # the one that was there may have gone, for nobody has asked for long
        if _origin is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            env = {
                **os.environ,
                "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
                "PYTHONSAFEPATH": "1",
            }
            with theirs:
                _origin = (
                    ours,
                    subprocess.Popen(
                        [sys.executable, __file__], stdin=theirs.fileno(), cwd="/", env=env
                    ),
                )
        link, process = _origin
        with contextlib.suppress(OSError):
            socket.send_fds(link, [json.dumps(order).encode()], [orders, answers])
            if answer := link.recv(20):
                return int(answer)
        link.close()
        process.wait()
        _origin = None
    raise AssertionError("no rank could be forked")


class FarError(Exception):
    """What was raised there."""

    def __init__(self, text: str, attributes: dict[str, Any]) -> None:
        super().__init__(text)
        self.attributes = attributes


class Notebook:
    """A notebook with ranks: cells run here or there."""

    def __init__(self, folder: Path, count: int = 1) -> None:
        self.directory = create()
        self.folder = folder
        self.begin(NodeStore(self.directory), [Far(self.directory, rank) for rank in range(count)])

    def begin(self, store: Store, ranks: list[Far], **options: Any) -> None:
        """Ship through this store to these ranks."""
        self.module = types.ModuleType("__main__")
        self.namespace = vars(self.module)
        self.assigned = Assignments(self.namespace)
        self.assigned.watched = True
        self.shipper = Shipper(
            store, self.namespace, str(self.folder), assigned=self.assigned, **options
        )
        self.ranks = ranks

    def here(self, source: str) -> None:
        """Run a plain cell."""
        self.assigned.begin()
        exec(compile(source, "<here>", "exec", dont_inherit=True), self.namespace)
        self.assigned.end(lambda: source, completed=True)

    def there(self, source: str, **options: Any) -> Manifest:
        """Broadcast a cell."""
        manifest = self.shipper.prepare(source, [far.rank for far in self.ranks], **options)
        problem: FarError | None = None
        for far in self.ranks:
            far.bind(manifest.orders)
            failed: FarError | None = None
            try:
                far.run(source)
            except FarError as raised:  # the other ranks run it too
                failed = raised
            changes = read(NameChanges, far.ask("changes", None))
            assert changes.reads is not None
            self.shipper.bound(
                manifest, far.rank, changes.rebound, changes.deleted, completed=failed is None
            )
            self.shipper.record_losses(far.rank, changes.unlinked, changes.lost)
            self.shipper.reads(far.rank, changes.reads.digest, changes.reads.names)
            problem = problem or failed
        if problem is not None:
            raise problem
        return manifest

    def values(self, expression: str) -> list[Any]:
        """An expression's values by rank; nothing is shipped."""
        return [far.eval(expression) for far in self.ranks]

    def fetch(self, name: str, rank: int = 0) -> Any:
        """A rank's value of a name."""
        ref = self.ranks[rank].pack(name)[name]
        assert not ref.error, ref
        return self.shipper.unpack(ref)

    def pull(self, name: str) -> None:
        """Bring a name here, as the first rank has it."""
        self.namespace[name] = self.fetch(name)
        types = {name: type(self.namespace[name]).__name__}
        self.shipper.gathered(types, [far.rank for far in self.ranks])

    def files(self) -> list[str]:
        """What lies in the store."""
        return sorted(path.name for path in Path(self.directory).iterdir())

    def close(self) -> None:
        """End the ranks and remove the store."""
        for far in self.ranks:
            far.close()
        self.shipper.store.close()
        remove(self.directory)


def moved(manifest: Manifest) -> list[str]:
    """Names that a manifest brings."""
    return sorted(item.name for item in manifest.items if item.moved)


def ranks(
    count: int = 2, scope: Literal["module", "function"] = "function", cell: str = "pass"
) -> Any:
    """A fixture for a test file: a notebook that has run a cell, with so many ranks."""
    import pytest  # the origin needs none

    @pytest.fixture(scope=scope)
    def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
        with contextlib.closing(Notebook(tmp_path_factory.mktemp("ranks"), count)) as made:
            made.here(cell)
            yield made

    return notebook


IDLE = 2.0
"""Seconds after which the process that ranks are forked from ends when nobody asks: no run of the tests leaves it."""


def fork_ranks() -> None:
    """Fork a rank for each order that comes with its descriptors; returns in each rank that has ended, and at last in the origin."""
    import skymagic.kernels.rank.namespace  # noqa: F401

    link = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    link.settimeout(IDLE)
    with contextlib.suppress(TimeoutError):
        while True:
            order, descriptors, _, _ = socket.recv_fds(link, 1 << 20, 2)
            if not order:
                return
            pid = os.fork()
            if not pid:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                begin(json.loads(order), descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            link.send(str(pid).encode())


def begin(order: list[Any], descriptors: list[int]) -> None:
    """Be this rank."""
    directory, rank, node, folder, environment = order
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)  # the first is the origin's line, too
        os.close(descriptor)
    os.environ.update(environment)
    os.chdir(folder)
    serve(directory, rank, node)


def serve(directory: str, rank: int, node: int) -> None:
    """Answer requests until the input ends."""
    from skymagic.kernels.rank.namespace import RankNamespace

    main = types.ModuleType("__main__")
    namespace = RankNamespace(vars(main), directory, rank, node)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        verb, argument = json.loads(line)
        try:
            value: Any = None
            if verb == "bind":
                namespace.bind(read(BindOrder, argument))
            elif verb == "run":
                code = compile(argument, "<there>", "exec", dont_inherit=True)
                namespace.reads.add_compiled(code)
                exec(code, namespace.variables)
            elif verb == "changes":
                value = namespace.changes()
            elif verb == "eval":
                value = eval(argument, namespace.variables)
            elif verb == "pack":
                value = namespace.pack({name: namespace.variables[name] for name in argument})
            answer = {"value": plain(value)}
        except Exception as problem:
            attributes = {key: text for key, text in vars(problem).items() if isinstance(text, str)}
            answer = {"error": f"{type(problem).__name__}: {problem}", "attributes": attributes}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    fork_ranks()
