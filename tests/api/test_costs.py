"""What pools cost: read from files that outlive notebooks, added up by pool."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.api import command, costs
from skymagic.errors import PoolError
from skymagic.plan.renting import Rental, plan_rented
from skymagic.plan.requests import CloudSettings, PoolRequest
from skymagic.providers.aws import ledger
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.ledger import Rent
from skymagic.providers.aws.rented import HeldMachines, RentedSurvey
from skymagic.providers.aws.selection import MachineOffer
from skymagic.providers.aws.tags import Label
from tests.lab.golden import Golden
from tests.lab.raising import raises

HOUR = 3600.0
NOW = 1_800_000_000.0
FIRST = Rent("lab-1", 1, "lab", "m5.large", 2, 4.0, 0.5, NOW - 3 * HOUR, NOW + HOUR, NOW - HOUR)
SECOND = Rent("lab-2", 1, "lab", "m5.large", 2, 4.0, 0.5, NOW - 1 * HOUR, NOW + HOUR)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_the_sum_of_a_pool() -> None:
    found = costs.of([FIRST, SECOND], NOW, {"lab-2"})
    assert (found.per_hour, found.seconds, found.machines, found.beside, found.total, found.exact) == (
        4.5, 3 * HOUR, 12.0, 1.5, 13.5, True,
    )  # fmt: skip
    assert costs.of([FIRST, SECOND], NOW, set()).exact is False, (
        "its notebook is gone: it may have ended since"
    )
    assert costs.of([FIRST, replace(SECOND, ended=NOW, exact=False)], NOW, set()).exact is False
    late = costs.of([SECOND], NOW + 9 * HOUR, set())
    assert (late.per_hour, late.machines) == (0.0, 8.0), (
        "its machines have ended themselves by then"
    )
    assert costs.of([replace(SECOND, price=None)], NOW, set()).total is None


def test_as_a_table(golden: Golden) -> None:
    lab = costs.of([FIRST, SECOND], NOW, set())
    dark = costs.of([replace(FIRST, pool="dark", price=None)], NOW, set())
    rows = costs.text([costs.Cost("main", 0.0, 60.0, 0.0, 0.0), lab, dark]).splitlines()
    assert rows[0].split("  ")[0] == "pool"
    assert rows[1].split() == ["main", "nothing", "1m", "$0.00", "-", "$0.00"]
    assert "$4.50" in rows[2]
    assert "about $1.50" in rows[2]
    assert rows[2].endswith("$13.50 at most")
    assert rows[3].split()[1] == "nothing"
    assert rows[3].endswith("unknown")
    assert rows[4].split() == ["in", "all", "$13.50", "and", "what", "is", "unknown"]
    golden(costs.text([]))


def test_costs_are_kept_for_a_month(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    ledger.write(
        replace(FIRST, job="old-1", pool="old", started=now - 40 * 86400, ended=now - 39 * 86400)
    )
    ledger.write(replace(SECOND, started=now - HOUR, bound=now + HOUR))
    (state / "skymagic/costs/damaged-1.json").write_text("{")
    assert command.main(["status", "--cost", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["pools"]
    assert (found["pool"], found["per_hour"], found["exact"]) == ("lab", 4.5, False)
    assert found["total"] == pytest.approx(4.5, rel=0.01)
    ledger.end("lab-2")
    assert [one.ended is not None for one in ledger.all_rents()] == [True]
    assert sorted(path.name for path in (state / "skymagic/costs").iterdir()) == [
        "damaged-1.json",
        "lab-2-1.json",
    ]
    with raises(PoolError, "no-pool", r"'other'"):
        costs.costs((), "other")
    assert command.main(["status", "--cost", "lab"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["lab", "nothing"]
    assert command.main(["status", "--cost", "other"]) == 1
    assert "skymagic status --cost lists" in capsys.readouterr().err
    assert command.main(["status", "--cost", "--hosts", "gpu1"]) == 2


@pytest.mark.parametrize(
    ("cards", "private", "addresses"), [(1, False, 4), (1, True, 0), (4, False, 1), (4, True, 0)]
)
def test_disks_and_addresses(cards: int, private: bool, addresses: int) -> None:
    label = Label("lab", "lab-1", "me", "ann@laptop", 0.0)
    made = ledger.rent(
        MachineOffer("us-east-1", "a", "m5.large", cards=cards, price=1.0), 4, CloudSettings(use_private_ips=private), label, 1, 400 * ledger.DISK_PRICE
    )  # fmt: skip
    assert made.price == 4.0
    assert made.beside == pytest.approx(4 * 100 * 0.08 / 730 + addresses * 0.005)


def test_plan_shows_the_price_of_the_chosen_machines() -> None:
    """The first offer lacks capacity, and the second one, of another type elsewhere, costs more."""
    rental = Rental(
        "aws",
        "m5.large",
        "us-east-1a, spot",
        "us-east-1",
        2,
        8.0,
        price=0.2,
        priced="spot price of today",
    )
    plan = plan_rented(PoolRequest(provider="aws", nodes=4), rental)
    taken = MachineOffer(
        "us-west-2",
        "us-west-2b",
        "m6i.xlarge",
        price=0.25,
        priced="price list, now",
        vcpus=4,
        memory=16.0,
    )
    nothing = RentedSurvey(plan, AwsClients(), (taken,), None)  # type: ignore[arg-type]
    assert nothing.outcome() == plan
    found = replace(nothing, held=HeldMachines(offer=taken)).outcome()
    assert (found.price, found.priced, found.region) == (1.0, taken.priced, "us-west-2")
    assert found.hosts == ("4 × m6i.xlarge in us-west-2b, on demand",)
    assert (found.cpus, found.memory_gb) == (4, 16.0)
