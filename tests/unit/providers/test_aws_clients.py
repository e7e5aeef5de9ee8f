"""Errors of AWS as text."""

from __future__ import annotations

import pickle

import boto3
import botocore.exceptions
import pytest
from packaging.version import Version

from skymagic.plan.requests import REGIONS
from skymagic.providers.aws import errors
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.errors import CallSite, ErrorKind
from tests.lab.ec2 import REGION


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ConnectTimeoutError", "cannot be reached"),
        ("ReadTimeoutError", "did not answer"),
        ("ConnectionClosedError", "was lost"),
    ],
)
def test_silence_of_the_network(name: str, words: str) -> None:
    kind = getattr(botocore.exceptions, name)
    text = str(kind(endpoint_url="https://ec2.us-east-1.amazonaws.com/"))
    problem = errors.call_failure(
        tuple(each.__name__ for each in kind.__mro__), text, CallSite("ec2:DescribeRegions", REGION)
    )
    assert problem.kind == "unreachable"
    assert words in str(problem)


@pytest.mark.skipif(
    Version(boto3.__version__) < Version("1.42"), reason="an older boto3 knows fewer regions"
)
def test_completed_regions_exist() -> None:
    assert not {*REGIONS} - AwsClients().known_regions()


DENIED = (
    "You are not authorized to perform this operation. User: arn:aws:iam::123456789012:user/ann is not authorized to perform: "
    "ec2:CreateTags on resource: arn:aws:ec2:us-east-1:123456789012:instance/* because no identity-based policy allows the "
    "ec2:CreateTags action. Encoded authorization failure message: 4jqYxq0Xn"
)


@pytest.mark.parametrize(
    ("code", "message", "kind", "words"),
    [
        (
            "InsufficientInstanceCapacity",
            "We currently do not have …",
            ErrorKind.CAPACITY,
            ["no capacity", "other zones"],
        ),
        (
            "VcpuLimitExceeded",
            "You have requested more …",
            ErrorKind.QUOTA,
            ["vCPU quota", "used up in us-east-1", "request an increase"],
        ),
        (
            "MaxSpotInstanceCountExceeded",
            "…",
            ErrorKind.QUOTA,
            ["Spot Instance Requests", "Service Quotas"],
        ),
        ("SecurityGroupLimitExceeded", "…", ErrorKind.QUOTA, ["VPC security groups per Region"]),
        (
            "UnauthorizedOperation",
            DENIED,
            ErrorKind.PERMISSION,
            ["ec2:CreateTags", "user/ann", "docs/how-to/aws.md"],
        ),
        (
            "UnauthorizedOperation",
            "You are not authorized.",
            ErrorKind.PERMISSION,
            ["ec2:RunInstances"],
        ),
        (
            "UnauthorizedOperation",
            "… with an explicit deny in a service control policy",
            ErrorKind.PERMISSION,
            ["service control policy"],
        ),
        (
            "ExpiredToken",
            "The security token … is expired",
            ErrorKind.CREDENTIALS,
            ["aws sso login --profile work"],
        ),
        (
            "AuthFailure",
            "AWS was not able to validate",
            ErrorKind.CREDENTIALS,
            ["aws sts get-caller-identity --profile work"],
        ),
        ("RequestExpired", "Request has expired.", ErrorKind.CREDENTIALS, ["clock"]),
        (
            "Blocked",
            "This account is currently blocked …",
            ErrorKind.ACCOUNT,
            ["blocked the account", "not a lack of capacity"],
        ),
        ("PendingVerification", "…", ErrorKind.ACCOUNT, ["still verifying", "takes hours"]),
        ("OptInRequired", "…", ErrorKind.ACCOUNT, ["enable the region"]),
        ("SpotMaxPriceTooLow", "…", ErrorKind.PRICE, ["raise --max-price"]),
        (
            "Unsupported",
            "Your requested instance type is not supported in …",
            ErrorKind.PLACE,
            ["not supported in"],
        ),
        ("InternalError", "An internal error", ErrorKind.INTERNAL, ["not a lack of capacity"]),
        ("InvalidInstanceID.NotFound", "…", ErrorKind.MISSING, ["InvalidInstanceID.NotFound"]),
        (
            "DependencyViolation",
            "resource sg-1 has a dependent object",
            ErrorKind.IN_USE,
            ["dependent object"],
        ),
        (
            "InvalidParameterValue",
            "User data is limited to 16384 bytes",
            ErrorKind.INVALID,
            ["16384"],
        ),
        ("SomethingNew", "?", ErrorKind.INVALID, ["SomethingNew: ?"]),
    ],
)
def test_refusals_in_words(code: str, message: str, kind: ErrorKind, words: list[str]) -> None:
    problem = errors.refusal(code, message, CallSite("ec2:RunInstances", REGION, "work"))
    assert problem.kind == kind
    assert not [each for each in words if each not in str(problem)], str(problem)
    assert "4jqYxq0Xn" not in str(problem)
    assert str(pickle.loads(pickle.dumps(problem))) == str(problem)


def test_every_kind_is_reached() -> None:
    found = {errors.kind_of(code) for codes in errors._CODES.values() for code in codes.split()}
    assert {*ErrorKind} - found == {ErrorKind.UNREACHABLE, ErrorKind.MISSING, ErrorKind.INVALID}
    assert errors.kind_of("Whatever", 503) is ErrorKind.INTERNAL
