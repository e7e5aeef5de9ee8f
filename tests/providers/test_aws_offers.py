"""Offers, asked of EC2 over HTTP: prices as they are told, and what goes on where they are not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.errors import CloudError, RequestError
from skymagic.plan.accelerators import Accelerator
from skymagic.plan.requests import PoolRequest
from skymagic.plan.units import at_least
from skymagic.pool import launch
from skymagic.providers.aws import market
from skymagic.providers.aws.cache import Cache
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.market import Market
from skymagic.providers.aws.selection import MachineOffer
from tests.lab import ec2 as lab
from tests.lab.ec2 import EC2, ec2, unreached
from tests.lab.ec2_prices import EC2Market
from tests.lab.raising import raises

LISTED = {
    "p4d.24xlarge": 21.957642,
    "p4de.24xlarge": 27.447075,
    "g5.xlarge": 1.006,
    "g5.2xlarge": 1.212,
    "m7i.large": 0.1008,
    "m6a.large": 0.0864,
}
SPOT = {("p4d.24xlarge", "us-east-1b"): 9.10, ("p4d.24xlarge", "us-east-1d"): 8.90}
EIGHT = PoolRequest(nodes=4, gpu=Accelerator("A100", 8))
HOUR = 3600.0


class Clock:
    """Seconds since 1970, as the test says."""

    now = 1_795_000_000.0

    def __call__(self) -> float:
        return self.now


def find(request: PoolRequest, clients: AwsClients, cache: Cache) -> tuple[MachineOffer, ...]:
    """The offers that are tried, in their order."""
    return market.offers_to_try(request, market.survey(request, clients, cache))


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[EC2]:
    for name, value in lab.CREDENTIALS.items():
        monkeypatch.setenv(name.upper(), value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with ec2() as made:
        yield made


@pytest.fixture
def there(cloud: EC2) -> EC2Market:
    return EC2Market(cloud, LISTED, SPOT)


@pytest.fixture
def clients(cloud: EC2) -> AwsClients:
    return AwsClients(endpoint_url=cloud.url, deadline_factor=0.02)


@pytest.fixture
def kept(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", Clock())


def told(found: Market) -> list[tuple[str, str, float | None, str]]:
    return [(one.instance_type, one.zone, one.price, one.priced) for one in found.offers]


def test_offers_in_each_zone_with_the_price_list(
    there: EC2Market, clients: AwsClients, kept: Cache
) -> None:
    found = market.survey(EIGHT, clients, kept)
    date = "price list of 2026-11-18"
    assert told(found) == [
        *(("p4d.24xlarge", f"us-east-1{zone}", 21.957642, date) for zone in "abcd"),
        *(("p4de.24xlarge", f"us-east-1{zone}", 27.447075, date) for zone in "bc"),
    ]
    assert found.notes == ()
    best = found.offers[0]
    assert (best.gpu, best.gpus, best.network, best.cards, best.efa) == ("A100", 8, 400.0, 4, True)
    assert find(EIGHT, clients, kept)[0] == best


def test_spot_prices_are_the_latest_of_linux_in_each_zone(
    there: EC2Market, clients: AwsClients, kept: Cache
) -> None:
    found = market.survey(
        PoolRequest(nodes=2, gpu=Accelerator("A100", 8), spot=True), clients, kept
    )
    assert [(one.zone, one.price) for one in found.offers if one.price] == [
        ("us-east-1d", 8.90),
        ("us-east-1b", 9.10),
    ]
    assert all(one.spot for one in found.offers)
    chosen = find(PoolRequest(nodes=2, gpu=Accelerator("A100", 8), spot=True), clients, kept)
    assert [one.zone for one in chosen] == ["us-east-1d", "us-east-1b"], (
        "where nobody tells the price nothing is rented instead"
    )


def test_several_regions_are_one_table(there: EC2Market, clients: AwsClients, kept: Cache) -> None:
    request = PoolRequest(nodes=2, gpu=Accelerator("A100", 8), region="us-west-2,us-east-1")
    found = market.survey(request, clients, kept)
    assert [one.region for one in found.offers][0] == "us-west-2", (
        "at one price the region that was named first"
    )
    assert {one.region for one in found.offers} == {"us-west-2", "us-east-1"}
    assert {call.region for call in there.cloud.calls if call.action == "GetProducts"} == {
        "us-east-1"
    }


def test_without_price_permission_a_dated_estimate_is_used(
    there: EC2Market, clients: AwsClients, kept: Cache
) -> None:
    there.refuse("GetProducts", "AccessDeniedException")
    found = market.survey(EIGHT, clients, kept)
    assert told(found)[0] == (
        "p4d.24xlarge",
        "us-east-1a",
        21.957642,
        "estimate of 2025-07-01 for us-east-1",
    )
    assert found.notes == ("pricing:GetProducts: no permission",)


def test_unknown_types_have_no_price(there: EC2Market, clients: AwsClients, kept: Cache) -> None:
    there.refuse("GetProducts", "AccessDeniedException")
    found = market.survey(PoolRequest(cpus=at_least("2")), clients, kept)
    assert told(found)[0][0] == "m7i.large"
    assert told(found)[-1][2:] == (None, "")


def test_without_permission_for_spot_prices_spot_has_none(
    there: EC2Market, clients: AwsClients, kept: Cache
) -> None:
    there.refuse("DescribeSpotPriceHistory", "UnauthorizedOperation", 403)
    request = PoolRequest(nodes=2, gpu=Accelerator("A100", 8), spot=True)
    found = market.survey(request, clients, kept)
    assert {one.price for one in found.offers} == {None}
    assert found.notes == ("ec2:DescribeSpotPriceHistory: no permission",)
    assert len(find(request, clients, kept)) == len(found.offers), (
        "and can be had for who does not mind"
    )


def test_without_permission_for_anything_a_built_in_list(
    there: EC2Market, clients: AwsClients, kept: Cache
) -> None:
    for action in ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings"):
        there.refuse(action, "UnauthorizedOperation", 403)
    there.refuse("GetProducts", "AccessDeniedException")
    found = market.survey(EIGHT, clients, kept)
    assert told(found) == [
        ("p4d.24xlarge", "", 21.957642, "estimate of 2025-07-01 for us-east-1"),
        ("p4de.24xlarge", "", 27.447075, "estimate of 2025-07-01 for us-east-1"),
    ]
    assert [note.partition(": ")[0] for note in found.notes] == [
        "ec2:DescribeInstanceTypes",
        "ec2:DescribeInstanceTypeOfferings",
        "pricing:GetProducts",
    ]
    assert all("permission" in note for note in found.notes)
    assert found.notes[0].endswith(" 2025-07-01")


def test_a_price_list_that_does_not_answer(
    there: EC2Market, clients: AwsClients, kept: Cache
) -> None:
    there.does("GetProducts", unreached)
    (note,) = market.survey(EIGHT, clients, kept).notes
    assert note.startswith("pricing:GetProducts: ")
    assert "permission" not in note


@pytest.mark.parametrize("action", ["DescribeInstanceTypes", "GetProducts"])
@pytest.mark.parametrize("code", ["ExpiredToken", "OptInRequired"])
def test_credentials_that_are_refused_are_no_missing_price(
    there: EC2Market, clients: AwsClients, kept: Cache, action: str, code: str
) -> None:
    there.refuse(action, code)
    with pytest.raises(CloudError) as failed:
        market.survey(EIGHT, clients, kept)
    assert failed.value.cloud_code == code


def test_unknown_region_suggests_the_nearest(
    there: EC2Market, cloud: EC2, clients: AwsClients, kept: Cache
) -> None:
    cloud.on("DescribeRegions", lab.regions("us-east-1", "us-west-2"))
    with pytest.raises(RequestError) as refused:
        market.survey(
            PoolRequest(gpu=Accelerator("T4"), region="us-esat-1,us-east-1,moon-1"), clients, kept
        )
    nearest, far = refused.value.mistakes
    assert "'us-esat-1'" in nearest
    assert "'us-east-1'?" in nearest
    assert far.endswith("'moon-1'")


# ---------------------------------------------------------------------------------------------------------- cache


def asked(cloud: EC2) -> list[str]:
    said = sorted({call.action for call in cloud.calls})
    cloud.calls.clear()
    return said


def test_answers_are_kept_with_their_date(
    there: EC2Market, clients: AwsClients, tmp_path: Path
) -> None:
    clock = Clock()
    kept = Cache(tmp_path, clock)
    first = market.survey(EIGHT, clients, kept)
    assert asked(there.cloud) == [
        "DescribeInstanceTypeOfferings",
        "DescribeInstanceTypes",
        "GetProducts",
    ]
    clock.now += 2 * HOUR
    assert market.survey(EIGHT, clients, Cache(tmp_path, clock)) == first
    assert asked(there.cloud) == []
    clock.now += 25 * HOUR
    market.survey(EIGHT, clients, kept)
    assert "DescribeInstanceTypes" in asked(there.cloud)
    there.refuse("GetProducts", "AccessDeniedException")
    clock.now += 300 * HOUR
    old = market.survey(EIGHT, clients, kept)
    assert told(old)[0][3].endswith(" 2026-11-18"), (
        "an old price with its date is better than an estimate"
    )


def test_spot_prices_are_kept_for_minutes(
    there: EC2Market, clients: AwsClients, tmp_path: Path
) -> None:
    clock = Clock()
    request = PoolRequest(gpu=Accelerator("A100", 8), spot=True)
    for after, again in ((0.0, True), (500.0, False), (200.0, True)):
        clock.now += after
        market.survey(request, clients, Cache(tmp_path, clock))
        assert ("DescribeSpotPriceHistory" in asked(there.cloud)) is again


@pytest.mark.parametrize("text", ["", "{", "[]", '{"at": "soon", "value": 1}', '{"value": []}'])
def test_damaged_cache_file_is_fetched_again(tmp_path: Path, text: str) -> None:
    kept = Cache(tmp_path, Clock())
    assert kept.fresh("types-us-east-1", HOUR, lambda: {"a": 1}).value == {"a": 1}
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert kept.fresh("types-us-east-1", HOUR, lambda: {"a": 2}).value == {"a": 2}
    assert json.loads(file.read_text())["value"] == {"a": 2}
    assert list(tmp_path.iterdir()) == [file]


def test_wrong_clock_does_not_keep_an_answer_forever(tmp_path: Path) -> None:
    clock = Clock()
    kept = Cache(tmp_path, clock)
    kept.fresh("x", HOUR, lambda: "from the future")
    clock.now -= 1000 * HOUR
    assert kept.fresh("x", HOUR, lambda: "now").value == "now"


def test_unwritable_cache_does_not_prevent_an_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Cache(tmp_path / "file" / "cache").fresh("x", HOUR, lambda: 1).value == 1


def test_names_that_are_no_file_names_stay_apart(tmp_path: Path) -> None:
    kept = Cache(tmp_path, Clock())
    for name in ("../x", "a/b", "a_b", "a:b", "x" * 300, "x" * 301):
        assert kept.fresh(name, HOUR, lambda name=name: name).value == name  # type: ignore[misc]
        assert kept.fresh(name, HOUR, lambda: "another").value == name
    assert len(list(tmp_path.iterdir())) == 6


def test_regions_profiles_and_endpoints_have_files_of_their_own(
    there: EC2Market, clients: AwsClients, tmp_path: Path
) -> None:
    market.survey(
        PoolRequest(gpu=Accelerator("T4"), region="us-east-1,eu-west-1"),
        clients,
        Cache(tmp_path, Clock()),
    )
    named = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("types"))
    assert [name.partition("-127.0.0.1")[0] for name in named] == [
        "types-eu-west-1",
        "types-us-east-1",
    ]


def test_preview_without_credentials_uses_built_in_prices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in lab.CREDENTIALS:
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = launch.plan_of(replace(EIGHT, dry_run=True), print).text()
    assert "aws: 4 × p4d.24xlarge (8 × A100) in us-east-1, on demand" in plan
    assert "$87.83 per hour (estimate of 2025-07-01 for us-east-1)" in plan
    assert re.search(r"unknown: .*\bAWS credentials\b", plan)
    with raises(RequestError, "request", "AWS"):
        launch.plan_of(EIGHT, print)
