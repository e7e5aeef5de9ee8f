"""The Python face: lazy functions on pools, their values, their errors, and the pools themselves."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skymagic as sky
from skymagic.errors import (
    CaptureError,
    PoolError,
    PoolStateError,
    RankDied,
    RequestError,
    ResultError,
    RunTimeout,
)
from skymagic.jobs import task, workers
from skymagic.plugins import Plugin
from skymagic.pool.status import State
from skymagic.run.interrupt import StopSignal
from skymagic.run.state import Limits
from tests.lab.golden import Golden
from tests.lab.raising import raises

ROOT = Path(__file__).resolve().parents[2]
FACTOR = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with sky.Compute(nodes=2, procs_per_node=2) as made:
        yield made


@sky.function
def add(a: int, b: int = 2, *rest: int, c: int = 3) -> int:
    """Adds."""
    return (a + b + c + sum(rest)) * FACTOR


@sky.function
def rank() -> int:
    return sky.instance_info().rank


@sky.function
def fail(where: int, problem: BaseException) -> None:
    if sky.instance_info().rank == where:
        raise problem


@sky.function
def meet(folder: str, mine: str, *others: str) -> int:
    """Ends when all others have begun: only runs that go on at the same time can do that."""
    import time

    Path(folder, mine).touch()
    while not all(Path(folder, other).exists() for other in others):
        time.sleep(0.01)  # another process makes each file: no event
    return sky.instance_info().rank


@sky.function
def hang(folder: str = "") -> None:
    import time

    if folder:
        Path(folder, "began").touch()
    time.sleep(600)  # until it is stopped


# ------------------------------------------------------------------------------------------------ operators


def test_values_of_all_ranks_of_one_and_of_several_calls(pool: Any) -> None:
    assert rank() @ pool == [0, 1, 2, 3]
    assert sorted(rank() >> pool for _ in range(4)) == [0, 1, 2, 3], "they take turns"
    assert add(1, 2, 3, 4, c=5) >> pool == 45
    assert add(a=1) @ pool == [18] * 4
    assert (rank() & add(1)) @ pool == ([0, 1, 2, 3], [18] * 4)
    assert sky.gather(*(add(n) for n in range(9))) >> pool == tuple(add.local(n) for n in range(9))
    assert sky.gather(add(1), add(2) & add(3)) >> pool == (18, 21, 24)
    assert sky.gather() >> pool == ()
    assert pool.map(add, iter([1, 2])) == [18, 21]
    assert pool.map(lambda x: x * FACTOR, [1, 2]) == [3, 6]
    assert pool.map(add, []) == []


def test_a_call_is_lazy(golden: Golden, pool: Any, tmp_path: Path) -> None:
    call = meet(str(tmp_path), "a")
    assert not list(tmp_path.iterdir())
    golden(repr(call), hide=[tmp_path])
    call >> pool
    assert list(tmp_path.iterdir())


def test_calls_run_side_by_side_and_give_a_tuple(pool: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    values = (
        meet(folder, "a", "b", "c") & meet(folder, "b", "a", "c") & meet(folder, "c", "a", "b")
    ) >> pool
    assert isinstance(values, tuple)
    assert len(set(values)) == 3


def test_map_takes_the_next_free_rank(pool: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def work(item: int) -> int:
        """The first item is over when all others are, which then were done by the other ranks."""
        import time

        while item == 0 and len(list(Path(folder).iterdir())) < 11:
            time.sleep(0.01)  # other processes make the files: no event
        Path(folder, str(item)).touch()
        return sky.instance_info().rank

    ranks = pool.map(work, range(12))
    assert len(set(ranks)) == 4
    assert ranks.count(ranks[0]) == 1


def test_calls_from_threads_go_side_by_side(pool: Any, tmp_path: Path) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda a=a, b=b: found.append(meet(str(tmp_path), a, b) >> pool))
        for a, b in ("xy", "yx")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 2


def test_a_broadcast_and_a_call_share_ranks_one_after_the_other(pool: Any) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(pool.map(add, range(8))))
    thread.start()
    for _ in range(4):
        assert rank() @ pool == [0, 1, 2, 3]
    thread.join(60)
    assert results == [[add.local(n) for n in range(8)]]


def test_callables_of_every_kind_can_be_tasks(pool: Any) -> None:
    @sky.function
    async def soon(x: int) -> int:
        import asyncio

        await asyncio.sleep(0)  # lets the loop go on once
        return 2 * x

    class Model:
        def __init__(self, weight: int) -> None:
            self.weight = weight

        @sky.function
        def predict(self, x: int) -> int:
            return self.weight * x

    @sky.function
    def outer(x: int) -> Any:
        return add(x), add.local(x)

    assert soon(2) @ pool == [4] * 4
    assert Model(5).predict(2) >> pool == 10
    assert sky.function(functools.partial(pow, 2))(5) >> pool == 32
    assert sky.function(len)([1, 2]) >> pool == 2
    assert outer(1) >> pool == (18, 18), "on the rank it runs at once"


def test_the_decorator_keeps_name_and_documentation() -> None:
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert sky.compute is sky.function


def test_decorators_control_whose_output_is_shown(
    pool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    @sky.function
    def speak() -> None:
        print("from", sky.instance_info().rank)

    @sky.function
    @sky.stdout(only="head")
    def head() -> None:
        print("from", sky.instance_info().rank)

    speak() @ pool
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{n}] from {n}" for n in range(4)]
    head() @ pool
    assert capsys.readouterr().out.splitlines() == ["[0] from 0"]
    speak() >> pool
    assert capsys.readouterr().out.startswith("from ")
    add(1) @ pool
    assert capsys.readouterr().out == "", "a value is not printed"


# ------------------------------------------------------------------------------------------------- arguments


def test_arguments_are_sent_again_with_each_call(pool: Any) -> None:
    @sky.function
    def spoil(values: list[int], array: Any) -> tuple[list[int], float]:
        values.append(1)
        array += 1
        return values, float(array.sum())

    values, array = [0], np.zeros(1000)
    for _ in range(2):
        assert spoil(values, array) @ pool == [([0, 1], 1000.0)] * 4
    assert values == [0]

    @sky.function
    def left() -> list[str]:
        import IPython

        return [name for name in IPython.get_ipython().user_ns if name.startswith("_sky")]

    assert left() @ pool == [["_sky_call"]] * 4  # this call's own


def test_a_large_argument_is_written_once(pool: Any) -> None:
    @sky.function
    def total(array: Any) -> float:
        return float(array.sum())

    array = np.ones(3_000_000)
    sizes = []
    for _ in range(2):
        spec = task.spec_of(total(array), (0, 1, 2, 3))
        pool.pool.runs.run(spec, workers.LockedScreen([0, 1, 2, 3]), Limits(), StopSignal())
        sizes.append(pool.pool.shipper.prepare(spec.source, spec.ranks, extra=spec.extra).nbytes)
    assert max(sizes) < 100_000
    array[0] = 2
    assert total(array) @ pool == [3_000_001.0] * 4


def test_the_same_array_twice_is_one_array_on_the_ranks(pool: Any) -> None:
    @sky.function
    def same(a: Any, b: Any) -> bool:
        return a is b

    array = np.ones(10)
    assert same(array, array) >> pool
    assert not same(array, array.copy()) >> pool


def test_a_refusal_names_the_argument_and_nothing_runs(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"argument mine \(thread.lock"):
        meet(str(tmp_path), threading.Lock()) >> pool
    with (
        open(os.devnull) as file,
        pytest.raises(CaptureError, match=r"argument x \(io.TextIOWrapper"),
    ):
        sky.function(lambda x: x)(x=file) >> pool
    assert not list(tmp_path.iterdir())


def test_unpicklable_result_is_unavailable(pool: Any) -> None:
    @sky.function
    def lock() -> Any:
        return threading.Lock()

    with pytest.raises(ResultError, match="ranks 0–3: "):
        lock() @ pool


# ---------------------------------------------------------------------------------------------------- errors


class Odd(Exception):
    """A problem of this module's own."""


@pytest.mark.parametrize("problem", [ValueError("planted"), KeyError("k"), Odd("own")], ids=repr)
def test_exceptions_keep_their_type(pool: Any, problem: Exception) -> None:
    with pytest.raises(type(problem)) as caught:
        fail(2, problem) @ pool
    assert isinstance(caught.value, sky.errors.RankError)
    assert caught.value.rank == 2
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.args == problem.args
    assert any("raise problem" in note for note in caught.value.__notes__)
    assert rank() @ pool == [0, 1, 2, 3]


def test_the_first_failure_stops_the_others(pool: Any) -> None:
    @sky.function
    def quickly() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        (hang() & quickly() & hang()) >> pool
    with pytest.raises(ValueError, match="planted"):
        pool.map(lambda n: quickly() if n == 3 else hang(), range(10))
    assert rank() @ pool == [0, 1, 2, 3]


def test_a_timeout_of_one_call_leaves_the_others_alone(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(RunTimeout, match="hang"):
        hang().with_timeout(0.2) >> pool
    with pytest.raises(RunTimeout):
        hang.with_timeout(0.2)() @ pool
    with pytest.raises(RunTimeout):
        sky.function(timeout=0.2)(hang.local)() >> pool
    assert add(1).with_timeout(60) >> pool == 18


@pytest.mark.parametrize("seconds", [0, -1, "5", None, True])
def test_a_timeout_is_a_time(seconds: Any) -> None:
    with pytest.raises(ValueError, match="seconds"):
        add(1).with_timeout(seconds)


def test_dead_rank_is_replaced_during_other_calls(pool: Any, tmp_path: Path) -> None:
    @sky.function
    def die(folder: str) -> None:
        import time

        while not Path(folder, "began").exists():
            time.sleep(0.01)  # another process makes the file: no event
        os.kill(os.getpid(), signal.SIGKILL)

    found: list[Any] = []
    folder = str(tmp_path)
    thread = threading.Thread(target=lambda: found.append(meet(folder, "began", "after") >> pool))
    thread.start()
    with pytest.raises(RankDied, match="SIGKILL"):
        die(folder) >> pool
    Path(folder, "after").touch()
    thread.join(60)
    assert len(found) == 1
    assert rank() @ pool == [0, 1, 2, 3]


MISTAKES: dict[str, tuple[Any, str]] = {
    "not called": (lambda pool: add @ pool, r"write add\(…\) @ pool"),
    "not called, one": (lambda pool: add >> pool, r"add\(…\) >> pool"),
    "no pool": (lambda pool: add(1) @ 3, "needs a pool on its right, not 3"),
    "the wrong parentheses": (lambda pool: add(1) & (add(2) >> pool), r"\(a\(\) & b\(\)\) >> pool"),
    "too few arguments": (lambda pool: add(), "missing a required argument: 'a'"),
    "an unknown argument": (lambda pool: add(1, d=4), "unexpected keyword argument 'd'"),
    "lazy twice": (lambda pool: sky.function(add), "is already lazy"),
    "a class": (lambda pool: sky.function(Odd), "decorates a function"),
    "no function": (lambda pool: sky.function(3), "decorates a function"),
    "output control above": (lambda pool: sky.stdout(only="head")(add), "must be outermost"),
    "silent above": (lambda pool: sky.silent(add), "must be outermost"),
    "an integration above": (lambda pool: sky.integrations.torch(add), "must be outermost"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_suggest_the_correct_form(pool: Any, name: str) -> None:
    wrong, words = MISTAKES[name]
    with pytest.raises(TypeError, match=words):
        wrong(pool)


# ----------------------------------------------------------------------------------------------------- pools


def test_a_pool_ends_with_its_block_and_can_be_started_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    compute = sky.Compute(nodes=1, timeout=0.3, console=False)
    with pytest.raises(PoolStateError, match="not started"):
        add(1) @ compute
    assert repr(compute) == "<Compute, not started>"
    with compute as pool:
        assert pool is compute
        assert rank().with_timeout(60) @ pool == [0]
        with pytest.raises(RunTimeout):
            hang() >> pool
        first = pool.pool
    assert "starting" not in capsys.readouterr().err
    assert first.state is State.STOPPED
    with pytest.raises(PoolStateError, match="stopped"):
        add(1) @ compute
    compute.start().start()
    assert compute.pool is not first
    assert rank().with_timeout(60) @ compute == [0]
    compute.stop()
    compute.stop()
    assert compute.pool.state is State.STOPPED


def test_named_pool_is_reused_and_ends_if_its_block_fails(pool: Any) -> None:
    def fails() -> None:
        with sky.ComputePool(name="shared", nodes=1) as first:
            made.append(first.pool)
            assert first.pool is not pool.pool
            assert sky.find("shared").pool is sky.find().pool is first.pool
            with sky.Compute(name="shared") as second:
                assert second.pool is first.pool
            assert (rank() @ first, rank() @ pool) == ([0], [0, 1, 2, 3])
            assert sky.find("shared").map(add, [1]) == [18]
            with (
                raises(RequestError, "request", "it has 1 rank, not 2"),
                sky.Compute(name="shared", nodes=2),
            ):
                pass
            raise ZeroDivisionError

    made: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        fails()
    assert made[0].state is State.STOPPED
    with raises(PoolError, "no-pool", "'shared'"):
        sky.find("shared")


def test_all_mistakes_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        sky.Compute(
            nodes=0,
            procs_per_node=True,
            accelerator="A1000",
            plugins=["torhc"],
            cpus="few",
            idle="soon",
        )
    text = str(caught.value)
    for word in (
        "nodes: 0",
        "procs_per_node: True",
        "did you mean 'A100'",
        "did you mean 'torch'",
        "cpus:",
        "idle:",
    ):
        assert word in text


def test_accelerators() -> None:
    kinds = sky.accelerators
    found = [
        sky.Compute(accelerator=given)._request.gpu
        for given in ("A100", "a100:8", kinds.T4(), kinds.T4, kinds.A100(count=4))
    ]
    assert [(one and (one.name, one.count)) for one in found] == [
        ("A100", 1),
        ("A100", 8),
        ("T4", 1),
        ("T4", 1),
        ("A100", 4),
    ]


def test_missing_accelerator_suggests_a_provider() -> None:
    with (
        raises(RequestError, "request", "--provider ssh"),
        sky.Compute(accelerator="B300:8"),
    ):
        pass


def test_providers_set_fields_of_the_request() -> None:
    assert sky.Compute()._request.provider == "auto"
    assert sky.Compute(provider="local")._request.provider == "local"
    assert sky.Compute(provider=sky.Local())._request.provider == "local"
    assert sky.Compute(provider=sky.SSH(["a", "b"]))._request.hosts == ("a", "b")
    assert sky.Compute(provider=sky.SSH("a", "b"))._request.hosts == ("a", "b")
    aws = sky.Compute(provider=sky.AWS(region="eu-central-1", spot=True), nodes=2)._request
    assert (aws.provider, aws.region, aws.spot, aws.nodes) == ("aws", "eu-central-1", True, 2)
    assert sky.Compute(provider=sky.Slurm())._request.provider == "slurm"
    assert sky.Compute(provider=sky.AWS(subnet="subnet-1"))._request.cloud.subnet == "subnet-1"
    slurm = sky.Compute(
        provider=sky.Slurm(partition="gpu", time="4h", exclusive=True, options={"mem": "0"})
    )._request
    assert slurm.slurm == (("partition", "gpu"), ("time", "4h"), ("exclusive", ""), ("mem", "0"))


def test_times_and_amounts() -> None:
    asked = sky.Compute(idle="30m", max_lifetime=60, cpus="8+", memory=32)._request
    assert (asked.idle, asked.max_lifetime) == (1800.0, 60.0)
    assert (str(asked.cpus), str(asked.memory)) == ("8+", "32")


# --------------------------------------------------------------------------------------------------- plugins


def test_variables_images_and_plugin_hooks_reach_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    folder = str(tmp_path)

    def note(text: str) -> None:
        with Path(folder, "notes").open("a") as file:
            file.write(text + "\n")

    @contextmanager
    def around_app(info: Any) -> Iterator[None]:
        os.environ["GREETING"] = f"{os.environ['GREETS']} {info.rank} of {info.world_size}"
        note(f"enter {info.rank}")
        try:
            yield
        finally:
            note(f"leave {info.rank}")

    @contextmanager
    def around_client(pool: Any) -> Iterator[None]:
        note(f"client {sky.function(lambda: os.environ['GREETING'])() @ pool}")
        yield
        note("client gone")

    plugins = [
        Plugin(
            name="greeter",
            transform=lambda image, cluster: image.replace(
                env={**image.env, "GREETS": f"hello {cluster.nodes}"}
            ),
            around_app=around_app,
            around_client=around_client,
        ),
        *(
            broken(hook, hook) for hook in ("release", "rejoin", "joined")
        ),  # of a rank after a failure
    ]
    read = sky.function(lambda: os.environ["GREETING"])
    monkeypatch.setenv("HIDDEN_TOKEN", "tell nobody")
    image, variables = sky.Image(env={"FROM_IMAGE": "yes"}), {"FROM_POOL": "too"}
    with sky.Compute(
        nodes=2, plugins=plugins, image=image, env=variables, secrets=["HIDDEN_TOKEN"]
    ) as pool:
        assert read() @ pool == ["hello 2 0 of 2", "hello 2 1 of 2"]
        assert "plugins: greeter" in repr(pool)
        given = sky.function(
            lambda: [os.environ[name] for name in ("FROM_IMAGE", "FROM_POOL", "HIDDEN_TOKEN")]
        )
        assert given() @ pool == [["yes", "too", "tell nobody"]] * 2
        assert "tell nobody" not in repr(pool) + repr(pool.plan) + pool.plan.text()
        with pytest.raises(ValueError, match="planted"):
            fail(1, ValueError("planted")) @ pool
        assert rank() @ pool == [0, 1], "plugins that fail beside a failing cell do not matter"
    notes = Path(folder, "notes").read_text().splitlines()
    assert sorted(notes[:2]) == ["enter 0", "enter 1"]
    assert notes[2] == "client ['hello 2 0 of 2', 'hello 2 1 of 2']"
    end = notes.index("client gone")  # a rank whose plugins have failed is started again before
    assert sorted(notes[end + 1 :]) == ["leave 0", "leave 1"]


def broken(hook: str, name: str = "broken") -> Plugin:
    def fails(*_: Any) -> Any:
        raise LookupError("planted in the plugin")

    hooks: dict[str, Any] = {hook: fails}
    return Plugin(name=name, **hooks)


def test_a_plugin_that_fails_while_planning() -> None:
    with raises(RequestError, "request", r"'broken'.*LookupError: planted"):
        sky.Compute(plugins=[broken("transform")]).start()


def test_a_plugin_that_fails_in_the_notebook_ends_the_pool() -> None:
    with pytest.raises(LookupError, match="planted") as caught:
        sky.Compute(name="broken", plugins=[broken("around_client")]).start()
    assert "the plugin 'broken' in around_client" in caught.value.__notes__[0]
    with pytest.raises(PoolError):
        sky.find("broken")


def test_a_plugin_that_cannot_travel_is_refused() -> None:
    lock = threading.Lock()
    plugin = Plugin(name="locked", around_app=lambda info: lock)
    with pytest.raises(RequestError, match="the plugin 'locked' cannot be sent"):
        sky.Compute(plugins=[plugin]).start()


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        (["joblib", "joblib"], "'joblib' is asked for twice"),
        ([sky.plugins.joblib(), "joblib"], "'joblib' is asked for twice"),
        ([sky.plugins.joblib], "write it with parentheses"),
        ([3], "3 is not a plugin"),
        (["torch:version=2.99"], None),
    ],
    ids=[
        "twice",
        "twice, once a name",
        "no parentheses",
        "a number",
        "a version that is not there",
    ],
)
def test_plugins_that_are_refused(plugins: list[Any], words: str | None) -> None:
    with pytest.raises(RequestError, match=words or "torch==2.99"):
        sky.Compute(plugins=plugins).start()


# --------------------------------------------------------------------------------------------------- scripts


SCRIPT = """
import os, sys, time, skymagic as sky
from beside import triple

OFFSET = 100

class Net:
    def forward(self, x):
        return triple(x) + OFFSET

@sky.function
def predict(net, x):
    return net.forward(x) + sky.instance_info().rank

@sky.function
def hang(n):
    print("began", flush=True)
    time.sleep(600)

@sky.function
def train():
    raise ValueError("no data")

pool = sky.Compute(nodes=2).start()
try:
    pool.map(hang, range(9))
except KeyboardInterrupt as stopped:
    print(type(stopped).__name__)
print(predict(Net(), 1) @ pool)
print(pool.map(triple, [1, 2, 3]))
print(*(sky.function(os.getpid)() @ pool))
train() @ pool
"""


def test_interrupted_script_shows_output_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "beside.py").write_text("def triple(x):\n    return 3 * x\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    child = subprocess.Popen(
        [sys.executable, "script.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert child.stdout is not None
    try:
        lines = [child.stdout.readline() for _ in range(2)]
        assert all("began" in line for line in lines)
        child.send_signal(signal.SIGINT)  # it stops all calls
        out, err = child.communicate(timeout=100)
    finally:
        child.kill()
    *_, stopped, first, second, pids = out.splitlines()
    assert (stopped, first, second) == ("RunInterrupted", "[103, 104]", "[3, 6, 9]")
    assert child.returncode == 1
    assert "ValueError: no data" in err
    assert 'raise ValueError("no data")' in err.partition("no data\n")[2]
    assert not any(Path("/proc", pid).exists() for pid in pids.split())


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: sky.Compute(plugin="torch"), "sky.Compute takes no 'plugin'; did you mean 'plugins'?"),
        (lambda: sky.ComputePool(node=2), "sky.Compute takes no 'node'; did you mean 'nodes'?"),
        (lambda: sky.Compute(gpus="A100", idel=3), "sky.Compute takes no 'gpus': write accelerator; sky.Compute takes no 'idel'; did you mean 'idle'?"),
        (lambda: sky.Image(packages=["torch"]), "sky.Image takes no 'packages': write pip"),
        (lambda: sky.Image(pips=["torch"]), "sky.Image takes no 'pips'; did you mean 'pip'?"),
        (lambda: sky.SSH(hosts=["a"]), "sky.SSH takes no 'hosts': write the names alone, as in sky.SSH("),
        (lambda: sky.AWS(regoin="eu"), "sky.AWS takes no 'regoin'; did you mean 'region'?"),
        (lambda: sky.Local(nodes=2), "sky.Local takes no 'nodes'; it takes detached"),
        (lambda: sky.Slurm(partion="gpu"), "sky.Slurm takes no 'partion'; did you mean 'partition'?"),
        (lambda: sky.accelerators.A100(cout=8), "an accelerator takes no 'cout'; did you mean 'count'?"),
        (lambda: sky.plugins.torch(backnd="gloo"), "sky.plugins.torch takes no 'backnd'; did you mean 'backend'?"),
        (lambda: sky.function(time=3), "@sky.function takes no 'time'; did you mean 'timeout'?"),
    ],
)  # fmt: skip
def test_unknown_keyword_suggests_the_nearest(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(TypeError) as refused:
        call()
    assert str(refused.value).startswith(told)


def test_keywords_are_still_known_to_editors() -> None:
    assert "plugins" in inspect.signature(sky.Compute).parameters
    assert "pip" in inspect.signature(sky.Image).parameters


def test_ranks_are_those_of_one_node() -> None:
    request = sky.Compute(ranks=2)._request
    assert (request.nodes, request.procs_per_node) == (1, 2)
    for wrong in ({"ranks": 2, "nodes": 2}, {"ranks": 2, "provider": sky.SSH("a")}, {"ranks": 0}):
        with pytest.raises(RequestError, match="ranks"):
            sky.Compute(**wrong)


# ------------------------------------------------------------------------------------------ what the magics do, as methods

settled = [1, 2, 3]


def test_cells_and_variables(pool: Any) -> None:
    assert pool.run_cell("import os\nmine = int(os.environ['RANK'])\nmine + len(settled)") == [
        3,
        4,
        5,
        6,
    ]
    assert pool.run_cell("mine", targets=[1, 3]) == [1, 3]
    assert pool.pull("mine") == [0, 1, 2, 3]
    assert pool.pull("mine", "settled", targets="2:") == ([2, 3], [[1, 2, 3]] * 2)
    pool.push("settled", targets=0)
    assert pool.run_cell("settled.append(4)\nlen(settled)", 0) == [4]
    with pytest.raises(ResultError, match="minn.*did you mean 'mine'"):
        pool.pull("minn")
    with pytest.raises(RunTimeout):
        pool.run_cell("import time\ntime.sleep(600)", timeout=0.5)
    with pytest.raises(ZeroDivisionError):
        pool.run_cell("1 / 0")


def test_files(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("text")
    pool.put(str(tmp_path / "here.txt"), str(tmp_path / "there.txt"))
    pool.get(str(tmp_path / "there.txt"), str(tmp_path / "back.txt"), nodes="head")
    assert (tmp_path / "back.txt").read_text() == "text"
    with pytest.raises(RequestError, match="node 7"):
        pool.put(str(tmp_path / "here.txt"), "x", nodes=7)


def test_pools_are_listed_and_complete(pool: Any) -> None:
    assert [one.name for one in sky.pools()][-1] == pool.name
    public = set(dir(pool))
    assert {
        "run_cell",
        "push",
        "pull",
        "put",
        "get",
        "map",
        "clone",
        "logs",
        "metrics",
        "restart",
    } <= public
    assert all(hasattr(pool, name) for name in public)
    assert not {name for name in public if name.startswith("_")} | (
        public & {"resources", "recovery", "shipper", "agents"}
    )
    shown = inspect.signature(sky.Compute).parameters
    assert {"procs_per_node", "console", "timeout"} <= set(shown)
    assert not {"vcpus", "memory_gb"} & set(shown)
    assert (
        sky.Compute(vcpus=2, memory_gb=4)._request == sky.Compute(cpus="2+", memory="4+")._request
    )
