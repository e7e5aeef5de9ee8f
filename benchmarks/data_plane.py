"""What shipping a value costs: against the floor of writing its bytes once, and against ipyparallel.

Run as ``python benchmarks/data_plane.py [--mb 400] [--no-ipyparallel]``. Four ranks are four forked processes; times are
the best of several, in seconds, and every promise is a ratio of figures from this one run.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from skymagic.wire.typed import plain, read
from skymagic.wire.values import BindOrder, PackedValue

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from skymagic.content.chunks import digest
from skymagic.content.store import NodeStore, create, remove
from skymagic.data.shipping.shipper import Manifest, Shipper
from skymagic.kernels.rank.namespace import RankNamespace

RANKS = 4
missed: list[str] = []


class Ranks:
    """Forked processes that bind orders, run code, and pack names."""

    def __init__(self, directory: str) -> None:
        self.pipes: list[Connection] = []
        self.pids: list[int] = []
        for rank in range(RANKS):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                ours.close()
                serve(theirs, directory, rank)
                os._exit(0)
            theirs.close()
            self.pipes.append(ours)
            self.pids.append(pid)

    def ask(self, verb: str, argument: Any) -> list[Any]:
        """The same request to all; answers by rank."""
        message = json.dumps([verb, argument]).encode()
        for pipe in self.pipes:
            pipe.send_bytes(message)
        return [json.loads(pipe.recv_bytes()) for pipe in self.pipes]

    def close(self) -> None:
        """End all."""
        for pipe in self.pipes:
            pipe.close()
        for pid in self.pids:
            os.waitpid(pid, 0)


def serve(pipe: Connection, directory: str, rank: int) -> None:
    """A rank's loop."""
    namespace = RankNamespace({"__name__": "__main__", "np": np}, directory, rank)
    while True:
        try:
            verb, argument = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        answer: Any = None
        if verb == "bind":
            namespace.bind(read(BindOrder, argument))
        elif verb == "run":
            exec(argument, namespace.variables)
        elif verb == "eval":
            answer = eval(argument, namespace.variables)
        elif verb == "pack":
            answer = namespace.pack({name: namespace.variables[name] for name in argument})
        elif verb == "map":
            descriptor = os.open(argument, os.O_RDONLY)
            view = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            os.close(descriptor)
            namespace.variables["a"] = np.frombuffer(view, "f4")
        pipe.send_bytes(json.dumps(plain(answer)).encode())


class Bench:
    """A notebook's namespace, its shipper, and its ranks."""

    def __init__(self) -> None:
        self.directory = create()
        self.space: dict[str, Any] = {"__name__": "__main__"}
        self.shipper = Shipper(NodeStore(self.directory), self.space, str(Path.cwd()))
        self.ranks = Ranks(self.directory)

    def cell(self, source: str, push: Sequence[str] = (), deleted: Sequence[str] = ()) -> Manifest:
        """Broadcast a cell, which deletes these names."""
        manifest = self.shipper.prepare(source, range(RANKS), push=push)
        self.ranks.ask("bind", plain(manifest.orders))
        for rank in range(RANKS):
            self.shipper.bound(manifest, rank, deleted=deleted, completed=True)
        self.ranks.ask("run", source)
        return manifest

    def gather(self, name: str) -> list[Any]:
        """Values of a name by rank."""
        answers = self.ranks.ask("pack", [name])
        return [self.shipper.unpack(read(PackedValue, refs[name])) for refs in answers]

    def close(self) -> None:
        """Leave nothing."""
        self.ranks.close()
        remove(self.directory)


def timed(action: Callable[[], Any]) -> float:
    """Seconds that an action takes."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def best(
    action: Callable[[], Any], times: int = 5, before: Callable[[], Any] = lambda: None
) -> float:
    """The shortest of several times; ``before`` is not counted."""
    seconds = []
    for _ in range(times):
        before()
        seconds.append(timed(action))
    return min(seconds)


def report(what: str, value: float, limit: float, unit: str = "×", digits: int = 2) -> None:
    """Print a figure beside what was promised."""
    good = value <= limit
    if not good:
        missed.append(what)
    print(
        f"{what:<62} {value:8.{digits}f} {unit:<3} (at most {limit:g}) {'' if good else '← MISSED'}"
    )


def floor(bench: Bench, array: np.ndarray[Any, Any]) -> None:
    """Write the bytes once and map them in all ranks."""
    path = Path(bench.directory) / "floor"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    view = array.data.cast("B")
    while view:
        view = view[os.write(descriptor, view) :]
    os.close(descriptor)
    bench.ranks.ask("map", str(path))
    bench.ranks.ask("run", "a[0]")
    path.unlink()


def ship(bench: Bench, megabytes: int) -> dict[str, float]:
    """First, unchanged and changed shipments of one array."""
    space = bench.space
    size = megabytes * 250_000

    def renew() -> None:
        """A value that nobody has seen; the one before it is gone everywhere."""
        space.pop("a", None)
        bench.ranks.ask("run", "a = None")
        bench.cell("del a", deleted=["a"])
        bench.cell("pass")
        space["a"] = np.random.default_rng().random(size, dtype="f4")

    renew()
    figures = {"floor": best(lambda: floor(bench, space["a"]), before=renew)}
    figures["first"] = best(lambda: bench.cell("a[0]"), before=renew)
    figures["unchanged"] = best(lambda: bench.cell("a[0]"))

    def touch() -> None:
        space["a"][12345] += 1

    figures["changed"] = best(lambda: bench.cell("a[0]"), before=touch)
    target = np.empty_like(space["a"])
    figures["memcpy"] = best(lambda: np.copyto(target, space["a"]))
    figures["detection"] = best(lambda: digest([space["a"].data.cast("B")]))
    return figures


def memory(bench: Bench, megabytes: int) -> tuple[float, float]:
    """Peak of the client's own memory while it ships, and a rank's, in multiples of the value."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bench.space["fresh"] = np.ones(megabytes * 250_000, dtype="f4")
    bench.cell("fresh[0]")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    private = [
        sum(
            int(line.split()[1])
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines()
            if "Private_Dirty" in line
        )
        for pid in bench.ranks.pids
    ]
    bench.ranks.ask("run", "fresh = None")
    del bench.space["fresh"]
    return peak * 1024 / (megabytes * 1e6), max(private) * 1024 / (megabytes * 1e6)


def small(bench: Bench) -> tuple[float, float]:
    """Milliseconds more than an empty cell, for 1,000 small variables: the first time, and unchanged."""
    empty = best(lambda: bench.cell("pass"), 20)
    first = []
    unchanged = []
    kinds: list[Callable[[int], Any]] = [
        int,
        str,
        lambda n: [n, n],
        lambda n: {"n": n},
        lambda n: n / 3,
    ]
    for turn in range(5):
        names = [f"v{turn}_{n}" for n in range(1000)]
        bench.space.update({name: kinds[n % 5](n) for n, name in enumerate(names)})
        first.append(timed(lambda names=names: bench.cell("pass", names)))  # type: ignore[misc]
        unchanged.append(best(lambda names=names: bench.cell("pass", names)))  # type: ignore[misc]
    return (min(first) - empty) * 1000, (min(unchanged) - empty) * 1000


def parts(bench: Bench, make: Callable[[int], Any]) -> tuple[float, float]:
    """Milliseconds of this process's processor for a dict of 10,000 small parts: unchanged, and with one changed in place."""
    bench.space["parts"] = found = {f"part {n}": make(n) for n in range(10_000)}
    bench.cell("parts")

    def use(change: int) -> float:
        found["part 7"][0] += change
        begun = time.process_time()
        bench.cell("parts")
        return (time.process_time() - begun) * 1000

    unchanged, changed = min(use(0) for _ in range(7)), min(use(1) for _ in range(3))
    del bench.space["parts"]
    return unchanged, changed


def gather(bench: Bench) -> float:
    """Seconds for 50 MB from each of 4 ranks."""
    bench.ranks.ask("run", "r = np.random.default_rng().random(12_500_000, dtype='f4')")
    return best(lambda: bench.gather("r"))


def ipyparallel(megabytes: int) -> tuple[float, float]:
    """Seconds for a BroadcastView push, and for a pull of 50 MB from each rank."""
    import logging

    import ipyparallel as ipp

    cluster = ipp.Cluster(n=RANKS, log_level=logging.ERROR)
    client = cluster.start_and_connect_sync(activate=False)
    try:
        view = client.broadcast_view()
        view.block = True
        array = np.random.default_rng().random(megabytes * 250_000, dtype="f4")
        view.push({"w": 1})
        push = statistics.median(timed(lambda: view.push({"a": array})) for _ in range(3))
        direct = client[:]
        direct.block = True
        direct.execute(
            "import numpy as np; r = np.random.default_rng().random(12_500_000, dtype='f4')"
        )
        pull = min(timed(lambda: direct.pull("r")) for _ in range(3))
    finally:
        client.close()
        cluster.stop_cluster_sync()
    return push, pull


def main() -> int:
    """Measure and print; 1 when a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--no-ipyparallel", action="store_true")
    options = parser.parse_args()
    bench = Bench()
    try:
        peak, private = memory(bench, options.mb)
        figures = ship(bench, options.mb)
        first_small, unchanged_small = small(bench)
        pull = gather(bench)
    finally:
        bench.close()
    print(
        f"{options.mb} MB float32 to {RANKS} ranks: "
        + ", ".join(f"{k} {v:.3f} s" for k, v in figures.items())
    )
    report("first shipment / floor", figures["first"] / figures["floor"], 1.4)
    report("unchanged / first", figures["unchanged"] / figures["first"], 0.25)
    report("one element changed / first", figures["changed"] / figures["first"], 1.3)
    report("change detection / memcpy", figures["detection"] / figures["memcpy"], 80 / 30)
    report("client's peak memory / value", peak, 1.1)
    report("a rank's private memory / value", private, 0.2)
    report("1,000 small variables, more than an empty cell", first_small, 30, "ms")
    report("1,000 small variables unchanged, more than an empty cell", unchanged_small, 5, "ms")
    if not options.no_ipyparallel:
        push, theirs = ipyparallel(options.mb)
        print(
            f"ipyparallel: push {push:.3f} s, pull of 4 × 50 MB {theirs:.3f} s; ours {pull:.3f} s"
        )
        report("first shipment / ipyparallel's push", figures["first"] / push, 0.2)
        report("gather of 4 × 50 MB / ipyparallel's pull", pull / theirs, 0.5)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
