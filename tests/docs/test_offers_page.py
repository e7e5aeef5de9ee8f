"""docs/how-to/offers.md: its cells run against moto, and its policy allows what was called."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from skymagic.plan.accelerators import Accelerator
from skymagic.plan.renting import IDLE, MAX_LIFETIME
from skymagic.plan.requests import PoolRequest
from skymagic.providers.aws import prices
from skymagic.providers.aws.cache import Cache
from skymagic.providers.aws.catalogue import ESTIMATED, PRICES
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.market import FALLBACK_PRICE_FACTOR, survey
from tests.docs.test_readme import examples, follow
from tests.lab import ec2 as lab
from tests.lab.ec2 import ec2
from tests.lab.ec2_prices import EC2Market
from tests.lab.notebook import ROOT, opened

PAGE = ROOT / "docs" / "how-to" / "offers.md"
TYPES = ("p4d.24xlarge", "p4de.24xlarge")
SPOT = {("p4d.24xlarge", "us-east-1b"): 9.10, ("p4d.24xlarge", "us-west-2b"): 8.90}


def policy() -> set[str]:
    """The actions of the page's policies."""
    blocks = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    statements = [one for block in blocks for one in json.loads(block)["Statement"]]
    return {
        action for one in statements if one["Sid"] == "SkymagicOffers" for action in one["Action"]
    }


def test_its_cells(tmp_path: Path) -> None:
    with ec2() as cloud:
        EC2Market(cloud, {name: PRICES[name] for name in TYPES}, SPOT)
        env = {name.upper(): value for name, value in lab.CREDENTIALS.items()}
        env |= {
            "AWS_ENDPOINT_URL": cloud.url,
            "AWS_CONFIG_FILE": "/dev/null",
            "XDG_CACHE_HOME": str(tmp_path / ".cache"),
        }
        with opened(tmp_path, env=env) as notebook:
            for example in examples(PAGE):
                follow(notebook, example)


def test_policy_allows_exactly_the_calls_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**lab.CREDENTIALS, "aws_config_file": "/dev/null"}.items():
        monkeypatch.setenv(name.upper(), value)
    with ec2() as cloud:
        EC2Market(cloud, {name: PRICES[name] for name in TYPES}, SPOT)
        clients = AwsClients(endpoint_url=cloud.url)
        for spot in (False, True):
            survey(
                PoolRequest(gpu=Accelerator("A100", 8), region="us-east-1", spot=spot),
                clients,
                Cache(tmp_path),
            )
        assert set(cloud.actions()) == policy()


def test_its_numbers() -> None:
    text = " ".join(PAGE.read_text().split())
    assert (IDLE, MAX_LIFETIME, FALLBACK_PRICE_FACTOR) == (1800.0, 86400.0, 2.0)
    assert re.search(r"\b30 minutes [^.]*\b24 hours\b", text)
    assert "twice the first price at most" in text
    assert (prices.LIST_SECONDS, prices.SPOT_SECONDS) == (7 * 86400.0, 600.0)
    assert "nothing preinstalled | 7 days |" in text
    assert "spot price history | 10 minutes |" in text
    assert ESTIMATED.startswith("20")
