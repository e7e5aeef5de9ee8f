"""What AWS refuses, in words: every error of botocore becomes a CloudError of one kind; pure.

The codes are those of EC2's and IAM's references ("Error codes for the Amazon EC2 API", "Common errors").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from skymagic.errors import CloudError


class ErrorKind(Enum):
    """What an error means for whoever made the call."""

    CAPACITY = "EC2 has no such machines there now; another zone, type or time may have"
    QUOTA = "a limit of the account; another zone of the region does not help"
    PRICE = "the price asked for is below spot's"
    PLACE = "this zone or subnet cannot; another one may"
    PERMISSION = "the credentials are good and do not allow it"
    CREDENTIALS = "there are no credentials, or they are not accepted"
    ACCOUNT = "the account is blocked, or not active there"
    THROTTLED = "too many calls; the same one later is accepted"
    INTERNAL = "EC2 itself failed; the call may have been carried out or not"
    UNREACHABLE = "no answer; the call may have been carried out or not"
    MISSING = "what is named is not there, or not yet known everywhere"
    IN_USE = "something else still needs it"
    INVALID = "the request itself"


UNCERTAIN = (ErrorKind.INTERNAL, ErrorKind.UNREACHABLE, ErrorKind.THROTTLED)
"""After these a call is made again; nobody knows whether the first one was carried out, but for a throttled one."""
ELSEWHERE = (ErrorKind.CAPACITY, ErrorKind.QUOTA, ErrorKind.PRICE, ErrorKind.PLACE)
"""After these another offer may do."""


@dataclass(frozen=True)
class Where:
    """The call that failed.

    Attributes:
        operation: as IAM names it: ``ec2:RunInstances``.
        profile: of the AWS configuration; "" for none.
    """

    operation: str
    region: str = ""
    profile: str = ""


_CODES: Mapping[ErrorKind, str] = {
    ErrorKind.CAPACITY: """InsufficientInstanceCapacity InsufficientHostCapacity InsufficientReservedInstanceCapacity InsufficientCapacity
        UnfulfillableCapacity ReservationCapacityExceeded CapacityReservationFull Server.InsufficientInstanceCapacity
        Server.SpotInstanceTermination Server.SpotInstanceShutdown""",
    ErrorKind.QUOTA: """VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded SpotInstanceCountLimitExceeded VolumeLimitExceeded
        MaxIOPSLimitExceeded SecurityGroupLimitExceeded RulesPerSecurityGroupLimitExceeded AddressLimitExceeded
        NetworkInterfaceLimitExceeded LimitExceeded ResourceLimitExceeded Client.VolumeLimitExceeded Client.InstanceLimitExceeded""",
    ErrorKind.PRICE: "SpotMaxPriceTooLow",
    ErrorKind.PLACE: """Unsupported UnsupportedOperation UnsupportedHostConfiguration InvalidAvailabilityZone InsufficientFreeAddressesInSubnet
        InvalidSubnetID.NotFound InvalidSubnet""",
    ErrorKind.PERMISSION: """UnauthorizedOperation AccessDenied AccessDeniedException UnauthorizedException Client.UnauthorizedOperation
        NotAuthorized""",
    ErrorKind.CREDENTIALS: """AuthFailure InvalidClientTokenId ExpiredToken ExpiredTokenException RequestExpired SignatureDoesNotMatch
        UnrecognizedClientException InvalidAccessKeyId MissingAuthenticationToken IncompleteSignature InvalidSignatureException
        InvalidToken""",
    ErrorKind.ACCOUNT: "Blocked PendingVerification OptInRequired AccountDisabled PendingAccountVerification",
    ErrorKind.THROTTLED: """RequestLimitExceeded Throttling ThrottlingException ThrottledException TooManyRequestsException
        EC2ThrottledException RequestThrottled RequestThrottledException PriorRequestNotComplete SlowDown BandwidthLimitExceeded""",
    ErrorKind.INTERNAL: "InternalError InternalFailure InternalServerError ServiceUnavailable Unavailable ServerInternal Server.InternalError",
    ErrorKind.IN_USE: "DependencyViolation InvalidGroup.InUse InvalidPlacementGroup.InUse ResourceInUse InvalidIPAddress.InUse IncorrectInstanceState",
}
_KIND = {code: kind for kind, codes in _CODES.items() for code in codes.split()}

_QUOTAS = {
    "VcpuLimitExceeded": 'the vCPU quota of this family ("Running On-Demand … instances" in Service Quotas, EC2)',
    "InstanceLimitExceeded": 'the vCPU quota of this family ("Running On-Demand … instances" in Service Quotas, EC2)',
    "MaxSpotInstanceCountExceeded": 'the vCPU quota of spot instances ("All … Spot Instance Requests" in Service Quotas, EC2)',
    "SecurityGroupLimitExceeded": 'the quota "VPC security groups per Region" (Service Quotas, VPC)',
    "RulesPerSecurityGroupLimitExceeded": 'the quota "Inbound or outbound rules per security group" (Service Quotas, VPC)',
    "AddressLimitExceeded": 'the quota "EC2-VPC Elastic IPs" (Service Quotas, EC2)',
    "VolumeLimitExceeded": 'the quota of disks ("Storage for General Purpose SSD volumes" in Service Quotas, EBS)',
    "NetworkInterfaceLimitExceeded": 'the quota "Network interfaces per Region" (Service Quotas, VPC)',
}


def kind_of(code: str, status: int = 400) -> ErrorKind:
    """What a code means; one that nobody knows is INTERNAL where the HTTP status says so, else INVALID."""
    if code in _KIND:
        return _KIND[code]
    if code.endswith((".NotFound", ".Unknown", "NotFoundException")) or code in (
        "ParameterNotFound",
        "InvalidGroupId.NotFound",
    ):
        return ErrorKind.MISSING
    if code.startswith("Server."):
        return ErrorKind.INTERNAL
    return ErrorKind.INTERNAL if status >= 500 else ErrorKind.INVALID


def refused(code: str, message: str, where: Where, status: int = 400) -> CloudError:
    """The error that stands for an answer with this code."""
    kind = kind_of(code, status)
    what, remedy = _refusal(kind, code, message.strip(), where)
    return CloudError(kind.name.lower(), code, what, remedy)


def _refusal(kind: ErrorKind, code: str, message: str, where: Where) -> tuple[str, str]:
    """(what happened, what to do)."""
    there = f" in {where.region}" if where.region else ""
    said = f"{code}: {_plain(message)}" if message else code
    if kind is ErrorKind.PERMISSION:
        return f"these AWS credentials may not call {_permission(message, where)}{there} ({_denied_by(message)})", (
            f"have {_permission(message, where)} added to the policy of {_principal(message, where)}; docs/aws.md has the whole of it"
        )
    if kind is ErrorKind.QUOTA:
        quota = _QUOTAS.get(code.removeprefix("Client."), "a quota of the account")
        return f"{quota} is used up{there} ({said})", f"ask for more of it{there}, or for fewer or smaller machines"
    if kind is ErrorKind.CREDENTIALS:
        return f"AWS does not accept the credentials ({said})", _credentials_remedy(code, where)
    if kind is ErrorKind.ACCOUNT:
        return _account(code, said, there)
    if kind is ErrorKind.CAPACITY:
        return f"EC2 has no capacity ({said})", "other zones, types or regions may have; so may this one later"
    if kind is ErrorKind.PRICE:
        return f"spot costs more than asked for ({said})", "raise --max-price, or leave --spot out"
    if kind is ErrorKind.THROTTLED:
        return (
            f"AWS throttles {where.operation}{there} ({said})",
            "others in the account call it often too; try again later",
        )
    if kind is ErrorKind.INTERNAL:
        return (
            f"EC2 failed itself at {where.operation}{there} ({said})",
            "this is no lack of capacity; health.aws.amazon.com may know",
        )
    return f"{where.operation}{there}: {said}", ""


def _account(code: str, said: str, there: str) -> tuple[str, str]:
    if code == "OptInRequired":
        return (
            f"the account does not use this region{there} ({said})",
            "enable the region in the account's settings, or take another",
        )
    if "Pending" in code:
        return f"AWS still verifies the account{there} ({said})", "that ends by itself within hours; a mail says when"
    return f"AWS has blocked the account ({said})", "AWS support says why; this is no lack of capacity"


def _credentials_remedy(code: str, where: Where) -> str:
    profile = f" --profile {where.profile}" if where.profile else ""
    if "Expired" in code:
        again = f"log in again (aws sso login{profile}), or renew the session's credentials"
        return f"{again}; and see whether this machine's clock is right" if code == "RequestExpired" else again
    if code == "SignatureDoesNotMatch":
        return "see whether the secret key is whole, and this machine's clock is right"
    return f"see what answers to: aws sts get-caller-identity{profile}"


def _permission(message: str, where: Where) -> str:
    """What is not allowed: EC2 may name another action than the one called, as in RunInstances without ec2:CreateTags."""
    found = re.search(r"not authorized to perform:? ([\w-]+:\w+)", message)
    return found[1] if found else where.operation


def _principal(message: str, where: Where) -> str:
    found = re.search(r"User: (arn:[^\s]+)", message)
    return found[1] if found else f"the profile {where.profile}" if where.profile else "these credentials"


def _denied_by(message: str) -> str:
    explicit = re.search(r"with an explicit deny in an? ([\w -]+?) ?(?:policy|$|:|\.)", message)
    if explicit:
        return f"an explicit deny in a {explicit[1]} policy"
    return "no policy allows it" if "no " in message and "policy allows" in message else "UnauthorizedOperation"


def _plain(message: str) -> str:
    """Without what only decode-authorization-message can read."""
    return re.sub(r"\s*Encoded authorization failure message:.*", "", message, flags=re.DOTALL).strip()


CLIENT_SIDE: Mapping[str, tuple[ErrorKind, str, str]] = {
    "NoCredentialsError": (
        ErrorKind.CREDENTIALS,
        "there are no AWS credentials",
        "aws configure, or aws sso login, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; with several profiles AWS_PROFILE",
    ),
    "PartialCredentialsError": (
        ErrorKind.CREDENTIALS,
        "the AWS credentials are incomplete",
        "aws configure shows what is missing",
    ),
    "CredentialRetrievalError": (
        ErrorKind.CREDENTIALS,
        "AWS credentials could not be had",
        "the profile's credential_process or role says why",
    ),
    "TokenRetrievalError": (ErrorKind.CREDENTIALS, "the AWS SSO session is over", "aws sso login{profile}"),
    "UnauthorizedSSOTokenError": (ErrorKind.CREDENTIALS, "the AWS SSO session is over", "aws sso login{profile}"),
    "SSOTokenLoadError": (ErrorKind.CREDENTIALS, "there is no AWS SSO session", "aws sso login{profile}"),
    "SSOError": (ErrorKind.CREDENTIALS, "AWS SSO gives no credentials", "aws sso login{profile}"),
    "LoginError": (ErrorKind.CREDENTIALS, "the AWS session gives no credentials", "aws login{profile}"),
    "InvalidConfigError": (
        ErrorKind.CREDENTIALS,
        "the AWS configuration leads to no credentials",
        "aws configure list{profile} shows what is used",
    ),
    "RefreshWithMFAUnsupportedError": (
        ErrorKind.CREDENTIALS,
        "the AWS credentials need another code of your MFA device",
        "aws sts get-session-token, or a profile of AWS SSO",
    ),
    "LoginRefreshRequired": (ErrorKind.CREDENTIALS, "the AWS session is over", "aws login{profile}"),
    "ProfileNotFound": (
        ErrorKind.CREDENTIALS,
        "there is no such AWS profile",
        "aws configure list-profiles names those that there are",
    ),
    "NoRegionError": (
        ErrorKind.INVALID,
        "no AWS region is named",
        "--region us-east-1, or AWS_REGION, or aws configure",
    ),
    "InvalidRegionError": (
        ErrorKind.INVALID,
        "that is no AWS region",
        "--region us-east-1 is one; aws ec2 describe-regions names all",
    ),
    "EndpointConnectionError": (
        ErrorKind.UNREACHABLE,
        "AWS cannot be reached",
        "is the region's name right, and is there a network?",
    ),
    "ConnectTimeoutError": (
        ErrorKind.UNREACHABLE,
        "AWS cannot be reached",
        "is there a network, or a proxy (HTTPS_PROXY)?",
    ),
    "ProxyConnectionError": (
        ErrorKind.UNREACHABLE,
        "the proxy to AWS cannot be reached",
        "HTTPS_PROXY names it, with user and password where it asks for them",
    ),
    "SSLError": (
        ErrorKind.UNREACHABLE,
        "the connection to AWS is not trusted",
        "AWS_CA_BUNDLE names a proxy's own certificate",
    ),
    "ReadTimeoutError": (ErrorKind.UNREACHABLE, "AWS did not answer", "try again"),
    "ConnectionClosedError": (ErrorKind.UNREACHABLE, "the connection to AWS was lost", "try again"),
    "HTTPClientError": (ErrorKind.UNREACHABLE, "AWS cannot be reached", "is there a network?"),
    "ResponseParserError": (
        ErrorKind.UNREACHABLE,
        "what came is not an answer of AWS's",
        "a proxy's page or a network's login may stand between: open any web page; HTTPS_PROXY and NO_PROXY name proxies",
    ),
    "InvalidProxiesConfigError": (ErrorKind.INVALID, "the proxy to AWS is no address", "HTTPS_PROXY names it"),
    "InvalidEndpoint": (
        ErrorKind.INVALID,
        "that is no address of AWS's services",
        "endpoint_url, or AWS_ENDPOINT_URL, names it",
    ),
    "ConfigParseError": (ErrorKind.INVALID, "the AWS configuration cannot be read", "aws configure list reads it too"),
    "ParamValidationError": (ErrorKind.INVALID, "boto3 does not take this request", ""),
}
"""By the name of botocore's class: kind, what happened, what to do."""


def page(status: int, where: Where) -> CloudError:
    """The error that stands for a page of HTML in the place of an answer."""
    return failed(("ResponseParserError",), f"HTTP {status}, a page of HTML", where)


def failed(names: tuple[str, ...], message: str, where: Where) -> CloudError:
    """The error that stands for one of botocore's own, before any answer.

    Args:
        names: of its class and the classes above it, the nearest first.
    """
    found = next((CLIENT_SIDE[name] for name in names if name in CLIENT_SIDE), None)
    kind, what, remedy = found or (ErrorKind.INVALID, f"{where.operation} could not be called", "")
    profile = f" --profile {where.profile}" if where.profile else ""
    first, *_ = _plain(message).splitlines() or [""]  # below it botocore shows the whole of what it could not read
    return CloudError(kind.name.lower(), names[0], f"{what} ({first.rstrip(':')})", remedy.format(profile=profile))
