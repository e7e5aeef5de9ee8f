"""Which machines serve a request, and in what order: pure functions of what EC2 says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.errors import RequestError
from skymagic.plan.accelerators import Accelerator
from skymagic.plan.requests import CloudSettings, PoolRequest
from skymagic.plan.units import AtLeast, at_least
from skymagic.providers.aws import catalogue, selection
from skymagic.providers.aws.catalogue import Catalogue, InstanceType, gpu_name, instance_type, rate
from skymagic.providers.aws.listing import OfferTable
from skymagic.providers.aws.market import FALLBACK_PRICE_FACTOR, Market, offers_to_try
from skymagic.providers.aws.prices import Prices, chunks
from skymagic.providers.aws.selection import (
    MachineOffer,
    by_price,
    matching_types,
    meets,
    offers_of,
    per_hour,
)
from tests.lab import ec2_prices as lab
from tests.lab.golden import Golden

TYPE_NAMES = st.deferred(
    lambda: st.sampled_from(sorted(lab.types()))
)  # moto reads them for a second


@cache
def types() -> dict[str, InstanceType]:
    return {name: instance_type(info) for name, info in lab.types().items()}


def names(request: PoolRequest) -> list[str]:
    return [one.name for one in matching_types(request, types().values())]


def gpu(text: str) -> PoolRequest:
    return PoolRequest(gpu=Accelerator.parse(text))


# ------------------------------------------------------------------------------------------------- what EC2 says


def test_machine_type_is_parsed_from_ec2() -> None:
    assert types()["p4d.24xlarge"] == InstanceType(
        "p4d.24xlarge", "x86_64", 96, 1152.0, gpu="A100", gpus=8, gpu_memory=40.0, network=400.0, cards=4, efa=True
    )  # fmt: skip
    assert types()["g6.xlarge"].gpu_memory == 24.0, "EC2 says 22888 MiB"
    assert types()["t3.large"].general is False, (
        "its processor is held back once its credits are used up"
    )
    assert types()["m7i-flex.large"].general is False
    assert types()["trn1.2xlarge"].accelerated
    assert (types()["g6f.large"].gpu, types()["g6f.large"].accelerated) == (None, True), (
        "an eighth of a GPU is none"
    )
    assert instance_type({"InstanceType": "m1.odd"}) == InstanceType(
        "m1.odd", "x86_64", 0, 0.0, spot=False
    )


@pytest.mark.parametrize(
    ("name", "mib", "canonical"),
    [("A100", 40960, "A100"), ("A100", 81920, "A100-80GB"), ("V100", 16384, "V100"), ("V100", 32768, "V100-32GB"), ("T4g", 16384, "T4G"),
     ("H200", 144384, "H200"), ("B200", 183359, "B200"), ("L40S", 45776, "L40S"), ("RTX PRO 4500", 32768, "RTXPRO4500"), ("RTX PRO 9900", 32768, "RTX PRO 9900")],
)  # fmt: skip
def test_gpus_by_the_names_that_people_write(name: str, mib: int, canonical: str) -> None:
    assert gpu_name(name, mib) == canonical


@pytest.mark.parametrize(
    ("text", "gbits"),
    [
        ("4x 100 Gigabit", 400),
        ("Up to 25 Gigabit", 25),
        ("12.5 Gigabit", 12.5),
        ("3200 Gigabit", 3200),
        ("High", 0),
        ("", 0),
    ],
)
def test_network(text: str, gbits: float) -> None:
    assert rate(text) == gbits


def test_built_in_list_agrees_with_ec2() -> None:
    known = {name: one for name, one in catalogue.TYPES.items() if name in types()}
    assert len(known) >= 50
    # whether a GPU's machine is of this generation matters to nobody
    told = {name: replace(types()[name], general=True) for name in known}
    assert {name: told[name] for name in known if told[name] != known[name]} == {}
    assert all(price > 0 for price in catalogue.PRICES.values())


# --------------------------------------------------------------------------------------------- what serves a request


@pytest.mark.parametrize(
    ("asked", "machines"),
    [
        ("a100:8", ["p4d.24xlarge", "p4de.24xlarge"]),
        ("A100", ["p4d.24xlarge", "p4de.24xlarge"]),
        ("A100-80GB:8", ["p4de.24xlarge"]),
        ("h100", ["p5.4xlarge"]),
        ("H100:2", ["p5.48xlarge"]),
        ("H200:8", ["p5e.48xlarge", "p5en.48xlarge"]),
        ("B200:8", ["p6-b200.48xlarge"]),
        ("t4:4", ["g4dn.12xlarge"]),
        ("L4:8", ["g6.48xlarge"]),
        ("A10G:4", ["g5.12xlarge", "g5.24xlarge"]),
    ],
)
def test_machines_by_their_gpus(asked: str, machines: list[str]) -> None:
    assert names(gpu(asked)) == machines


def test_amounts_narrow_the_machines() -> None:
    assert names(replace(gpu("A10G"), cpus=at_least("32+"))) == ["g5.16xlarge", "g5.8xlarge"]
    assert names(replace(gpu("A10G"), memory=at_least("64"))) == ["g5.4xlarge"]
    assert names(replace(gpu("A10G"), cpus=at_least("16"), memory=at_least("128+"))) == []


def test_without_gpus_the_smallest_available_machine_is_chosen() -> None:
    found = names(PoolRequest())
    assert found[:2] == ["m7a.large", "m7i.large"], "2 CPUs, 8 GB"
    assert not [one for one in found if one.startswith(("t", "m5", "g", "m7i-flex", "x"))]
    assert len(found) == min(selection.MOST_TYPES, len(found))
    assert all(types()[one].vcpus == 16 for one in names(PoolRequest(cpus=at_least("16"))))
    assert min(types()[one].vcpus for one in names(PoolRequest(procs_per_node=8))) >= 8
    assert names(PoolRequest(memory=at_least("1600+"))) == ["x2idn.32xlarge"]


def here() -> Catalogue:
    return Catalogue("us-east-1", types(), dict.fromkeys(types(), ("us-east-1a", "us-east-1b")))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (gpu("A100:16"), "no machine in us-east-1 has 16 × A100: they have 8; take more nodes of fewer GPUs"),
        (gpu("RTX4090"), "no machine in us-east-1 has RTX4090; available: A100, A100-80GB, A10G"),
        (gpu("A10"), "no machine in us-east-1 has A10; did you mean 'A10G'?"),
        (replace(gpu("T4"), cpus=at_least("5")), "no machine in us-east-1 has T4:1 and exactly 5 CPUs: g4dn.xlarge has 4 CPUs and 16 GB"),
        (PoolRequest(cpus=at_least("7")), "no type of machine in us-east-1 has exactly 7 CPUs; write 8+ for at least 8"),
        (PoolRequest(memory=at_least("99999+"), spot=True), "has at least 99999 GB on spot"),
    ],
)  # fmt: skip
def test_impossible_requests_are_explained(request_: PoolRequest, words: str) -> None:
    (told,) = selection.explain_no_offer(request_, {"us-east-1": here()})
    assert words in told


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("Trainium", "ranks run CUDA programs"),
        ("Gaudi", "is not supported"),
        ("T4G", "ARM processors"),
    ],
)
def test_accelerators_that_ec2_has_and_ranks_cannot_use(asked: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        selection.check_served(gpu(asked))


amounts = st.none() | st.builds(
    AtLeast, st.sampled_from([1.0, 2.0, 4.0, 8.0, 16.0, 48.0, 96.0, 192.0]), st.booleans()
)
requests = st.builds(
    PoolRequest,
    nodes=st.none() | st.integers(1, 64),
    gpu=st.none()
    | st.builds(
        Accelerator,
        st.sampled_from(["T4", "L4", "A10G", "L40S", "A100", "A100-80GB", "H100"]),
        st.integers(1, 9),
    ),
    cpus=amounts,
    memory=amounts,
    spot=st.booleans(),
    max_price=st.none() | st.floats(0.01, 500.0),
)
prices = st.builds(
    Prices,
    st.dictionaries(TYPE_NAMES, st.floats(0.001, 100.0), max_size=40),
    st.dictionaries(
        st.tuples(TYPE_NAMES, st.sampled_from(["us-east-1a", "us-east-1b"])), st.floats(0.001, 100.0), max_size=40
    ),
    st.sampled_from(["", "2026-11-22"]),
    st.just("2026-11-22"),
)  # fmt: skip


@given(requests)
def test_each_offer_is_the_smallest_that_meets_the_request(
    request_: PoolRequest,
) -> None:
    found = matching_types(request_, types().values())
    for one in found:
        assert one.architecture == "x86_64"
        assert one.spot if request_.spot else one.on_demand
        assert meets(request_.cpus, one.vcpus)
        assert meets(request_.memory, one.memory)
        if request_.accelerator is None:
            assert one.gpu is None
            assert one.general
        else:
            assert one.gpus >= request_.accelerator.count
            assert one.gpu is not None
            assert one.gpu.partition("-")[0] == request_.accelerator.name.partition("-")[0]
    if request_.accelerator is not None:
        assert len({one.gpus for one in found}) <= 1
        exact = [
            one
            for one in types().values()
            if one.gpu == request_.accelerator.name and one.gpus == request_.accelerator.count
        ]
        if exact and request_.cpus is request_.memory is None:
            assert found[0].gpus == request_.accelerator.count
    else:
        assert found == sorted(
            found, key=lambda one: (one.vcpus, one.memory, -one.generation, one.name)
        )


@given(requests, prices)
def test_cheapest_offers_first_and_unpriced_last(request_: PoolRequest, costs: Prices) -> None:
    found = by_price(offers_of(request_, here(), costs))
    known = [one.price for one in found if one.price is not None]
    assert known == sorted(known)
    assert [one.price for one in found[len(known) :]] == [None] * (len(found) - len(known))
    assert sorted(found, key=repr) == sorted(offers_of(request_, here(), costs), key=repr), (
        "none is lost"
    )
    assert all(bool(one.priced) == (one.price is not None) for one in found)
    if request_.spot:
        assert not [one for one in found if "estimate" in one.priced], "spot is never estimated"


@given(requests, prices)
def test_chosen_offers_are_within_the_limits(request_: PoolRequest, costs: Prices) -> None:
    found = tuple(by_price(offers_of(request_, here(), costs)))
    nodes = request_.nodes or 1
    try:
        chosen = offers_to_try(request_, Market(found))
    except RequestError:
        most = request_.max_price
        assert not found or (
            most is not None
            and not [one for one in found if (p := per_hour(one, nodes)) is not None and p <= most]
        )
        return
    first = per_hour(chosen[0], nodes)
    for one in chosen:
        price = per_hour(one, nodes)
        if request_.max_price is not None:
            assert price is not None
            assert price <= request_.max_price
        elif first is not None:
            assert price is not None
            assert price <= FALLBACK_PRICE_FACTOR * first, (
                "nothing dearer is taken than what was agreed to"
            )


@given(st.lists(TYPE_NAMES, unique=True))
def test_filters_hold_all_names_and_are_not_too_long(some: list[str]) -> None:
    pieces = list(chunks(some))
    assert [name for piece in pieces for name in piece.split(",")] == some
    assert all(len(piece) <= 1024 for piece in pieces)


# --------------------------------------------------------------------------------------------------------- texts

A100 = MachineOffer(
    "us-east-1", "us-east-1b", "p4d.24xlarge", price=21.957642, priced="price list of 2026-11-22", gpu="A100", gpus=8,
    gpu_memory=40.0, vcpus=96, memory=1152.0, network=400.0, cards=4, efa=True,
)  # fmt: skip
CPU = MachineOffer(
    "eu-west-1",
    "",
    "m6a.large",
    spot=True,
    price=0.0003,
    priced="spot price of 2026-11-22",
    vcpus=2,
    memory=8.0,
)
TABLE = """\
per hour  machine         GPUs           GPU memory  CPUs  memory   network     where          price from
$0.0012   m6a.large spot  -              -           2     8 GB     -           eu-west-1      spot price of 2026-11-22
$87.83    p4d.24xlarge    8 × A100       40 GB       96    1152 GB  400 Gbit/s  us-east-1 b d  price list of 2026-11-22
unknown   p4de.24xlarge   8 × A100-80GB  80 GB       96    1152 GB  400 Gbit/s  us-east-1 b    -
per hour: of 4 machines
unknown: pricing:GetProducts: no permission"""


def test_the_table(golden: Golden) -> None:
    unpriced = replace(
        A100, instance_type="p4de.24xlarge", gpu="A100-80GB", gpu_memory=80.0, price=None, priced=""
    )
    market = Market(
        (CPU, A100, replace(A100, zone="us-east-1d"), unpriced),
        ("pricing:GetProducts: no permission",),
    )
    table = OfferTable(market, nodes=4)
    assert table.text() == TABLE
    assert repr(table) == TABLE
    html = table._repr_html_()
    assert html.count("<tr>") == 4
    assert "<td>8 × A100-80GB</td>" in html
    assert "<p>unknown: pricing:GetProducts: no permission</p>" in html
    golden(OfferTable(market, most=1).text())
    assert (
        list(table)
        == table._ipython_key_completions_()
        == ["m6a.large", "p4d.24xlarge", "p4de.24xlarge"]
    )
    assert [one.zone for one in table["p4d.24xlarge"]] == [A100.zone, "us-east-1d"]
    with pytest.raises(KeyError):
        table["p5.48xlarge"]


def test_nothing_in_a_table_is_taken_for_html() -> None:
    market = Market((replace(CPU, instance_type="<b>"),), notes=("<script>",))
    assert "<b>" not in OfferTable(market).html()
    assert "<script>" not in OfferTable(market).html()


def test_a_price_over_the_limit_in_words(golden: Golden) -> None:
    for stated, name in (
        (frozenset({"max_price"}), "--max-price"),
        (frozenset[str](), "%config SkyMagic.max_price"),
    ):
        with pytest.raises(RequestError) as refused:
            offers_to_try(PoolRequest(nodes=4, max_price=40.0, stated=stated), Market((A100,)))
        assert name in str(refused.value)
        golden(str(refused.value))
    with golden.raises(RequestError):
        offers_to_try(PoolRequest(max_price=40.0), Market((replace(A100, price=None),)))


@pytest.mark.parametrize("name", ["V100", "V100-32GB", "M60", "P100"])
def test_gpus_that_the_open_driver_does_not_serve_are_refused(golden: Golden, name: str) -> None:
    """The image's driver has NVIDIA's open kernel module alone, which begins with Turing."""
    request_ = PoolRequest(provider="aws", gpu=Accelerator(name))
    with golden.raises(RequestError):
        selection.check_served(request_)
    selection.check_served(replace(request_, cloud=CloudSettings(image_id="ami-0123456789abcdef0")))
    selection.check_served(PoolRequest(provider="aws", gpu=Accelerator("T4")))
