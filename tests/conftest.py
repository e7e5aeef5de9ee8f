"""What all tests share: components of the system, and the promise that a run leaves nothing behind."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests import durations
from tests.durations import CLOCK
from tests.lab.ending import end, environ
from tests.lab.golden import Golden, path_of, read, written
from tests.lab.kernels import PARENT
from tests.lab.pools import shared_pools
from tests.lab.ray import end_lent
from tests.tiers import (
    DOCS_FOLDER,
    EVENTS,
    SOCKETS,
    UNIT_FOLDER,
    Reader,
    Tier,
    concerns,
    is_function,
)

__all__ = ["shared_pools"]  # a fixture of all tests

# In the environment of every process that the tests start, however far down.
MARK = "SKYMAGIC_TEST_RUN"
DEADLINE = 10.0  # seconds that what was started may take to go
NEIGHBOURS_DEADLINE = 30.0  # and what another run of the tests has made

# As the Makefile does: each process that tests start would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A busy machine is not a defect; a hang is, and the timeout of pytest sees it.
settings.register_profile("skymagic", deadline=None)
settings.load_profile("skymagic")


def pytest_addoption(parser: pytest.Parser) -> None:
    if find_spec("pytest_timeout") is None:  # the tests also run without it, only a hang then hangs
        parser.addini("timeout", "seconds for one test; needs pytest-timeout")
    ours = parser.getgroup("skymagic")
    ours.addoption(
        "--folder",
        help="tests of this folder of the package: those in tests/FOLDER, and files that import from it",
    )
    ours.addoption(
        "--shard",
        type=durations.shard,
        help="a part of the test files: 1/4, 2/4, 3/4 and 4/4 are all of them",
    )
    ours.addoption(
        "--last-first",
        action="store_true",
        help="run the tests of each file in reverse: none may need what another one has done",
    )
    ours.addoption(
        "--write-golden",
        action="store_true",
        help="write the texts that tests compare with golden files, instead of comparing them",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    """What compares texts of this test with its golden file."""
    path, title = path_of(request.path), request.node.name
    folder = str(request.getfixturevalue("tmp_path")) if "tmp_path" in request.fixturenames else ""
    sections = read(path)
    expected = {name: text for name, text in sections.items() if name.startswith(f"{title} #")}
    writing = request.config.getoption("--write-golden")
    hidden = {f"on {socket.gethostname()}": "on <host>"} | ({folder: "<tmp>"} if folder else {})
    texts = Golden(title, None if writing else expected, hidden)
    yield texts
    if writing:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: text for name, text in sections.items() if name not in expected}
        path.write_text(written(kept | texts.sections))
    elif set(texts.sections) < set(expected):
        pytest.fail(f"{title} shows fewer texts than its golden file has: run `make golden`")


# ------------------------------------------------------------------------------- components of the system


def _command(name: str) -> Callable[[], bool]:
    # Debian keeps daemons out of a user's PATH
    path = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"]
    )
    return lambda: shutil.which(name, path=path) is not None


def _namespaces() -> bool:
    """Whether networks of their own can be made here."""
    if not (_command("ip")() and _command("unshare")() and _command("nsenter")()):
        return False
    words = [
        "unshare",
        "--net",
        "--mount",
        "--uts",
        "--pid",
        "--fork",
        "ip",
        "link",
        "add",
        "x",
        "type",
        "veth",
    ]
    return subprocess.run(words, capture_output=True).returncode == 0


def _mounts() -> bool:
    """Whether a user can have mounts of their own here."""
    if not (_command("unshare")() and _command("nsenter")()):
        return False
    return subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0


def _podman() -> bool:
    from tests.lab.containers import has_podman

    return has_podman()


def _charliecloud() -> bool:
    from tests.lab.containers import has_charliecloud

    return has_charliecloud()


# component -> (is it here, how to get it); `.ci/run` installs the same
COMPONENTS: dict[str, tuple[Callable[[], bool], str]] = {
    "sshd": (_command("sshd"), "install the system package openssh-server"),
    "namespaces": (_namespaces, "be root, and install the system packages iproute2 and util-linux"),
    "root": (lambda: os.geteuid() == 0, "be root, to be another user too"),
    "mounts": (_mounts, "install util-linux, and let users make namespaces (or be root)"),
    "fish": (_command("fish"), "install the system package fish"),
    "csh": (_command("csh"), "install the system package tcsh"),
    "slurm": (
        lambda: all(_command(name)() for name in ("slurmctld", "slurmd", "munged", "sbatch")),
        "install the system packages slurmctld, slurmd, slurm-client and munge",
    ),
    "ray": (lambda: find_spec("ray") is not None, 'pip install "skymagic[ray]"'),
    "podman": (_podman, "install the system package podman, and let it run containers"),
    "charliecloud": (_charliecloud, "install the system package charliecloud"),
    "chromium": (_command("chromium"), "install the system packages chromium and fonts-liberation"),
}


def missing(component: str) -> str | None:
    """Why `component` cannot be used, or None when it can."""
    if component not in COMPONENTS:
        raise LookupError(
            f"{component!r} is not a component; add it to COMPONENTS in tests/conftest.py"
        )
    here, remedy = COMPONENTS[component]
    return None if here() else f"{component} is not on this machine: {remedy}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Skip what needs a component that is not here; the rest is counted as starting."""
    _skip_without_components(item)
    with CLOCK.setup():
        return (yield)


def _skip_without_components(item: pytest.Item) -> None:
    reasons = [missing(str(name)) for mark in item.iter_markers("needs") for name in mark.args]
    if reason := next(filter(None, reasons), None):
        # on a person's machine a component may be absent; in CI that would be a test that never runs
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


# ------------------------------------------------------------------------------------------------- tiers

TIER = pytest.StashKey[Tier]()
PROCESSES = pytest.StashKey[list[str]]()
SECONDS = {Tier.quick: 0.05, Tier.near: 1.0, Tier.far: 3.0, Tier.docs: 3.0}
"""What a test takes, where nothing is known of its file."""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is collected stays to the end: the collector of garbage need not look at it again and again, which took a fifth of `quick`."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(
    tryfirst=True
)  # -m, -k and --last-failed choose among what is marked and counted here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its tier, take the files of the room and the shard, and have the longest files run first where processes share them."""
    reader = Reader()
    weights = dict.fromkeys(map(_file, items), 0.0)
    for item in items:
        tier, why = item.stash[TIER], _ = _tier(reader, item)
        if tier and _is_unit(item):
            raise pytest.UsageError(f"{item.nodeid} is no unit test: it uses {why}")
        item.add_marker(tier.name)
        weights[_file(item)] += SECONDS[tier]
        CLOCK.files.setdefault(_file(item), durations.Spent()).of += 1
    weights |= {name: seconds for name, seconds in durations.kept().items() if name in weights}
    chosen = _chosen(config, {_file(item): item.path for item in items}, weights)
    taken = [item for item in items if _file(item) in chosen and _writes(config, item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = taken[::-1] if config.getoption("--last-first") else taken
    if _worker(config):
        items.sort(
            key=lambda item: (-weights[_file(item)], _file(item))
        )  # those of one file stay in their order


def _writes(config: pytest.Config, item: pytest.Item) -> bool:
    """Golden files are written by the tests that compare them; no other test has to run for that."""
    return not config.getoption("--write-golden") or "golden" in getattr(item, "fixturenames", ())


def _tier(reader: Reader, item: pytest.Item) -> tuple[Tier, str]:
    if item.path.parent.name == DOCS_FOLDER:
        return Tier.docs, DOCS_FOLDER
    if any(item.iter_markers("needs")):
        return Tier.far, "needs"
    assert isinstance(item, pytest.Function)
    fixtures = item._fixtureinfo
    made = [
        each.func
        for name in fixtures.names_closure
        for each in fixtures.name2fixturedefs.get(name, ())
    ]
    asked = (getattr(one, "__code__", None) for one in (item.function, *made))
    if any(
        code is not None and "getfixturevalue" in code.co_names for code in asked
    ):  # any fixture of its file
        made += [one for one in vars(item.module).values() if hasattr(one, "_get_wrapped_function")]
    # functions and classes that are given as parameters are called, too
    given = getattr(item, "callspec", None)
    params = [getattr(one, "func", one) for one in (given.params.values() if given else ())]
    made += [one for one in params if is_function(one) or isinstance(one, type)]
    # all tests use the fixtures of this file
    return reader.tier(
        [item.function, *(one for one in made if getattr(one, "__module__", "") != __name__)],
        item.path.parent.name,
    )


def _is_unit(item: pytest.Item) -> bool:
    return item.nodeid.startswith(f"tests/{UNIT_FOLDER}/")


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _chosen(config: pytest.Config, files: dict[str, Path], weights: dict[str, float]) -> set[str]:
    """The files of this run."""
    found = set(files)
    if folder := config.getoption("folder"):
        found = {
            name for name, path in files.items() if concerns(path, Path(__file__).parent, folder)
        }
    if part := config.getoption("shard"):
        number, count = part
        found &= durations.shards(weights, count)[number - 1]
    return found


@pytest.hookimpl(optionalhook=True)  # xdist may be absent
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, and promises and contracts by their place, so that one process starts each place's cluster once."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class ByFileOrPlace(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return place_of(nodeid) or super()._split_scope(nodeid)

    return ByFileOrPlace(config, log)


def place_of(nodeid: str) -> str:
    """Where a test of the promises runs, other than on this machine, or any test on Ray; "" for all other tests."""
    if re.match(r"tests/providers/test_(ray_pools|sealed_channels_of_ray)\.py::", nodeid):
        return "tests on ray"
    found = re.fullmatch(
        r"tests/(promises/.*?[\[-](ssh|macos|slurm|kubernetes|ray)|contracts/.*?[\[-](ray))[\]-].*",
        nodeid,
    )
    return f"tests on {found[2] or found[3]}" if found else ""


class _Watch:
    """Sees each process that this one starts, and lets no quick test do so; nor a unit test use a socket."""

    def __init__(self) -> None:
        self.item: pytest.Item | None = None
        self.only_quick = False
        self.in_unit = False
        self._pid = os.getpid()

    def connected(self, event: str) -> None:
        """A socket was connected or bound."""
        if self.in_unit and threading.current_thread() is threading.main_thread():
            said = f"this test is in tests/{UNIT_FOLDER}, whose modules are pure, and uses a socket: {event}"
            if self.item is not None:
                self.item.stash.setdefault(PROCESSES, []).append(said)
            raise AssertionError(said)

    def begun(self, event: str, args: tuple[object, ...]) -> None:
        """A process was started."""
        if os.getpid() != self._pid:
            return
        CLOCK.started()
        item = self.item
        # beside other tests, what they left may go on in threads
        if item is None or not (
            self.only_quick or threading.current_thread() is threading.main_thread()
        ):
            return
        if item.stash[TIER] is Tier.quick:
            said = f"this test is of the tier quick, in which no process starts, and has started one: {event} {args[:1]}. {REMEDY}"
            item.stash.setdefault(PROCESSES, []).append(said)
            raise AssertionError(said)


REMEDY = (
    "Its tier is read from what it and its fixtures name (tests/tiers.py): it belongs to near when it starts the process by something "
    "that can be read, as subprocess or tests.lab.notebook; else add what starts it to STARTERS there"
)
WATCH = _Watch()


def _audited(event: str, args: tuple[object, ...]) -> None:
    """Called a million times in a run, by nearly all events for nothing: a method would take twice as long."""
    if event in EVENTS:
        WATCH.begun(event, args)
    elif event in SOCKETS:
        WATCH.connected(event)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Attribute time and processes to the file of the test that runs."""
    CLOCK.begin(_file(item))
    WATCH.item, WATCH.in_unit = item, _is_unit(item)
    try:
        return (yield)
    finally:
        WATCH.item, WATCH.in_unit = None, False
        CLOCK.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Where several processes share the tests, an interrupt in one of them is a test's own, and fails that test alone: Ctrl-C ends the first one."""
    try:
        return (yield)
    except KeyboardInterrupt as press:
        if not _worker(item.config):
            raise
        raise AssertionError(
            "an interrupt that was meant for the product has come to the test"
        ) from press


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """After the last test of a file its fixtures end, also those that the test has not asked for: what they start is not the test's.

    The cluster of Ray that is lent ends with the last test on Ray: other tests look for what is left on this machine.
    """
    WATCH.item = None
    try:
        return (yield)
    finally:
        if nextitem is None or place_of(nextitem.nodeid) != place_of(item.nodeid):
            end_lent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count the phase; a quick test that has started a process fails even where that was taken for another error."""
    report = yield
    CLOCK.phase(report.when or "", report.duration)
    if item.stash.get(PROCESSES, []) and report.passed and report.when != "setup":
        report.outcome, report.longrepr = "failed", item.stash[PROCESSES].pop(0)
    return report


# --------------------------------------------------------------------------------------- nothing is left


def _is_of_this_run(process: psutil.Process) -> bool:
    return process.environ().get(MARK, "").startswith(os.environ[MARK])


def marked_processes() -> list[psutil.Process]:
    """Processes that this test run started, children of children and orphans too."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and _is_of_this_run(process):
                found.append(process)
        except psutil.Error:
            continue  # gone meanwhile, or another user's
    return [process for process in found if not _belongs_to_python(process)]


def _belongs_to_python(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker serves pytest itself and ends with it."""
    try:
        return process.ppid() == os.getpid() and any(
            "resource_tracker" in a for a in process.cmdline()
        )
    except psutil.Error:
        return False


SHARED_BY_OTHERS = ("joblib_memmapping_folder*", "sem.*", "psm_*", "torch_*")
"""What joblib, multiprocessing and torch name their shared memory: a rank that ends may leave it."""


def traces() -> set[Path]:
    """Files and folders of skymagic on this machine, and shared memory of libraries, whoever made them."""
    memory, temporary = Path("/dev/shm"), Path(tempfile.gettempdir())
    found = {path for place in (memory, temporary) for path in place.glob("skymagic*")}
    return found | {path for pattern in SHARED_BY_OTHERS for path in memory.glob(pattern)}


def _is_held(path: Path) -> bool:
    """Whether an agent has locked it; were the agent ours, its process would be among those that are left."""
    try:
        with (path / ".agent").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _in_use_elsewhere(path: Path) -> bool:
    """Whether a process that is not of this run works with `path`: another notebook, another run of the tests.

    A pool has two folders, ``skymagic-POOL-ID-…`` each, and only one is in a command line.
    """
    if _is_held(path):
        return True
    stem = path.name.rpartition("-")[0]
    name = stem if stem.count("-") >= 2 else str(path)
    for process in psutil.process_iter():
        try:
            if _is_of_this_run(process):
                continue
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            words = [
                *process.cmdline(),
                process.cwd(),
                *(file.path for file in process.open_files()),
                maps,
            ]
        except (psutil.Error, OSError):
            continue
        if process.pid != os.getpid() and any(name in word for word in words):
            return True
    return False


def processes_left() -> list[str]:
    """Processes of this run, in words; what is on its way out has DEADLINE seconds to go."""
    _, alive = psutil.wait_procs(marked_processes(), timeout=DEADLINE)
    return [_describe(process) for process in alive]


def paths_left(before: set[Path]) -> list[str]:
    """Files and folders that were not there before; all that this run has started has ended, so that none comes any more."""
    begun = time.monotonic()
    paths = sorted(traces() - before)
    while paths := [path for path in paths if path.exists() and not _in_use_elsewhere(path)]:
        if time.monotonic() - begun > (NEIGHBOURS_DEADLINE if _has_neighbours() else DEADLINE):
            break
        time.sleep(0.05)  # a folder's removal has no event to wait for
    return [str(path) for path in paths]


def _has_neighbours() -> bool:
    """Whether another run of the tests goes on here: what nobody is seen to use may be of a pool of its own, at its start or end."""
    for process in psutil.process_iter():
        try:
            if not process.environ().get(MARK, os.environ[MARK]).startswith(os.environ[MARK]):
                return True
        except psutil.Error:
            continue
    return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"process {process.pid}"


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """Shells and CI systems start what runs in the background with SIGINT ignored, which all children inherit; tests press stop."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def kernels_end() -> Iterator[None]:
    """The process that forks the kernels of this one's notebooks ends with it."""
    yield
    PARENT.close()


@pytest.fixture(scope="session", autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What pools of this process leave in the user's state folder is not the user's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


FAILED: set[str] = set()
"""Files of which a test has failed."""
IN_ORDER: set[str] = set()
"""Tests that go on where the one before them in their file has ended."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the file of a test that fails."""
    if report.failed:
        FAILED.add(report.nodeid.partition("::")[0])
    if "in_order" in report.keywords:
        IN_ORDER.add(report.nodeid)


def run_again_together(config: pytest.Config) -> None:
    """Count all tests of a file in order as failed where one has: ``--last-failed`` chooses by it."""
    if (
        FAILED and (cache := getattr(config, "cache", None)) is not None
    ):  # absent with -p no:cacheprovider
        together = {nodeid: True for nodeid in IN_ORDER if nodeid.partition("::")[0] in FAILED}
        cache.set("cache/lastfailed", {**cache.get("cache/lastfailed", {}), **together})


def end_what_failed_tests_left() -> None:
    """End what tests of a file have started of which one has failed: it may not have come to where it ends that, and is run again."""

    def found() -> list[psutil.Process]:
        # pytest puts the name of the test that runs into the environment
        started = [
            (process, environ(process).get("PYTEST_CURRENT_TEST", ""))
            for process in marked_processes()
        ]
        return [process for process, test in started if test.partition("::")[0] in FAILED]

    if FAILED and psutil.wait_procs(found(), timeout=DEADLINE)[1]:
        end(found)


BEFORE = pytest.StashKey[set[Path]]()
LEFT = pytest.StashKey[list[str]]()
DOUBTFUL = pytest.StashKey[list[str]]()
SPENT = pytest.StashKey[list[dict[str, dict[str, Any]]]]()
MACHINE_TIME = pytest.StashKey[tuple[float, float]]()
AGAIN_IN_VAIN = pytest.ExitCode.INTERRUPTED
"""In the place of TESTS_FAILED where it is not enough to run again what failed (`RETRY=1`)."""


def pytest_configure(config: pytest.Config) -> None:
    """A run of the tests leaves no process, no shared memory and no folder behind: this is what was there before."""
    if worker := _worker(config):
        os.environ[MARK] += f"-{worker}."
    else:
        os.environ[MARK] = uuid.uuid4().hex
        config.stash[BEFORE] = traces()
        config.stash[LEFT] = []
        config.stash[DOUBTFUL] = []
        config.stash[SPENT] = []
        config.stash[MACHINE_TIME] = durations.machine_time()
    if (folder := config.getoption("folder")) and not (
        Path(__file__).parent.parent / "skymagic" / folder
    ).is_dir():
        raise pytest.UsageError(f"--folder {folder}: skymagic/ has no such folder")
    WATCH.only_quick = config.getoption("markexpr", "") == Tier.quick.name
    sys.addaudithook(_audited)
    durations.count_sleep()


def _worker(config: pytest.Config) -> str:
    """Which one it is of the processes that share the tests (pytest-xdist); "" where there is one alone."""
    return str(getattr(config, "workerinput", {}).get("workerid", ""))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker has ended, and says what it leaves; or has crashed, and the tests that it had left did not run."""
    said = getattr(node, "workeroutput", {})
    node.config.stash[LEFT] += said.get("left", [])
    node.config.stash[SPENT] += [said["spent"]] if "spent" in said else []
    if error:
        node.config.stash[LEFT].append(f"tests that {node.gateway.id} did not run: it crashed")


@pytest.hookimpl(trylast=True)  # the workers have ended by then
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Look for what is left: each worker for its processes, and the first process for folders, whose maker cannot be told."""
    config = session.config
    end_what_failed_tests_left()
    if _worker(config):
        config.workeroutput["left"] = processes_left()  # type: ignore[attr-defined]
        config.workeroutput["spent"] = durations.plain(CLOCK.files)  # type: ignore[attr-defined]
        return
    run_again_together(config)
    config.stash[LEFT] += processes_left()
    paths = paths_left(config.stash[BEFORE])
    # nothing in a folder tells which of two runs has made it: the one that is alone looks closely, as in CI
    config.stash[DOUBTFUL if _has_neighbours() else LEFT] += paths
    if config.stash[LEFT]:
        session.exitstatus = AGAIN_IN_VAIN


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show where the time went; name what is left where failures are named."""
    told: list[dict[str, dict[str, Any]]] = config.stash.get(SPENT, [])
    spent = durations.merged(told or [durations.plain(CLOCK.files)])
    if files := {name: one for name, one in spent.items() if one.tests}:
        # what runs again is a part of each file, and is counted as if it were all
        if not config.getoption("lf", default=False):
            durations.save(files, config.rootpath / "build" / durations.LAST.name)
        terminalreporter.section("where the time is")
        for line in [
            *durations.lines(files),
            durations.used(config.stash[MACHINE_TIME], durations.machine_time()),
        ]:
            terminalreporter.line(line)
    if doubtful := config.stash.get(DOUBTFUL, []):
        terminalreporter.section("this test run, or another one that goes on here, left behind")
        for line in doubtful:
            terminalreporter.line(line)
    if left := config.stash.get(LEFT, []):
        terminalreporter.section("the test run left behind", red=True)
        for line in dict.fromkeys(left):
            terminalreporter.line(line)
