"""Explanations of AWS errors: maps every botocore error to a CloudError of one kind. Pure.

The codes come from the references of EC2 and IAM ("Error codes for the Amazon EC2 API", "Common
errors").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, auto

from skymagic.errors import CloudError


class ErrorKind(StrEnum):
    """Meaning of an error for the caller; the values of `CloudError.kind`."""

    CAPACITY = auto()  # EC2 lacks such machines there now; another zone, type or time may work
    QUOTA = auto()  # a limit of the account; another zone of the region does not help
    PRICE = auto()  # the price asked for is below spot's
    PLACE = auto()  # this zone or subnet cannot host the machines; another may
    PERMISSION = auto()  # the credentials are valid but do not allow the call
    CREDENTIALS = auto()  # credentials are missing or not accepted
    ACCOUNT = auto()  # the account is blocked, or not active there
    THROTTLED = auto()  # too many calls; the same call succeeds later
    INTERNAL = auto()  # EC2 itself failed; the call may have been carried out or not
    UNREACHABLE = auto()  # no answer; the call may have been carried out or not
    MISSING = auto()  # the named resource does not exist, or is not yet known everywhere
    IN_USE = auto()  # something else still needs it
    INVALID = auto()  # the request is wrong


UNCERTAIN = (ErrorKind.INTERNAL, ErrorKind.UNREACHABLE, ErrorKind.THROTTLED)
"""Kinds after which a call is repeated. Except after throttling, its outcome is unknown."""
ELSEWHERE = (ErrorKind.CAPACITY, ErrorKind.QUOTA, ErrorKind.PRICE, ErrorKind.PLACE)
"""Kinds after which another offer may succeed."""


@dataclass(frozen=True)
class CallSite:
    """The call that failed.

    Attributes:
        operation: operation name in IAM: ``ec2:RunInstances``.
        profile: profile of the AWS configuration; "" for none.
    """

    operation: str
    region: str = ""
    profile: str = ""


_CODES: Mapping[ErrorKind, str] = {
    ErrorKind.CAPACITY: """
        InsufficientInstanceCapacity InsufficientHostCapacity InsufficientReservedInstanceCapacity
        InsufficientCapacity UnfulfillableCapacity ReservationCapacityExceeded
        CapacityReservationFull Server.InsufficientInstanceCapacity Server.SpotInstanceTermination
        Server.SpotInstanceShutdown""",
    ErrorKind.QUOTA: """
        VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded
        SpotInstanceCountLimitExceeded VolumeLimitExceeded MaxIOPSLimitExceeded
        SecurityGroupLimitExceeded RulesPerSecurityGroupLimitExceeded AddressLimitExceeded
        NetworkInterfaceLimitExceeded LimitExceeded ResourceLimitExceeded Client.VolumeLimitExceeded
        Client.InstanceLimitExceeded""",
    ErrorKind.PRICE: "SpotMaxPriceTooLow",
    ErrorKind.PLACE: """
        Unsupported UnsupportedOperation UnsupportedHostConfiguration InvalidAvailabilityZone
        InsufficientFreeAddressesInSubnet InvalidSubnetID.NotFound InvalidSubnet""",
    ErrorKind.PERMISSION: """
        UnauthorizedOperation AccessDenied AccessDeniedException UnauthorizedException
        Client.UnauthorizedOperation NotAuthorized""",
    ErrorKind.CREDENTIALS: """
        AuthFailure InvalidClientTokenId ExpiredToken ExpiredTokenException RequestExpired
        SignatureDoesNotMatch UnrecognizedClientException InvalidAccessKeyId
        MissingAuthenticationToken IncompleteSignature InvalidSignatureException InvalidToken""",
    ErrorKind.ACCOUNT: """
        Blocked PendingVerification OptInRequired AccountDisabled PendingAccountVerification""",
    ErrorKind.THROTTLED: """
        RequestLimitExceeded Throttling ThrottlingException ThrottledException
        TooManyRequestsException EC2ThrottledException RequestThrottled RequestThrottledException
        PriorRequestNotComplete SlowDown BandwidthLimitExceeded""",
    ErrorKind.INTERNAL: """
        InternalError InternalFailure InternalServerError ServiceUnavailable Unavailable
        ServerInternal Server.InternalError""",
    ErrorKind.IN_USE: """
        DependencyViolation InvalidGroup.InUse InvalidPlacementGroup.InUse ResourceInUse
        InvalidIPAddress.InUse IncorrectInstanceState""",
}
_KIND = {code: kind for kind, codes in _CODES.items() for code in codes.split()}

_QUOTAS = {
    "VcpuLimitExceeded": 'the vCPU quota of this family ("Running On-Demand … instances" '
    "in Service Quotas, EC2)",
    "InstanceLimitExceeded": 'the vCPU quota of this family ("Running On-Demand … instances" '
    "in Service Quotas, EC2)",
    "MaxSpotInstanceCountExceeded": "the vCPU quota of spot instances "
    '("All … Spot Instance Requests" in Service Quotas, EC2)',
    "SecurityGroupLimitExceeded": 'the quota "VPC security groups per Region" '
    "(Service Quotas, VPC)",
    "RulesPerSecurityGroupLimitExceeded": 'the quota "Inbound or outbound rules per security '
    'group" (Service Quotas, VPC)',
    "AddressLimitExceeded": 'the quota "EC2-VPC Elastic IPs" (Service Quotas, EC2)',
    "VolumeLimitExceeded": 'the quota of disks ("Storage for General Purpose SSD volumes" '
    "in Service Quotas, EBS)",
    "NetworkInterfaceLimitExceeded": 'the quota "Network interfaces per Region" '
    "(Service Quotas, VPC)",
}


def kind_of(code: str, status: int = 400) -> ErrorKind:
    """Classify an error code.

    An unknown code is INTERNAL if the HTTP status indicates so, else INVALID.
    """
    if code in _KIND:
        return _KIND[code]
    if code.endswith((".NotFound", ".Unknown", "NotFoundException", "ParameterNotFound")):
        return ErrorKind.MISSING
    return ErrorKind.INTERNAL if status >= 500 or code.startswith("Server.") else ErrorKind.INVALID


def refusal(code: str, message: str, location: CallSite, status: int = 400) -> CloudError:
    """Return the error for an answer with this code."""
    kind = kind_of(code, status)
    what, remedy = _refusal(kind, code, message.strip(), location)
    return CloudError(kind, code, what, remedy)


def _refusal(kind: ErrorKind, code: str, message: str, location: CallSite) -> tuple[str, str]:
    """Return what happened and what to do."""
    in_region = f" in {location.region}" if location.region else ""
    details = f"{code}: {_without_encoded_part(message)}" if message else code
    if kind is ErrorKind.PERMISSION:
        return (
            f"these AWS credentials may not call {_permission(message, location)}{in_region} "
            f"({_denied_by(message)})",
            (
                f"have {_permission(message, location)} added to the policy of "
                f"{_principal(message, location)}; docs/how-to/aws.md has the complete policy"
            ),
        )
    if kind is ErrorKind.QUOTA:
        quota = _QUOTAS.get(code.removeprefix("Client."), "a quota of the account")
        console = (
            f"https://{location.region}.console.aws.amazon.com/servicequotas"
            if location.region
            else "Service Quotas"
        )
        return (
            f"{quota} is used up{in_region} ({details})",
            f"request an increase at {console}, or ask for fewer or smaller machines",
        )
    if kind is ErrorKind.CREDENTIALS:
        return f"AWS does not accept the credentials ({details})", _credentials_remedy(
            code, location
        )
    if kind is ErrorKind.ACCOUNT:
        return _account(code, details, in_region)
    if kind in _TEXTS:
        what, remedy = _TEXTS[kind]
        return f"{what.format(call=f'{location.operation}{in_region}')} ({details})", remedy
    return f"{location.operation}{in_region}: {details}", ""


_TEXTS: Mapping[ErrorKind, tuple[str, str]] = {
    ErrorKind.CAPACITY: (
        "EC2 has no capacity",
        "other zones, types or regions may have; so may this one later",
    ),
    ErrorKind.PRICE: ("spot costs more than asked for", "raise --max-price, or leave --spot out"),
    ErrorKind.THROTTLED: (
        "AWS throttles {call}",
        "the account makes many such calls; try again later",
    ),
    ErrorKind.INTERNAL: (
        "EC2 had an internal error at {call}",
        "this is not a lack of capacity: see health.aws.amazon.com",
    ),
}
"""Description and remedy by kind."""


def _account(code: str, message: str, region: str) -> tuple[str, str]:
    if code == "OptInRequired":
        remedy = "enable the region in the account's settings, or choose another"
        return f"the account does not use this region{region} ({message})", remedy
    if "Pending" in code:
        return (
            f"AWS is still verifying the account{region} ({message})",
            "this takes hours; AWS sends a mail when it is done",
        )
    return (
        f"AWS has blocked the account ({message})",
        "ask AWS support for the reason; this is not a lack of capacity",
    )


def _credentials_remedy(code: str, location: CallSite) -> str:
    profile = f" --profile {location.profile}" if location.profile else ""
    if "Expired" in code:
        again = f"log in again (aws sso login{profile}), or renew the session's credentials"
        return f"{again}; also check this machine's clock" if code == "RequestExpired" else again
    if code == "SignatureDoesNotMatch":
        return "check that the secret key is complete, and that this machine's clock is right"
    return f"check: aws sts get-caller-identity{profile}"


def _permission(message: str, location: CallSite) -> str:
    """Return the missing permission.

    EC2 may report another action than the one called: RunInstances can fail for ec2:CreateTags.
    """
    match = re.search(r"not authorized to perform:? ([\w-]+:\w+)", message)
    return match[1] if match else location.operation


def _principal(message: str, location: CallSite) -> str:
    match = re.search(r"User: (arn:[^\s]+)", message)
    return (
        match[1]
        if match
        else f"the profile {location.profile}"
        if location.profile
        else "these credentials"
    )


def _denied_by(message: str) -> str:
    explicit = re.search(r"with an explicit deny in an? ([\w -]+?) ?(?:policy|$|:|\.)", message)
    if explicit:
        return f"an explicit deny in a {explicit[1]} policy"
    return (
        "no policy allows it"
        if "no " in message and "policy allows" in message
        else "UnauthorizedOperation"
    )


def _without_encoded_part(message: str) -> str:
    """Strip the part of a message that only decode-authorization-message can read."""
    return re.sub(
        r"\s*Encoded authorization failure message:.*", "", message, flags=re.DOTALL
    ).strip()


_LOGIN = "aws sso login{profile}"
_CLIENT_SIDE: Mapping[ErrorKind, Mapping[str, tuple[str, str]]] = {
    ErrorKind.CREDENTIALS: {
        "NoCredentialsError": (
            "there are no AWS credentials",
            "run aws configure or aws sso login, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY; AWS_PROFILE selects a profile",
        ),
        "PartialCredentialsError": (
            "the AWS credentials are incomplete",
            "aws configure asks for what is missing",
        ),
        "CredentialRetrievalError": (
            "could not load AWS credentials",
            "check the profile's credential_process or role",
        ),
        "TokenRetrievalError": ("the AWS SSO session has expired", _LOGIN),
        "UnauthorizedSSOTokenError": ("the AWS SSO session has expired", _LOGIN),
        "SSOTokenLoadError": ("there is no AWS SSO session", _LOGIN),
        "SSOError": ("AWS SSO returned no credentials", _LOGIN),
        "LoginError": ("the AWS session returned no credentials", "aws login{profile}"),
        "LoginRefreshRequired": ("the AWS session has expired", "aws login{profile}"),
        "InvalidConfigError": (
            "the AWS configuration provides no credentials",
            "aws configure list{profile} shows what is used",
        ),
        "RefreshWithMFAUnsupportedError": (
            "the AWS credentials need a new code from your MFA device",
            "run aws sts get-session-token, or use a profile of AWS SSO",
        ),
        "ProfileNotFound": (
            "there is no such AWS profile",
            "aws configure list-profiles lists them",
        ),
    },
    ErrorKind.UNREACHABLE: {
        "EndpointConnectionError": (
            "AWS cannot be reached",
            "check the region's name and the network",
        ),
        "ConnectTimeoutError": (
            "AWS cannot be reached",
            "check the network, and the proxy if there is one (HTTPS_PROXY)",
        ),
        "HTTPClientError": ("AWS cannot be reached", "check the network"),
        "ProxyConnectionError": (
            "the proxy to AWS cannot be reached",
            "check HTTPS_PROXY, with user and password if the proxy requires them",
        ),
        "SSLError": (
            "the connection to AWS is not trusted",
            "if a proxy has its own certificate, set AWS_CA_BUNDLE to it",
        ),
        "ReadTimeoutError": ("AWS did not answer", "try again"),
        "ConnectionClosedError": ("the connection to AWS was lost", "try again"),
        "ResponseParserError": (
            "the answer is not from AWS",
            "a proxy or a network's login page may have answered: open any web page, and check "
            "HTTPS_PROXY and NO_PROXY",
        ),
    },
    ErrorKind.INVALID: {
        "NoRegionError": (
            "no AWS region is set",
            "use --region us-east-1, set AWS_REGION, or run aws configure",
        ),
        "InvalidRegionError": (
            "that is not an AWS region",
            "use for example --region us-east-1; aws ec2 describe-regions lists all",
        ),
        "InvalidProxiesConfigError": (
            "the address of the AWS proxy is invalid",
            "check HTTPS_PROXY",
        ),
        "InvalidEndpoint": (
            "that is not an address of an AWS service",
            "check endpoint_url, or AWS_ENDPOINT_URL",
        ),
        "ConfigParseError": (
            "the AWS configuration cannot be read",
            "check it with aws configure list",
        ),
        "ParamValidationError": ("boto3 rejects this request", ""),
    },
}
CLIENT_SIDE = {
    name: (kind, *texts) for kind, listed in _CLIENT_SIDE.items() for name, texts in listed.items()
}
"""Kind, what happened, and what to do, by the name of botocore's class."""


def page_failure(status: int, location: CallSite) -> CloudError:
    """Return the error for a page of HTML received instead of an answer."""
    return call_failure(("ResponseParserError",), f"HTTP {status}, a page of HTML", location)


def call_failure(names: tuple[str, ...], message: str, location: CallSite) -> CloudError:
    """Return the error for one of botocore's own errors, raised before any answer.

    Args:
        names: names of its class and base classes, the most specific first.
    """
    explanation = next((CLIENT_SIDE[name] for name in names if name in CLIENT_SIDE), None)
    kind, what, remedy = explanation or (
        ErrorKind.INVALID,
        f"{location.operation} could not be called",
        "",
    )
    profile = f" --profile {location.profile}" if location.profile else ""
    # the following lines are the text that botocore could not parse
    first, *_ = _without_encoded_part(message).splitlines() or [""]
    return CloudError(
        kind, names[0], f"{what} ({first.rstrip(':')})", remedy.format(profile=profile)
    )
