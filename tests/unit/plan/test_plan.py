"""Requests, the units they are written in, accelerators by name, and what becomes of a request on a machine."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.errors import RequestError
from skymagic.plan import accelerators
from skymagic.plan.accelerators import KINDS, NAMES, Accelerator, canonical
from skymagic.plan.gpus import GpuDevice, devices_by_name
from skymagic.plan.image import Image
from skymagic.plan.planning import fits, plan
from skymagic.plan.plans import Plan, Topology, topology
from skymagic.plan.requests import PluginSpec, PoolRequest, RunRequest, plugin_specs
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import AtLeast, Selection, at_least, count, duration, duration_text, memory
from tests.lab.golden import Golden
from tests.surfaces import BOX as BIG
from tests.surfaces import LAPTOP as SMALL


def ranks(text: str, world_size: int) -> tuple[int, ...]:
    return Selection(text).ranks(world_size)


def numbers(devices: Iterable[Iterable[GpuDevice]]) -> list[list[int]]:
    return [[one.index for one in node] for node in devices]


def refused(call: Any, *args: Any) -> list[str]:
    with pytest.raises(RequestError) as mistakes:
        call(*args)
    return list(mistakes.value.mistakes)


# ----------------------------------------------------------------------------------------------------- durations


def test_durations() -> None:
    read = {
        "90": 90, "10m": 600, "1h30m": 5400, "2d": 172800, "1d2h3m4s": 93784, "0.5h": 1800, " 1H 30M ": 5400,
        "1.5": 1.5, "30s": 30, "5 min": 300, "2hours": 7200, "1 hour 30 minutes": 5400, "1 day": 86400, "10 secs": 10,
    }  # fmt: skip
    assert {text: duration(text) for text in read} == read
    written = {90: "1m30s", 600.0: "10m", 5400: "1h30m", 172800: "2d", 0.5: "0.5s", 86461: "1d1m1s"}
    assert {seconds: duration_text(seconds) for seconds in written} == written


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        pytest.param("9" * 400, id="400 digits"),
        "1h 30",
        *"soon 10x m 30m1h 1h1h -1 -5m 1e9 inf nan 1,5 ٣ 0x10".split(),
    ],
)
def test_no_duration(golden: Golden, text: str) -> None:
    (mistake,) = refused(duration, text)
    golden(mistake)
    assert "1h30m" in mistake, "it says how to write one"


@pytest.mark.parametrize("text", ["0", "0s", "0h0m", "0.0"])
def test_a_duration_of_nothing(text: str) -> None:
    assert "more than 0" in refused(duration, text)[0]


@given(st.integers(1, 10**9) | st.integers(1, 10**10).map(lambda n: n / 1000))
def test_durations_survive_writing_and_reading(seconds: float) -> None:
    assert duration(duration_text(seconds)) == seconds


# ------------------------------------------------------------------------------------------------------- amounts


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8+", AtLeast(8, True)),
        ("8", AtLeast(8)),
        ("0.5", AtLeast(0.5)),
        (" 8 + ", AtLeast(8, True)),
    ],
)
def test_amounts(text: str, amount: AtLeast) -> None:
    assert at_least(text) == amount
    assert at_least(str(amount)) == amount


@pytest.mark.parametrize("text", ["32+", "32GB+", "32 gb+", "32GiB+", "32G+"])
def test_memory_in_gb(text: str) -> None:
    assert memory(text) == AtLeast(32, True)


@pytest.mark.parametrize(
    "text", ["", "+", "+8", "-8", "0", "0+", "lots", "8++", "8GB", "1e3", "inf"]
)
def test_no_amount(golden: Golden, text: str) -> None:
    golden(refused(at_least, text)[0])


@pytest.mark.parametrize("text", ["32TB", "GB", "32B"])
def test_no_memory(text: str) -> None:
    assert "GB" in refused(memory, text)[0]


# --------------------------------------------------------------------------------------------------------- ranks


OF_FOUR = {
    (0,): ["head"], (0, 1, 2, 3): ["all", "ALL", "0:4", "::-1", ":"], (2,): ["2"], (0, 2): ["0,2", "2, 0, 2", "::2"], (1, 2): ["1:3"],
    (0, 1): [":2"], (3,): ["-1"], (2, 3): ["-2:"], (0, 2, 3): ["0,2:"],
}  # fmt: skip


def test_ranks_of_four() -> None:
    for chosen, texts in OF_FOUR.items():
        for text in texts:
            assert ranks(text, 4) == chosen, text
            assert Selection(json.loads(json.dumps(Selection(text).text))).ranks(4) == chosen


@pytest.mark.parametrize("text", ["7", "4", "-5", "0:9", "0,7", "-9:2"])
def test_nonexistent_ranks(text: str) -> None:
    (mistake,) = refused(ranks, text, 4)
    assert "4 ranks (0 to 3)" in mistake


def test_slices_of_nothing(golden: Golden) -> None:
    assert "this pool has only rank 0" in refused(ranks, "1:", 1)[0]
    golden(refused(ranks, "2:2", 4)[0])


@pytest.mark.parametrize(
    "text",
    ["", "some", "1.5", "0;2", "0,", ",", "::0", "1:2:3:4", "0x1", "٣", "head,1", "--1", "9" * 50],
)
def test_no_ranks(golden: Golden, text: str) -> None:
    golden(refused(Selection, text)[0])


def test_ranks_as_python_writes_them() -> None:
    assert Selection.of(3) == Selection("3")
    assert Selection.of([0, 2]) == Selection("0,2")
    assert Selection.of("::2") == Selection(" ::2 ")
    assert Selection.of(Selection("all")) == Selection("all")
    assert Selection.of(range(2)).ranks(2) == (0, 1)
    assert refused(Selection.of, [])
    assert refused(Selection.of, ["x"])


@given(st.integers(1, 20), st.data())
def test_slices_are_those_of_python(world: int, data: st.DataObject) -> None:
    end = st.none() | st.integers(-world, world - 1)
    start, stop = data.draw(end), data.draw(end)
    step = data.draw(st.none() | st.integers(-3, 3).filter(bool))
    expected = tuple(sorted(range(world)[slice(start, stop, step)]))
    text = ":".join("" if part is None else str(part) for part in (start, stop, step))
    if expected:
        assert ranks(text, world) == expected
    else:
        assert refused(ranks, text, world)


@given(st.sets(st.integers(0, 99), min_size=1))
def test_a_list_of_ranks_survives_writing_and_reading(chosen: set[int]) -> None:
    assert Selection.of(sorted(chosen)).ranks(100) == tuple(sorted(chosen))


@given(st.text(max_size=20), st.integers(1, 8))
def test_any_text_names_ranks_or_is_refused(text: str, world: int) -> None:
    try:
        chosen = ranks(text, world)
    except RequestError:
        return
    assert chosen
    assert set(chosen) <= set(range(world))


def test_participants_and_displayed_ranks() -> None:
    assert RunRequest().participants(3) == ((0, 1, 2), (0,))
    assert RunRequest(only=Selection("all")).participants(3) == ((0, 1, 2), (0, 1, 2))
    assert RunRequest(targets=Selection("1,2")).participants(3) == ((1, 2), (1,)), (
        "the head is the first that takes part"
    )
    assert RunRequest(targets=Selection("1,2"), only=Selection("0,2")).participants(3) == (
        (1, 2),
        (2,),
    )
    both = refused(RunRequest(targets=Selection("0:9"), only=Selection("7")).participants, 4)
    assert [mistake.split(":")[0] for mistake in both] == ["--targets", "--only"]


# -------------------------------------------------------------------------------------------------- accelerators


def test_every_spelling_stands_for_one_accelerator() -> None:
    spellings = [name for kind in KINDS for name in (kind.name, *kind.aliases)]
    folded = [name.replace("-", "").replace("_", "").casefold() for name in spellings]
    assert len(folded) == len(set(folded))
    for kind in KINDS:
        for spelling in (kind.name, kind.name.lower(), kind.name.replace("-", "_"), *kind.aliases):
            assert canonical(spelling) == kind.name


def test_accelerators_as_text() -> None:
    assert Accelerator.parse("A100:8") == Accelerator("A100", 8)
    assert Accelerator.parse(" a100_80gb : 2 ") == Accelerator("A100-80GB", 2)
    assert Accelerator.parse("t4") == Accelerator("T4")
    assert str(Accelerator.parse("L4:4")) == "L4:4"
    assert (Accelerator("H100").cuda, Accelerator("MI300X").cuda) == (True, False)
    assert Accelerator("A100-80GB").memory == 80


@pytest.mark.parametrize("count", ["0", "-1", "two", "", "1.5", "9" * 30, "8:1"])
def test_no_number_of_accelerators(count: str) -> None:
    assert "NAME:COUNT" in refused(Accelerator.parse, f"A100:{count}")[0]


def test_unknown_accelerators_name_the_nearest(golden: Golden) -> None:
    golden(refused(Accelerator.parse, "a1oo")[0])
    golden(refused(Accelerator.parse, "rtx409")[0])
    assert "available: A10, A100, A100-80GB" in refused(Accelerator.parse, "quantum")[0]
    assert len(refused(Accelerator.parse, "a1oo:0")) == 2, "both mistakes at once"
    assert "at least 1" in refused(Accelerator, "A100", 0)[0]


def test_accelerators_as_constructors(golden: Golden) -> None:
    assert accelerators.A100() == Accelerator("A100")
    assert accelerators.T4(count=2) == Accelerator("T4", 2)
    assert accelerators.A100_80GB(count=8) == Accelerator("A100-80GB", 8)
    assert "A100_80GB" in dir(accelerators)
    assert all(
        getattr(accelerators, name.replace("-", "_"))() == Accelerator(name) for name in NAMES
    )
    with golden.raises(AttributeError):
        _ = accelerators.A1000
    with golden.raises(AttributeError):
        _ = accelerators.nonsense


@given(st.text(max_size=20))
def test_any_text_is_an_accelerator_or_refused(text: str) -> None:
    try:
        found = Accelerator.parse(text)
    except RequestError:
        return
    assert Accelerator.parse(str(found)) == found


def test_suggestions_only_when_near(golden: Golden) -> None:
    golden(did_you_mean("--node", ["--nodes", "--idle"]))
    golden(did_you_mean("-output", ["--output"]))
    assert did_you_mean("xyz", ["--nodes"]) == did_you_mean("", ["--nodes"]) == ""


# ------------------------------------------------------------------------------------------------------- plugins


def test_plugins_as_text() -> None:
    gloo = ("torch", {"backend": "gloo"})
    read: dict[str, list[tuple[str, dict[str, str]]]] = {
        "torch": [("torch", {})],
        "torch,jax": [("torch", {}), ("jax", {})],
        "torch:backend=gloo,cuda=cu124": [("torch", {"backend": "gloo", "cuda": "cu124"})],
        "torch:backend=gloo, jax": [gloo, ("jax", {})],
        "torch:backend=gloo,keras:backend=torch": [gloo, ("keras", {"backend": "torch"})],
        "torch:version=>=2.3,<2.5,vision=latest": [
            ("torch", {"version": ">=2.3,<2.5", "vision": "latest"})
        ],
        "torch:version=": [("torch", {"version": ""})],
        "my-own.plugin_2": [("my-own.plugin_2", {})],
    }
    for text, specs in read.items():
        assert plugin_specs(text) == tuple(PluginSpec(name, options) for name, options in specs)


NO_PLUGINS = {
    "missing": ["", ","],
    "belongs to no plugin": ["backend=gloo", "<=,<"],
    "has no name": [":backend=gloo", "<2", "torch,<2", "to rch"],
    "has no value": ["torch:backend", "torch:", "torch:=gloo"],
    "backend is given twice": ["torch:backend=gloo,backend=nccl"],
}


@pytest.mark.parametrize("word", NO_PLUGINS)
def test_no_plugins(word: str) -> None:
    for text in NO_PLUGINS[word]:
        assert any(word in mistake for mistake in refused(plugin_specs, text)), text


_word = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True)
# an option whose name looks like a secret's is masked where it is written, and cannot be read back
_option = _word.filter(lambda name: not re.search("token|secret|password|key", name, re.IGNORECASE))


@given(
    st.lists(
        st.tuples(
            _word,
            st.dictionaries(
                _option, st.from_regex(r"[A-Za-z0-9./]{0,8}", fullmatch=True), max_size=3
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_plugins_survive_writing_and_reading(parts: list[tuple[str, dict[str, str]]]) -> None:
    specs = tuple(PluginSpec(name, options) for name, options in parts)
    assert plugin_specs(",".join(map(str, specs))) == specs


@given(st.text(alphabet="ab:=,< \u00fc-", max_size=15))
def test_any_text_names_plugins_or_is_refused(text: str) -> None:
    try:
        specs = plugin_specs(text)
    except RequestError:
        return
    assert specs
    assert all(spec.name for spec in specs)


# ------------------------------------------------------------------------------------------------------ requests


def test_stated_fields_of_a_request() -> None:
    assert PoolRequest().stated_fields() == frozenset()
    assert PoolRequest(name="lab", yes=True, dry_run=True).stated_fields() == frozenset()
    assert PoolRequest(nodes=2, idle=60.0).stated_fields() == {"nodes", "idle"}
    assert PoolRequest(nodes=2, idle=60.0, stated=frozenset({"nodes", "name"})).stated_fields() == {
        "nodes"
    }
    assert PoolRequest(idle=60.0, stated=frozenset()).stated_fields() == frozenset()
    assert PoolRequest(provider="auto", stated=frozenset({"provider"})).stated_fields() == {
        "provider"
    }


def test_requests_are_values() -> None:
    request = PoolRequest(
        nodes=2,
        gpu=Accelerator("A100", 8),
        plugins=plugin_specs("torch:backend=gloo"),
        env=(("A", "1"),),
    )
    assert pickle.loads(pickle.dumps(request)) == request
    assert {request: 1}[replace(request)] == 1
    assert {RunRequest(pool=request): 1}
    assert replace(request, stated=frozenset()) == request, (
        "how it came about does not tell requests apart"
    )


def test_the_whole_image() -> None:
    request = PoolRequest(
        image=Image(pip=("numpy",), env={"A": "1"}), pip=("torch==2.3",), env=(("B", "2"),)
    )
    assert request.whole_image() == Image(pip=("numpy", "torch==2.3"), env={"A": "1", "B": "2"})
    clash = replace(request, image=Image(pip=("torch==2.4",)))
    assert "torch" in refused(clash.whole_image)[0]


def test_topology() -> None:
    shape = Topology(nodes=2, procs_per_node=3)
    assert shape.world_size == 6
    assert [shape.node_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [shape.local_rank(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [list(shape.ranks_on(node)) for node in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_requested_ranks() -> None:
    eight = Accelerator("A100", 8)
    for request, shape in (
        (PoolRequest(), Topology(1, 1)),
        (PoolRequest(nodes=4), Topology(4, 1)),
        (PoolRequest(nodes=2, procs_per_node=2), Topology(2, 2)),
        (PoolRequest(nodes=2, gpu=eight), Topology(2, 8)),
        (PoolRequest(gpu=eight, procs_per_node=1), Topology(1, 1)),
    ):
        assert topology(request) == shape


# ---------------------------------------------------------------------------------------------------------- plan


def test_a_plan_for_this_machine() -> None:
    request = PoolRequest(
        name="train", nodes=2, plugins=plugin_specs("torch"), pip=("numpy",), idle=1800.0
    )
    made = plan(request, SMALL)
    assert made == Plan(
        "local", request, Topology(2, 1), Image(pip=("numpy",)), ("laptop",), 4, 16.0
    )
    assert made.price == 0.0
    assert made.devices_of(1) == ()


def test_each_node_takes_its_own_gpus() -> None:
    made = plan(PoolRequest(nodes=2, gpu=Accelerator("A100", 2)), BIG)
    assert numbers(made.devices) == [[0, 1], [2, 3]]
    assert numbers(made.devices_of(rank) for rank in range(4)) == [[0], [1], [2], [3]]
    one = plan(PoolRequest(nodes=2, gpu=Accelerator("A100", 4), procs_per_node=2), BIG)
    assert numbers(one.devices_of(rank) for rank in range(4)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_gpus_among_others() -> None:
    mixed = replace(
        BIG, gpus=devices_by_name("NVIDIA T1000", "NVIDIA L4", "NVIDIA L40S", "NVIDIA L4")
    )
    assert numbers(plan(PoolRequest(gpu=Accelerator("L4", 2)), mixed).devices) == [[1, 3]]


def test_gpus_that_are_not_here(golden: Golden) -> None:
    (mistake,) = refused(plan, PoolRequest(gpu=Accelerator("A100")), SMALL)
    golden(mistake)
    (mistake,) = refused(
        plan, PoolRequest(gpu=Accelerator("H100")), replace(BIG, gpus=devices_by_name("NVIDIA L4"))
    )
    assert "no H100 (it has: NVIDIA L4)" in mistake
    (mistake,) = refused(plan, PoolRequest(nodes=2, gpu=Accelerator("A100", 8)), BIG)
    assert "has 8 A100 of 16" in mistake


def test_gpus_that_ranks_cannot_share(golden: Golden) -> None:
    (mistake,) = refused(plan, PoolRequest(gpu=Accelerator("A100", 4), procs_per_node=3), BIG)
    golden(mistake)


def test_everything_that_is_wrong_at_once(golden: Golden) -> None:
    request = PoolRequest(
        provider="local", nodes=2, gpu=Accelerator("A100"), cpus=at_least("4+"), memory=memory("32"), hosts=("a",),
        region="eu", spot=True, pip=("a==1", "a==2"), image=Image(python="3.9"),
    )  # fmt: skip
    told = "\n".join(refused(plan, request, SMALL))
    said = (
        "no A100",
        "--cpus 4+ for each of 2 ranks",
        "--memory 32",
        "--hosts",
        "--region",
        "--spot",
        "a==1, a==2",
    )
    assert [part for part in said if part not in told] == []
    golden("\n".join(refused(plan, replace(request, pip=()), SMALL)))


def test_the_limits_of_the_machine_are_not_beyond_them() -> None:
    assert plan(PoolRequest(nodes=2, cpus=at_least("2+"), memory=memory("8")), SMALL)
    assert plan(PoolRequest(image=Image(python="3.11.7")), SMALL)


def test_other_providers_are_not_this_machine() -> None:
    (mistake,) = refused(plan, PoolRequest(provider="aws"), SMALL)
    assert "--provider aws" in mistake


def test_the_plan_as_text(golden: Golden) -> None:
    request = PoolRequest(
        "train", nodes=2, gpu=Accelerator("A100", 2), plugins=plugin_specs("torch:backend=gloo"), pip=("torch", "torch>=2.3"),
        env=(("TOKEN", "s3cret"),), secrets=("HF_TOKEN",), idle=1800.0, max_lifetime=28800.0,
    )  # fmt: skip
    golden(plan(request, BIG).text())
    golden(plan(PoolRequest(), SMALL).text())


@pytest.mark.parametrize(
    ("nodes", "procs", "here", "there"),
    [
        (1, 1, "1 rank", "1 node × 1 rank"),
        (2, 1, "2 ranks", "2 nodes × 1 rank"),
        (2, 3, "6 ranks (2 nodes × 3 ranks)", "2 nodes × 3 ranks"),
    ],
)
def test_a_pool_of_this_machine_is_counted_in_ranks(
    nodes: int, procs: int, here: str, there: str
) -> None:
    made = plan(PoolRequest(nodes=nodes, procs_per_node=procs), SMALL)
    assert made.size == here
    assert ("nodes" in made.text()) is (procs > 1)
    assert replace(made, remote=True).size == there
    assert "× " in replace(made, remote=True).text()
    if procs == 1:
        assert fits(PoolRequest(nodes=9), made) == [f"it has {count(nodes, 'rank')}, not 9"]
        assert fits(PoolRequest(nodes=9), replace(made, remote=True)) == [
            f"it has {count(nodes, 'node')}, not 9"
        ]


def test_price_limit_is_shown_with_the_price() -> None:
    assert (
        plan(PoolRequest(max_price=12.5), SMALL).text().endswith("$0.00 per hour (at most $12.50)")
    )


# ---------------------------------------------------------------------------------------------------------- fits

MADE = plan(
    PoolRequest(
        "train", nodes=2, gpu=Accelerator("A100", 2), plugins=plugin_specs("torch:backend=gloo,jax"), pip=("numpy",),
        env=(("A", "1"),), secrets=("TOKEN",), idle=1800.0,
    ),
    BIG,
)  # fmt: skip


@pytest.mark.parametrize(
    "request_",
    [
        PoolRequest(), PoolRequest("other"), PoolRequest(nodes=2), PoolRequest(provider="local"), PoolRequest(procs_per_node=2),
        PoolRequest(provider="auto", stated=frozenset({"provider"})), PoolRequest(gpu=Accelerator("A100", 2)), MADE.request,
        PoolRequest(plugins=plugin_specs("jax")), PoolRequest(plugins=plugin_specs("torch:backend=gloo")),
        PoolRequest(pip=("numpy",)), PoolRequest(env=(("A", "1"),)), PoolRequest(secrets=("TOKEN",)),
        PoolRequest(cpus=at_least("64+")), PoolRequest(memory=memory("8")), PoolRequest(idle=1800.0), PoolRequest(max_price=1.0),
        # configured defaults
        PoolRequest(provider="aws", plugins=plugin_specs("keras"), idle=1.0, stated=frozenset()),
    ],
)  # fmt: skip
def test_a_pool_that_serves(request_: PoolRequest) -> None:
    assert fits(request_, MADE) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nodes": 4}, "it has 2 nodes, not 4"),
        ({"provider": "ssh"}, "it is a local pool, not ssh"),
        ({"gpu": Accelerator("A100", 4)}, "it was made with A100:2, not A100:4"),
        ({"gpu": Accelerator("H100", 2)}, "it was made with A100:2, not H100:2"),
        ({"procs_per_node": 1}, "it has 2 ranks per node, not 1"),
        ({"plugins": plugin_specs("keras")}, "it was made without the plugin keras"),
        (
            {"plugins": plugin_specs("torch:backend=nccl")},
            "its plugin is torch:backend=gloo, not torch:backend=nccl",
        ),
        ({"pip": ("pandas",)}, "it was made without the package pandas"),
        ({"image": Image(apt=("git",))}, "it was made without the system package git"),
        ({"env": (("A", "2"),)}, "it was made without this value of A"),
        ({"secrets": ("OTHER",)}, "it was made without the secret OTHER"),
        ({"cpus": at_least("65+")}, "its nodes have 64 CPUs, not 65+"),
        ({"memory": memory("1000")}, "its nodes have 512 GB, not 1000"),
        ({"hosts": ("a",)}, "its hosts are none, not a"),
        ({"hosts": ("a", "b")}, "its hosts are none, not a, b"),
        ({"slurm": (("time", "2h"),)}, "it was made with slurm none, not time=2h"),
        ({"address": "auto"}, "it was made with address none, not auto"),
        ({"region": "eu"}, "its region is none, not eu"),
        ({"max_lifetime": 60.0}, "its --max-lifetime is none, not 1m"),
        ({"spot": True}, "it was made without --spot"),
        ({"provider": "ssh", "hosts": ("a",), "nodes": 3}, "it is a local pool, not ssh"),
    ],
)
def test_a_pool_that_does_not_serve(changes: dict[str, Any], reason: str) -> None:
    (told,) = fits(PoolRequest(**changes), MADE)
    assert reason in told


def test_all_reasons_are_given() -> None:
    assert (
        len(fits(PoolRequest(nodes=3, procs_per_node=1, pip=("pandas",), secrets=("X",)), MADE))
        == 4
    )
