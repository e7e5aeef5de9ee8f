"""Mutation tests of the safety net: each change breaks a promise, and a promise or contract must find it.

::

    python benchmarks/mutations.py --list
    python benchmarks/mutations.py --only "second stop ignored" --only "stale value"
    python benchmarks/mutations.py --place local -x

A mutation is a text of the package and the text that replaces it. The script copies the repository
to a temporary folder, applies one mutation at a time there, runs `tests/promises` and
`tests/contracts` up to the first failure, and restores the file. A failure counts if the test fails
twice again, alone, with the mutation and passes without it; otherwise the search goes on with the
other tests. The script prints a table of the mutations with the test that has found each of them,
and ends with 1 if any was not found. The last result stands in `benchmarks/README.md`.

`tests/test_mutations.py` checks that every mutation still applies; after a refactoring of the
mutated code, write its texts again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("local", "ssh", "slurm", "kubernetes", "ray", "aws")
MARK = "SKYMAGIC_MUTATION"
"""Environment variable of every process that a test run starts, to end those that are left."""
TEST_TIMEOUT = 60
"""Seconds for one test; a test that hangs has found the mutation."""
AGAIN = 2
"""How often a test that has found a mutation must fail again."""
RUN_TIMEOUT = 900.0
"""Seconds for all tests of one mutation."""


@dataclass(frozen=True)
class Mutation:
    """A change of the package that breaks a promise.

    Attributes:
        name: the defect in a few words.
        file: path below `skymagic`.
        before: text that occurs exactly once in the file.
        after: text that replaces it.
        promise: what users lose.
        first: stems of the promises or contracts to run first.
        places: where the tests run besides this machine.
    """

    name: str
    file: str
    before: str
    after: str
    promise: str
    first: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    def apply(self, root: Path) -> str:
        """Change the file below `root`, and return its original text.

        Raises:
            ValueError: the text does not occur exactly once, or the changed file does not compile.
        """
        path = root / "skymagic" / self.file
        original = path.read_text()
        path.write_text(self.mutated(original))
        return original

    def mutated(self, original: str) -> str:
        """Return the changed text of the file. Raises ValueError as `apply` does."""
        if (count := original.count(self.before)) != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in {self.file}")
        text = original.replace(self.before, self.after)
        try:
            compile(text, self.file, "exec")
        except SyntaxError as problem:
            raise ValueError(f"{self.name}: {self.file} does not compile: {problem}") from problem
        return text


STATE, VARIABLES, FRAMEWORKS, OUTPUT, FAILURE, STOP, RESULTS, SURVIVAL, COST = (
    "test_1_cells_keep_state",
    "test_2_variables_follow",
    "test_3_frameworks_are_ready",
    "test_4_output_appears_in_its_cell",
    "test_5_a_failing_rank_fails_the_cell",
    "test_6_the_stop_button_works",
    "test_7_results_are_values",
    "test_8_runs_survive_the_notebook",
    "test_9_no_machine_costs_by_accident",
)
ERRORS, PROGRESS, SECRETS, SIZE, FILES, NOTHING_LEFT = (
    "test_10_errors_say_what_to_do",
    "test_12_progress_is_visible",
    "test_13_secrets_stay_secret",
    "test_14_a_pool_changes_its_size",
    "test_files_and_scripts",
    "test_nothing_is_left",
)
LINK, AGENT_OUTPUT = "test_link", "test_agent_output"

MUTATIONS = (
    # -- run, jobs, magics, api: what a cell returns -------------------------------------------
    Mutation(
        "swallowed error",
        "run/state.py",
        "return self.died is not None or self.failure is not None",
        "return self.died is not None",
        "a rank that raises fails the cell",
        (FAILURE,),
    ),
    Mutation(
        "others not stopped",
        "run/run.py",
        "self._stopping, self._due[RunLoop._stop_others] = True, stop_at",
        "self._stopping = True",
        "the other ranks leave their collective",
        (FAILURE,),
    ),
    Mutation(
        "stop kills at once",
        "run/run.py",
        "        self._interrupt()\n        # The user's code gets a grace period",
        "        self._kill(open_ranks)\n        # The user's code gets a grace period",
        "stopped ranks keep their variables",
        (STOP,),
    ),
    Mutation(
        "second stop ignored",
        "run/run.py",
        "            self._kill(open_ranks)\n            return\n        if self._left",
        "            return\n        if self._left",
        "a second press kills",
        (STOP,),
    ),
    Mutation(
        "timeout ignored",
        "run/run.py",
        "None if limits.timeout is None else now + limits.timeout",
        "None",
        "--timeout ends a cell",
        (FAILURE,),
    ),
    Mutation(
        "results in wrong order",
        "jobs/cell.py",
        "[fetch(rank, LAST_VALUE) for rank in order.value_ranks]",
        "[fetch(rank, LAST_VALUE) for rank in reversed(order.value_ranks)]",
        "results are in rank order",
        (RESULTS,),
    ),
    Mutation(
        "dry run ignored",
        "magics/runs.py",
        "        if request.dry_run:\n            print(display.shipment",
        "        if False:\n            print(display.shipment",
        "a dry run executes nothing",
        (VARIABLES,),
    ),
    Mutation(
        "calls in order of completion",
        "api/calls.py",
        "ordered=self.ordered or not self.stream",
        "ordered=False",
        "values of calls are in the order of the calls",
        (RESULTS,),
    ),
    # -- data: which values travel ------------------------------------------------------------------
    Mutation(
        "in-place change not seen",
        "data/shipping/comparison.py",
        "if previous is not None and previous.stream == stream:",
        "if previous is not None and (holds or previous.stream == stream):",
        "in-place changes are seen",
        (VARIABLES,),
    ),
    Mutation(
        "stale value",
        "data/shipping/bindings.py",
        "if held.get(name) != fingerprint and fingerprint is not None and name not in fresh:",
        "if name not in held and fingerprint is not None and name not in fresh:",
        "a changed value is sent again",
        (VARIABLES,),
    ),
    Mutation(
        "rank's own value overwritten",
        "data/shipping/bindings.py",
        "        state.rebound.update(rebound)\n",
        "        for name in rebound:\n            state.fingerprints.pop(name, None)\n",
        "a rank keeps its own value",
        (VARIABLES,),
    ),
    Mutation(
        "names behind functions not sent",
        "data/shipping/comparison.py",
        "        if request.no_push:\n            return {}\n        reasons = self._bound",
        "        return {}\n        reasons = self._bound",
        "names that functions on the ranks read are sent",
        (VARIABLES,),
    ),
    Mutation(
        "stale module",
        "data/shipping/bindings.py",
        "if self._ranks[rank].sources.get(source) != hash]",
        "if source not in self._ranks[rank].sources]",
        "edits of a module beside the notebook arrive",
        (FILES,),
    ),
    Mutation(
        "cloned values overwritten",
        "jobs/cloning.py",
        "    shipper.record_clone(lent.names, source, ranks)\n",
        "",
        "a rank keeps the values that were cloned to it",
        (VARIABLES,),
    ),
    Mutation(
        "cloned values missing",
        "data/shipping/packing.py",
        "                    names=lent.names,\n                    ranks=None,\n",
        "                    names=lent.names,\n                    ranks=(),\n",
        "%sky_clone copies values",
        (VARIABLES,),
    ),
    Mutation(
        "ranks share memory",
        "content/store.py",
        "_PROT_READ_WRITE, _MAP_PRIVATE, descriptor, 0)",
        "_PROT_READ_WRITE, 1, os.open(f'/proc/self/fd/{descriptor}', os.O_RDWR), 0)",
        "values of the ranks are isolated",
        (VARIABLES,),
    ),
    Mutation(
        "equal arrays become one",
        "data/bundle.py",
        "if number not in files or (number, offset) in used:",
        "if number not in files:",
        "distinct values stay distinct",
        (VARIABLES,),
    ),
    # -- kernels: ranks and their output ------------------------------------------------------------
    Mutation(
        "wrong local rank",
        "kernels/network.py",
        '"LOCAL_RANK": info.local_rank',
        '"LOCAL_RANK": info.rank',
        "ranks know their place",
        (FRAMEWORKS,),
    ),
    Mutation(
        "wrong world size",
        "kernels/network.py",
        '        "WORLD_SIZE": info.world_size',
        '        "WORLD_SIZE": info.local_world_size',
        "ranks know how many they are",
        (FRAMEWORKS,),
    ),
    Mutation(
        "last output lost",
        "kernels/agent/output.py",
        "        self.drain(now, last=True)\n",
        "",
        "output appears in the cell that caused it",
        (OUTPUT,),
    ),
    Mutation(
        "streams out of order",
        "kernels/agent/output.py",
        "groupby(waiting, key=itemgetter(0))",
        "groupby(sorted(waiting, key=itemgetter(0)), key=itemgetter(0))",
        "both streams keep their order",
        (OUTPUT,),
    ),
    Mutation(
        "attaching replays twice",
        "kernels/agent/output.py",
        "        for output in self._kept.unacknowledged(self._sent):\n            self._send(output)\n",
        "        for output in self._kept.unacknowledged(self._sent):\n            self._send(output)\n"
        "            self._send(__import__('dataclasses').replace(output, seq=output.seq + 1000))\n",
        "each line is shown once",
        (SURVIVAL,),
    ),
    Mutation(
        "attaching replays nothing",
        "kernels/agent/output.py",
        "        for output in self._kept.unacknowledged(self._sent):\n            self._send(output)\n",
        "",
        "output of a run comes to the next notebook",
        (SURVIVAL,),
    ),
    Mutation(
        "unauthenticated notebook",
        "kernels/daemon/daemon.py",
        "if request.secret != self.secret:",
        "if not request.secret:",
        "others start nothing on a pool",
        (LINK,),
    ),
    Mutation(
        "leaked shared memory",
        "kernels/agent/directories.py",
        "        store.remove(self.store)\n",
        "",
        "a pool leaves nothing behind",
        (NOTHING_LEFT,),
    ),
    Mutation(
        "replaced rank without plugin",
        "kernels/rank/entry.py",
        "hooks = Hooks(spec.plugins, info)",
        "hooks = Hooks(spec.plugins if not spec.generation else [], info)",
        "a replaced rank is in the process group again",
        (FAILURE,),
    ),
    Mutation(
        "script's text in argv",
        "kernels/script/script.py",
        "CommandLine((shell, path),",
        'CommandLine((shell, "-c", order.text),',
        "other users cannot read a script",
        (SECRETS,),
    ),
    Mutation(
        "script stopped without SIGTERM",
        "kernels/script/script.py",
        "        self._signal(signal.SIGTERM, lambda member_of: member_of == group)\n",
        "",
        "a stopped script may save its work",
        (FILES,),
    ),
    Mutation(
        "leaked process",
        "kernels/script/script.py",
        "        if self._gone_within(LINGER_SECONDS):\n            return",
        "        if True:\n            return",
        "processes of a script end with it",
        (FILES,),
    ),
    # -- the link: agents, their uplink, requests, and notebooks that take over -----------------------
    Mutation(
        "request sent to all ranks",
        "cluster/requests.py",
        "for link, node_ranks in self._links.of(ranks):\n            link.send(wire.Request(",
        "for link, node_ranks in self._links.of(self.specs):\n            link.send(wire.Request(",
        "a cell runs on the ranks that were chosen",
        (STATE,),
    ),
    Mutation(
        "credit never returned",
        "cluster/requests.py",
        "            self._links[index].send(wire.Credit(cost))\n",
        "            pass\n",
        "output goes on however much there was",
        (OUTPUT,),
    ),
    Mutation(
        "control behind output",
        "kernels/agent/uplink.py",
        "        if self._control:\n            data",
        "        if self._control and not self._output:\n            data",
        "output delays no answer",
        (AGENT_OUTPUT,),
    ),
    Mutation(
        "last output of a killed rank lost",
        "kernels/agent/ranks.py",
        "        rank.output.end(time.monotonic())\n",
        "        rank.output.screen.end()\n",
        "what a rank wrote before it died is shown, or said to be left out",
        (FAILURE,),
    ),
    Mutation(
        "outcome lost at a takeover",
        "kernels/agent/ranks.py",
        "            if rank.finished is not None:\n                self._send(rank.finished)\n",
        "",
        "the result of a run that has ended meanwhile waits",
        (SURVIVAL,),
    ),
    Mutation(
        "follow from the beginning",
        "kernels/agent/output.py",
        "        if request == self.request:\n            self._kept.acknowledge(shown)\n",
        "",
        "a notebook that takes over gets what it has not shown",
        (AGENT_OUTPUT,),
    ),
    Mutation(
        "piece repeated after a takeover",
        "kernels/agent/replay_buffer.py",
        "self._first[0][0].seq <= shown:",
        "self._first[0][0].seq < shown:",
        "each piece of output arrives once",
        (AGENT_OUTPUT,),
    ),
    Mutation(
        "half a line of another notebook",
        "kernels/daemon/daemon.py",
        "        self.input.forget_partial()\n",
        "",
        "a notebook that takes over is understood",
        (LINK,),
    ),
    Mutation(
        "stream's credit never returned",
        "wire/session/loop.py",
        "if channel.unreported >= WINDOW // 4:",
        "if channel.unreported >= WINDOW * 4:",
        "a stream goes on however long it is",
        (LINK,),
    ),
    Mutation(
        "stream without back pressure",
        "wire/session/loop.py",
        "            channel.credit -= len(data)\n",
        "",
        "a stream that nobody reads is held",
        (LINK,),
    ),
    # -- pool, cluster, plan, plugins, runtime --------------------------------------------------------
    Mutation(
        "waiting cells in wrong order",
        "pool/dispatch.py",
        "self._queue.insert(0 if urgent else len(self._queue), reservation)",
        "self._queue.insert(0, reservation)",
        "cells run in the order of their start",
        (PROGRESS,),
    ),
    Mutation(
        "missing signal",
        "cluster/requests.py",
        "for link, node_ranks in self._links.of(ranks):\n            link.send(wire.Signal(",
        "for link, node_ranks in list(self._links.of(ranks))[:1]:\n            link.send(wire.Signal(",
        "signals reach the ranks of all nodes",
        (STOP,),
        ("ssh",),
    ),
    Mutation(
        "idle limit ignored",
        "plan/limits.py",
        "if self._idle is not None and self._idle_since is not None:",
        "if False and self._idle is not None and self._idle_since is not None:",
        "--idle ends a pool",
        (COST, SIZE),
    ),
    Mutation(
        "idle limit not set",
        "plan/renting.py",
        '{"idle": IDLE, "max_lifetime": MAX_LIFETIME}',
        '{"max_lifetime": MAX_LIFETIME}',
        "rented machines have an idle limit",
        (COST,),
        ("aws",),
    ),
    Mutation(
        "collective of some ranks hangs",
        "plugins/_torch/guard.py",
        "        if not info.all_ranks_take_part():\n            arguments = signature.bind_partial(*args",
        "        if False:\n            arguments = signature.bind_partial(*args",
        "a collective that cannot end is explained",
        (FRAMEWORKS,),
    ),
    Mutation(
        "drop_last ignored",
        "runtime/sharding.py",
        "        order = order[: size - size % parts]\n",
        "        pass\n",
        "sky.shard(drop_last=True) gives equal parts",
        (FRAMEWORKS,),
    ),
    # -- files, wire, bootstrap, ssh, providers: other machines ---------------------------------------
    Mutation(
        "changed content not copied",
        "content/transfer/comparing.py",
        "elif state.st_mtime_ns != entry.mtime:",
        "elif False:",
        "%sky_put copies files of which only the content changed",
        (FILES,),
    ),
    Mutation(
        "record with mode 0644",
        "wire/atomic.py",
        "os.O_TRUNC, 0o600)",
        "os.O_TRUNC, 0o644)",
        "records and keys are the user's alone",
        (SECRETS,),
    ),
    Mutation(
        "terminal escapes not sanitized",
        "wire/untrusted.py",
        '    return "".join(letter if letter in "\\n\\t" else _visible(letter) for letter in text)\n',
        "    return text\n",
        "a host's text cannot control the terminal",
        (ERRORS,),
    ),
    Mutation(
        "frames sent twice after a cut",
        "wire/session/frames.py",
        "        self._acknowledge(received)\n        self._sent = received\n",
        "        self._sent = self._last - len(self._unacked)\n",
        "each message arrives exactly once over cuts",
        (LINK,),
    ),
    Mutation(
        "package version not pinned",
        "bootstrap/requirements.py",
        "    if not distribution.version:\n        return None\n    source",
        "    return None\n    source",
        "nodes have the notebook's versions",
        (FILES,),
        ("ssh",),
    ),
    Mutation(
        "unverified host key",
        "ssh/login.py",
        '    if status.state != "known":\n',
        '    if status.state == "revoked":\n',
        "a host with a changed key is refused",
        (SECRETS,),
        ("ssh",),
    ),
    Mutation(
        "untagged instance",
        "providers/aws/launch.py",
        'label.specifications("instance", "volume", "network-interface")',
        'label.specifications("volume", "network-interface")',
        "rented machines are found from any machine",
        (COST,),
        ("aws",),
    ),
    Mutation(
        "price limit not checked",
        "providers/aws/market.py",
        "is not None and price <= price_limit\n",
        "is not None\n",
        "--max-price is kept",
        (COST,),
        ("aws",),
    ),
)


@dataclass(frozen=True)
class Verdict:
    """Result of one mutation.

    Attributes:
        mutation: the change.
        found_by: the test that has found it, "" for none.
        seconds: what the search took, with the runs that confirm it.
        flaky: tests that failed with the mutation, but not each time, or without it too.
    """

    mutation: Mutation
    found_by: str
    seconds: float
    flaky: tuple[str, ...] = ()


# -- tests -----------------------------------------------------------------------------------------


def place_of(test: str) -> str:
    """Return where a test of the promises or contracts runs, by its id."""
    if COST in test:
        return "aws"
    if match := re.search(r"[\[-](openssh|slurm-login|ssh|slurm|kubernetes|ray|aws)[\]-]", test):
        return {"openssh": "ssh", "slurm-login": "slurm"}.get(match[1], match[1])
    return "local"


def collect(root: Path) -> list[str]:
    """Return the ids of all promises and contracts."""
    folders = ["tests/promises", "tests/contracts"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *folders]
    result = subprocess.run(
        command, cwd=root, env=environment(root, ""), capture_output=True, text=True
    )
    tests = [line for line in result.stdout.splitlines() if line.startswith("tests/")]
    if result.returncode or not tests:
        raise SystemExit(f"the tests cannot be collected:\n{result.stdout}{result.stderr}")
    return [test for test in tests if "::" in test]


def ordered(tests: Sequence[str], mutation: Mutation, places: Sequence[str]) -> list[str]:
    """Return the tests for a mutation: those of `first` come first, at each place."""
    chosen = [test for test in tests if place_of(test) in places]

    def rank(test: str) -> tuple[bool, int, bool]:
        is_first = any(f"/{stem}.py" in test for stem in mutation.first)
        # The last file of a place ends the pool that its tests share.
        return not is_first, places.index(place_of(test)), NOTHING_LEFT in test

    return sorted(chosen, key=rank)


def environment(root: Path, mark: str) -> dict[str, str]:
    """Return the environment of a test run in the copy below `root`."""
    return {**os.environ, "PYTHONPATH": str(root), MARK: mark}


@dataclass(frozen=True)
class Runner:
    """Runs tests in the copy of the repository.

    Attributes:
        root: folder of the copy.
        wrap: words of a command that runs the tests.
        logs: folder for what pytest prints, or None.
    """

    root: Path
    wrap: Sequence[str] = ()
    logs: Path | None = None

    def first_failure(self, tests: Sequence[str], log: str) -> str:
        """Run tests up to the first failure, and return its id; "" if all pass."""
        output, status = self._run(tests)
        if self.logs:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.logs / f"{log}.log").write_text(output)
        if match := re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE):
            return match[1]
        if status:  # pytest itself failed, which says nothing about the mutation
            raise SystemExit(f"pytest ended with {status}:\n{output}")
        return ""

    def _run(self, tests: Sequence[str]) -> tuple[str, int]:
        """Return what pytest prints, and its exit status."""
        mark = uuid.uuid4().hex
        options = ["-n", "0", "-q", "-x", "-rfE", "-p", "no:cacheprovider", "--tb=short"]
        command = [*self.wrap, *own_memory(), sys.executable, "-m", "pytest", *options]
        process = subprocess.Popen(
            [*command, f"--timeout={TEST_TIMEOUT}", *tests],
            cwd=self.root,
            env=environment(self.root, mark),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=RUN_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nno end within {RUN_TIMEOUT:.0f} s\n"
        finally:
            end_marked(mark)
        return output, process.returncode


def own_memory() -> list[str]:
    """Return a command that gives the tests shared memory of their own, where this user can.

    Otherwise agents of other tests on this machine sweep what an agent has left there, and hide it.
    """
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return []
    mount = 'mount -t tmpfs none /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh"]


def end_marked(mark: str) -> None:
    """Kill the processes that a test run has left."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


# -- mutations -------------------------------------------------------------------------------------


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """Copy the repository to a temporary folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = Path(folder)
        for name in filter(None, listed.split("\0")):
            if (source := ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, root / name)
        yield root


@contextlib.contextmanager
def applied(mutation: Mutation, root: Path) -> Iterator[None]:
    """Apply a mutation to the copy, and restore the file."""
    original = mutation.apply(root)
    try:
        yield
    finally:
        (root / "skymagic" / mutation.file).write_text(original)


def judge(mutation: Mutation, runner: Runner, tests: Sequence[str]) -> Verdict:
    """Search for a test that fails with the mutation each time, and passes without it."""
    began = time.monotonic()
    log = mutation.name.replace(" ", "-").replace("'", "")
    flaky: list[str] = []
    while True:
        remaining = [test for test in tests if test not in flaky]
        with applied(mutation, runner.root):
            suspect = runner.first_failure(remaining, log)
        if not suspect:
            break
        without = runner.first_failure([suspect], f"{log}-without")
        with applied(mutation, runner.root):
            again = [runner.first_failure([suspect], f"{log}-again") for _ in range(AGAIN)]
        if all(again) and not without:
            break
        flaky.append(suspect)
    return Verdict(mutation, suspect, time.monotonic() - began, tuple(flaky))


def row(verdict: Verdict) -> str:
    """Return a line of the table."""
    found_by = verdict.found_by.removeprefix("tests/") or "NOT FOUND"
    flaky = "".join(f"; flaky: {test.removeprefix('tests/')}" for test in verdict.flaky)
    return f"{verdict.mutation.name:32} {verdict.seconds:6.1f}  {found_by}{flaky}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen mutations, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="a mutation; repeatable")
    parser.add_argument(
        "--place",
        choices=PLACES,
        action="append",
        help="where the tests run; by default on this machine and where the mutation needs it",
    )
    parser.add_argument("-x", action="store_true", help="stop at the first that is not found")
    parser.add_argument("--list", action="store_true", help="list the mutations")
    parser.add_argument(
        "--wrap", metavar="COMMAND", default="", help='a command to run the tests with, as "nice"'
    )
    parser.add_argument("--logs", metavar="FOLDER", type=Path, help="keep there what pytest prints")
    options = parser.parse_args(arguments)
    names = [mutation.name for mutation in MUTATIONS]
    if unknown := sorted(set(options.only or ()) - set(names)):
        parser.error(f"no such mutation: {', '.join(unknown)}")
    chosen = [mutation for mutation in MUTATIONS if mutation.name in (options.only or names)]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name:32} {mutation.file:32} {mutation.promise}")
        return 0
    verdicts = []
    with copied() as root:
        tests = collect(root)
        runner = Runner(root, options.wrap.split(), options.logs)
        for mutation in chosen:
            places = options.place or ("local", *mutation.places)
            verdicts.append(judge(mutation, runner, ordered(tests, mutation, places)))
            print(row(verdicts[-1]), flush=True)
            if options.x and not verdicts[-1].found_by:
                break
    found = [verdict for verdict in verdicts if verdict.found_by]
    seconds = sum(verdict.seconds for verdict in verdicts)
    print(f"{len(found)} of {len(verdicts)} mutations were found in {seconds:.0f} s")
    return 0 if len(found) == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
