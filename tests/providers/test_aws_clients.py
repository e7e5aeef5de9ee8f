"""Calls of AWS, over HTTP: what is made again, what is not, and how each refusal reads."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import botocore.exceptions
import pytest

from skymagic.errors import CloudError
from skymagic.providers.aws import errors
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.errors import CallSite
from tests.lab import ec2 as lab
from tests.lab.ec2 import EC2, REGION, ec2, error
from tests.lab.golden import Golden
from tests.lab.raising import raises

LAUNCH = {
    "ImageId": lab.IMAGE,
    "InstanceType": "m5.large",
    "MinCount": 2,
    "MaxCount": 2,
    "ClientToken": "one",
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[EC2, AwsClients]]:
    with ec2() as made:
        yield made, AwsClients(endpoint_url=made.url, deadline_factor=0.02)


@pytest.fixture
def cloud(server: tuple[EC2, AwsClients], monkeypatch: pytest.MonkeyPatch) -> EC2:
    for name, value in lab.environment().items():
        monkeypatch.setenv(name, value)
    server[0].forget()
    return server[0]


@pytest.fixture
def clients(cloud: EC2, server: tuple[EC2, AwsClients]) -> AwsClients:
    return server[1]


def test_a_lost_answer_buys_nothing_twice(cloud: EC2, clients: AwsClients) -> None:
    cloud.on("RunInstances", lab.lost)
    answer = clients.call("ec2", REGION, "RunInstances", **LAUNCH)
    assert cloud.actions() == ["ec2:RunInstances"] * 2
    assert {each["InstanceId"] for each in answer["Instances"]} == {
        each.id for each in lab.instances()
    }
    assert len(lab.instances()) == 2


def test_the_same_token_with_other_parameters_is_refused(cloud: EC2, clients: AwsClients) -> None:
    clients.call("ec2", REGION, "RunInstances", **LAUNCH)
    with pytest.raises(CloudError, match="IdempotentParameterMismatch") as failed:
        clients.call("ec2", REGION, "RunInstances", **LAUNCH | {"InstanceType": "m5.xlarge"})
    assert failed.value.kind == "invalid"


def test_throttling_is_waited_out(cloud: EC2, clients: AwsClients) -> None:
    cloud.on("DescribeRegions", error("RequestLimitExceeded", status=503), times=3)
    assert clients.call("ec2", REGION, "DescribeRegions")["Regions"]
    assert len(cloud.calls) == 4


def test_throttling_for_a_minute_is_waited_out(cloud: EC2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when each pause happens to be the shortest that it may be."""
    monkeypatch.setattr("random.uniform", lambda low, high: low)
    shortest = itertools.accumulate([0.25, 0.5, 1.0, 2.0, 4.0, *[5.0] * 20])
    calls = sum(1 for waited in shortest if waited < 60.0) + 1
    cloud.on("DescribeRegions", error("RequestLimitExceeded", status=503), times=calls)
    assert AwsClients(endpoint_url=cloud.url, deadline_factor=0.0001).call(
        "ec2", REGION, "DescribeRegions"
    )["Regions"]
    assert len(cloud.calls) == calls + 1


@pytest.mark.parametrize(
    "effect", [error("InternalError", status=500), lab.unreached, error("Unavailable", status=503)]
)
def test_persistent_failures_are_reported(
    cloud: EC2, clients: AwsClients, effect: lab.Effect
) -> None:
    cloud.on("DescribeRegions", effect, times=1000)
    with pytest.raises(CloudError) as failed:
        clients.call("ec2", REGION, "DescribeRegions")
    assert failed.value.kind in ("internal", "unreachable")
    assert failed.value.code in ("cloud-internal", "cloud-unreachable"), "and not cloud-capacity"
    assert len(cloud.calls) > 1


@pytest.mark.parametrize("status", [400, 500, 503])
def test_missing_capacity_is_not_retried(cloud: EC2, clients: AwsClients, status: int) -> None:
    """botocore retries it by itself where it comes with a 500."""
    cloud.on("RunInstances", error("InsufficientInstanceCapacity", "not there", status), times=10)
    with pytest.raises(CloudError) as failed:
        clients.call("ec2", REGION, "RunInstances", **LAUNCH)
    assert failed.value.kind == "capacity"
    assert cloud.actions() == ["ec2:RunInstances"]


def test_pages(cloud: EC2, clients: AwsClients) -> None:
    for number in range(3):
        clients.call("ec2", REGION, "RunInstances", **LAUNCH | {"ClientToken": str(number)})
    found = list(clients.pages("ec2", REGION, "DescribeInstances", "Reservations", MaxResults=1))
    assert len(found) == 3


@pytest.mark.parametrize(
    "name", ["UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError"]
)
def test_an_sso_session_that_is_over(golden: Golden, name: str) -> None:
    """botocore's own errors, before any call, as it raises them."""
    kind = getattr(botocore.exceptions, name)
    words = str(kind(profile_name="work", error_msg="expired", provider="sso"))
    problem = errors.call_failure(
        tuple(each.__name__ for each in kind.__mro__),
        words,
        CallSite("ec2:DescribeRegions", REGION, "work"),
    )
    assert problem.kind == "credentials"
    golden(str(problem))


def page(status: int) -> lab.Effect:
    """What a proxy, or a network that wants a login, answers in the place of AWS."""
    html = b"<!DOCTYPE html><html><body>Log in<br></body></html>"
    return lambda call, carry_out: lab.Answer(
        status, html, {"Content-Type": "text/html; charset=utf-8"}
    )


@pytest.mark.parametrize("status", [200, 302, 403, 502])
@pytest.mark.parametrize(
    ("service", "action", "parameters"),
    [
        ("ec2", "DescribeRegions", {}),
        ("sts", "GetCallerIdentity", {}),
        ("ssm", "GetParameter", {"Name": "/aws/service/x"}),
    ],
    ids=["ec2", "sts", "ssm"],
)
def test_a_page_is_no_answer(
    cloud: EC2,
    clients: AwsClients,
    service: str,
    action: str,
    parameters: dict[str, str],
    status: int,
) -> None:
    """Of services that speak XML, and of those that speak JSON: botocore takes a page for an empty answer there."""
    cloud.on(action, page(status), times=2)
    assert clients.call(service, REGION, action, **parameters), "it may be of the moment"
    cloud.on(action, page(status), times=1000)
    with raises(CloudError, "cloud-unreachable", r"\(.*\)\n") as failed:
        clients.call(service, REGION, action, **parameters)
    assert "HTTPS_PROXY" in failed.value.hint
    assert "<" not in str(failed.value)


def test_unreachable_endpoints_are_explained(cloud: EC2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there, a proxy does not, it is no TLS, it is no address."""
    for name in (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "http_proxy",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
        "NO_PROXY",
        "no_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it is nobody else's, and nobody listens
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        ways = {
            f"http://{nobody}": ("cloud-unreachable", "reached"),
            cloud.url.replace("http:", "https:"): ("cloud-unreachable", "trusted"),
            "nonsense": ("cloud-invalid", "address"),
        }
        for url, (code, word) in ways.items():
            with raises(CloudError, code, f"{word}.*\n"):
                AwsClients(endpoint_url=url, deadline_factor=0.0001).call(
                    "ec2", REGION, "DescribeRegions"
                )
        monkeypatch.setenv("HTTPS_PROXY", f"http://ann:secret@{nobody}")
        with raises(CloudError, "cloud-unreachable", "proxy") as failed:
            AwsClients(deadline_factor=0.0001).call("ec2", REGION, "DescribeRegions")
    assert "HTTPS_PROXY" in failed.value.hint
    assert "secret" not in str(failed.value)
    assert cloud.calls == []


def test_a_configuration_that_cannot_be_read(
    cloud: EC2, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[default\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with raises(CloudError, "cloud-invalid", str(tmp_path / "config")):
        AwsClients(endpoint_url=cloud.url).call("ec2", REGION, "DescribeRegions")


def test_without_credentials(monkeypatch: pytest.MonkeyPatch, cloud: EC2) -> None:
    for name in lab.CREDENTIALS:
        monkeypatch.delenv(name.upper())
    with raises(CloudError, "cloud-credentials") as failed:
        AwsClients(endpoint_url=cloud.url).call("ec2", REGION, "DescribeRegions")
    assert "aws configure" in failed.value.hint
    with raises(CloudError, "cloud-credentials", "nobody") as failed:
        _ = AwsClients(profile="nobody").region
    assert "aws configure list-profiles" in failed.value.hint


@pytest.mark.parametrize(
    ("service", "code"),
    [("ec2", "UnauthorizedOperation"), ("ssm", "AccessDeniedException"), ("sts", "AccessDenied")],
)
def test_each_service_has_errors_of_its_own(
    cloud: EC2, clients: AwsClients, service: str, code: str
) -> None:
    action = {"ec2": "DescribeRegions", "ssm": "GetParameter", "sts": "GetCallerIdentity"}[service]
    cloud.on(action, error(code, "not authorized", 403))
    with pytest.raises(CloudError, match=f"may not call {service}:{action}") as failed:
        clients.call(
            service, REGION, action, **({"Name": "/aws/service/x"} if service == "ssm" else {})
        )
    assert failed.value.kind == "permission"
