"""A process on the other side: holds values as a rank does, runs code, and packs what it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

from skymagic.data.capture.assignments import Assignments
from skymagic.data.shipping.shipper import Manifest, Shipper
from skymagic.data.store.base import Store
from skymagic.data.store.store import NodeStore, create, remove


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
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, __file__, directory, str(rank), str(node)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"},
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask(self, verb: str, argument: Any) -> Any:
        """Send one request and wait for the answer; an error there is an error here."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, argument]).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise FarError(answer["error"], answer["attributes"])
        return answer["value"]

    def bind(self, orders: dict[str, Any]) -> None:
        """Bind what the orders hold."""
        self.ask("bind", orders)

    def run(self, source: str) -> None:
        """Run a cell."""
        self.ask("run", source)

    def eval(self, expression: str) -> Any:
        """Value of an expression that JSON can hold."""
        return self.ask("eval", expression)

    def pack(self, *names: str) -> dict[str, Any]:
        """References to values of names."""
        return dict(self.ask("pack", names))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self.close()


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
        self.shipper = Shipper(store, self.namespace, str(self.folder), assigned=self.assigned, **options)
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
            changes = far.ask("changes", None)
            names = {key: changes[key] for key in ("rebound", "deleted")}
            self.shipper.bound(manifest, far.rank, **names, completed=failed is None)
            self.shipper.gone(far.rank, changes["unlinked"], changes["lost"])
            self.shipper.reads(far.rank, **changes["reads"])
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
        assert "error" not in ref, ref
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


def serve(directory: str, rank: int, node: int) -> None:
    """Answer requests until the input ends."""
    from skymagic.kernels.rank.namespace import Namespace

    main = types.ModuleType("__main__")
    namespace = Namespace(vars(main), directory, rank, node)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        verb, argument = json.loads(line)
        try:
            value: Any = None
            if verb == "bind":
                namespace.bind(argument)
            elif verb == "run":
                code = compile(argument, "<there>", "exec", dont_inherit=True)
                namespace.reads.compiled(code)
                exec(code, namespace.variables)
            elif verb == "changes":
                value = namespace.changes()
            elif verb == "eval":
                value = eval(argument, namespace.variables)
            elif verb == "pack":
                value = namespace.pack({name: namespace.variables[name] for name in argument})
            answer = {"value": value}
        except Exception as problem:
            plain = {key: each for key, each in vars(problem).items() if isinstance(each, str)}
            answer = {"error": f"{type(problem).__name__}: {problem}", "attributes": plain}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
