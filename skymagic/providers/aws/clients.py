"""Calls to AWS: clients by service and region, retries by kind of error, and setup detection."""

from __future__ import annotations

import copy
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skymagic.errors import CloudError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws import errors
from skymagic.providers.aws.errors import CallSite, ErrorKind
from skymagic.wire.typed import JsonObject

if TYPE_CHECKING:
    import boto3


T = TypeVar("T")
RETRY_SECONDS: Mapping[str, float] = {
    ErrorKind.THROTTLED: 90.0,
    ErrorKind.INTERNAL: 20.0,
    ErrorKind.UNREACHABLE: 15.0,
}
"""Retry budget in seconds of pauses, by kind of error.

Other errors are not retried. If capacity is missing, another zone is tried at once.
"""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 60.0
OPTIONAL_DEADLINES = 0.1
"""Share of the usual time limit that optional queries get."""
SETTLE_PAUSE = 1.0
"""Seconds between two calls while EC2 settles."""
DEFAULT_REGION = "us-east-1"
"""Region for queries that concern no region in particular: region names, prices."""


class AwsClients:
    """boto3 clients for one set of credentials. Thread-safe.

    Credentials and region come from where boto3 finds them: environment, profiles, SSO, machine
    role.

    Args:
        profile: profile of the AWS configuration; None for the environment's.
        endpoint_url: alternative address for all services; None for AWS's own.
        deadline_factor: multiplies all deadlines and pauses; tests wait less.
    """

    def __init__(
        self,
        profile: str | None = None,
        endpoint_url: str | None = None,
        deadline_factor: float = 1.0,
    ) -> None:
        self.profile, self.endpoint_url, self.deadline_factor = (
            profile,
            endpoint_url,
            deadline_factor,
        )
        self._lock = threading.Lock()
        self._session: boto3.Session | None = None
        self._clients: dict[tuple[str, str], Any] = {}

    @classmethod
    def of(cls, settings: CloudSettings) -> AwsClients:
        """Return AWS clients for the profile and the endpoint in a pool's settings."""
        return cls(settings.profile, settings.endpoint_url, settings.deadline_factor)

    @property
    def region(self) -> str | None:
        """Region in the AWS configuration, or None.

        Raises CloudError if the profile does not exist.
        """
        with (
            self._lock,
            _translated_errors(CallSite("the AWS configuration", profile=self.profile or "")),
        ):
            return self._get_session().region_name

    def known_regions(self) -> set[str]:
        """Return all regions that boto3 knows, in all partitions. Makes no call."""
        with (
            self._lock,
            _translated_errors(CallSite("the AWS configuration", profile=self.profile or "")),
        ):
            session = self._get_session()
            partitions = session.get_available_partitions()
            return {
                name
                for partition in partitions
                for name in session.get_available_regions("ec2", partition)
            }

    def with_short_deadlines(self) -> AwsClients:
        """Return a copy for optional queries, with shorter time limits."""
        same = copy.copy(self)  # shares boto3's clients, which are slow to create
        same.deadline_factor *= OPTIONAL_DEADLINES
        return same

    def retry_until_settled(
        self, call: Callable[[], T], seconds: float, passes: Callable[[CloudError], bool]
    ) -> T:
        """Repeat a call until all of EC2 knows about a recent change, and return its answer.

        Args:
            seconds: time limit, multiplied by the deadline factor.
            passes: True for errors that mean EC2 has not settled.

        Raises:
            CloudError: another error, or still the same one at the time limit.
        """
        end = time.monotonic() + seconds * self.deadline_factor
        while True:
            try:
                return call()
            except CloudError as problem:
                if not passes(problem) or time.monotonic() >= end:
                    raise
            time.sleep(SETTLE_PAUSE * self.deadline_factor)

    def call(self, service: str, region: str, operation: str, **parameters: Any) -> JsonObject:
        """Make a call, and repeat it while AWS throttles it, fails internally, or does not answer.

        The call must be idempotent: reading, deleting, or creating with a client token.

        Args:
            service: service name in ``boto3.client``.
            operation: operation name in IAM: ``RunInstances``.

        Raises:
            CloudError: refused, or no answer; see its `kind`.
        """
        call_site = CallSite(f"{service}:{operation}", region, self.profile or "")
        return self._retry(lambda: self._call_once(call_site, service, operation, parameters))

    def pages(
        self, service: str, region: str, operation: str, result: str, **parameters: Any
    ) -> Iterator[Any]:
        """Yield the items under `result` from all pages of a call. Raises like `call`."""
        while True:
            answer = self.call(service, region, operation, **parameters)
            yield from answer.get(result, ())
            if not answer.get("NextToken"):
                return
            parameters["NextToken"] = answer["NextToken"]

    def _retry(self, once: Callable[[], T]) -> T:
        waited, pause = 0.0, FIRST_PAUSE
        while True:
            try:
                return once()
            except CloudError as problem:
                if waited + pause > RETRY_SECONDS.get(problem.kind, 0.0):
                    raise
            # jitter, so that the notebooks of a class of students do not all retry at once
            seconds = random.uniform(pause / 2, pause)
            time.sleep(seconds * self.deadline_factor)
            waited, pause = waited + seconds, min(2 * pause, LONGEST_PAUSE)

    def _call_once(
        self, location: CallSite, service: str, operation: str, parameters: Mapping[str, object]
    ) -> JsonObject:
        from botocore import xform_name

        with _translated_errors(location):
            method = getattr(self._client(service, location.region), xform_name(operation))
            answer: Any = method(**parameters)
        # botocore treats a page as an empty answer if the service speaks JSON
        if _is_page(answer):
            raise errors.page_failure(_status(answer), location)
        return dict(answer)

    def _client(self, service: str, region: str) -> Any:
        with self._lock:  # creating clients is not thread-safe, using them is
            if (service, region) not in self._clients:
                self._clients[service, region] = self._get_session().client(
                    service,  # type: ignore[call-overload]
                    region_name=region,
                    endpoint_url=self.endpoint_url,
                    config=_config(),
                )
            return self._clients[service, region]

    def _get_session(self) -> boto3.Session:
        import boto3

        if self._session is None:
            import botocore.session

            core = botocore.session.Session(profile=self.profile)
            core.register_component("data_loader", _loader())
            self._session = boto3.Session(botocore_session=core)
        return self._session


@contextmanager
def _translated_errors(location: CallSite) -> Iterator[None]:
    """Translate botocore's errors to ours."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as refusal:
        details, status = refusal.response.get("Error", {}), _status(refusal.response)
        if _is_page(refusal.response):
            raise errors.page_failure(status, location) from refusal
        raise errors.refusal(
            details.get("Code", ""), details.get("Message", ""), location, status
        ) from refusal
    except (BotoCoreError, ResponseParserError) as problem:
        names = tuple(base.__name__ for base in type(problem).__mro__)
        raise errors.call_failure(names, str(problem), location) from problem
    except ValueError as problem:
        if not str(problem).startswith("Invalid endpoint"):  # an endpoint_url that is no URL
            raise
        raise errors.call_failure(("InvalidEndpoint",), str(problem), location) from problem


def _status(answer: Any) -> int:
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 400))


def _is_page(answer: Any) -> bool:
    """Return True if an answer is HTML, from a proxy or a network's login page.

    AWS answers in XML and JSON.
    """
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return "html" in headers.get("content-type", "")


@functools.cache
def _loader() -> Any:
    """Return the loader of AWS's service descriptions, shared by all sessions.

    Loading takes ten times as long as all other work for a client.
    """
    from botocore.loaders import create_loader

    return create_loader()


def _config() -> Any:
    from botocore.config import Config

    # botocore's own retries would repeat calls for missing capacity, and hide how long that takes
    return Config(
        retries={"total_max_attempts": 1},
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        user_agent_extra="skymagic",
        max_pool_connections=20,
    )


CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
FILES = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}
"""Names in ~/.aws of boto3's files, by the variable that overrides their path."""


def is_set_up(settings: CloudSettings) -> bool:
    """Return True if ``--provider auto`` may choose AWS.

    That is the case if AWS is configured on this machine, or in the user's settings.
    """
    return is_configured() or settings != CloudSettings()


def is_configured(environ: Mapping[str, str] = os.environ, home: Path | None = None) -> bool:
    """Return True if the environment or a file names credentials or a profile.

    A machine's own role on EC2 does not count.
    """
    if any(environ.get(name) for name in CREDENTIAL_VARIABLES):
        return True
    folder = (home or Path.home()) / ".aws"
    return any(Path(environ.get(name) or folder / file).is_file() for name, file in FILES.items())
