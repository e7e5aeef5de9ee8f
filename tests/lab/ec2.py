"""EC2 for the tests: moto in this process behind a real HTTP server, with faults that a test scripts.

::

    with ec2() as cloud:
        client = boto3.client("ec2", region_name="us-east-1", endpoint_url=cloud.url, **CREDENTIALS)
        cloud.on("RunInstances", error("InsufficientInstanceCapacity"), when=zone("us-east-1a"))
        cloud.on("RunInstances", lost)                 # carried out, and nobody is told
        cloud.calls                                    # all that were made: action, parameters, region

What moto lacks and EC2 has is added: idempotency by ClientToken, placement groups, the public parameters of images. Addresses:
instances in the subnet that `loopback_subnet` makes have 127.0.0.4, .5, …, where real sshd's can listen. The public addresses
that moto invents may be somebody's: nothing here connects to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

REGION = "us-east-1"
CREDENTIALS = {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "secret-of-the-tests"}
ACCOUNT = "123456789012"
IMAGE = "ami-03cf127a"
"""The image that moto has."""
IMAGES = Path(__file__).with_name("images.json")
"""All that moto knows of images: it makes its own, 1300 for each region, anew whenever it forgets, in 0.1 s of CPU."""
PLACEMENTS: dict[tuple[str, str], dict[str, str]] = {}
"""Placement groups, which moto lacks: (region, name) → tags, as filters name them."""
NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"


@dataclass(frozen=True)
class Call:
    """A request as it came: `fields` are its parameters, flat ("Filter.1.Name") for EC2, the JSON's own elsewhere."""

    service: str
    region: str
    action: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What goes back."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class AnswerLost(Exception):
    """The connection breaks instead of an answer."""


CarryOut = Callable[[], Answer]
"""Has moto do what was asked."""
Effect = Callable[[Call, CarryOut], Answer]
"""What becomes of a call."""


@dataclass
class Rule:
    """An effect on the next calls of an action."""

    action: str
    effect: Effect
    times: int
    when: Callable[[Call], bool]


# -- effects -----------------------------------------------------------------------------------------------------------


def error(code: str, message: str = "injected", status: int = 400) -> Effect:
    """Refused with this code; nothing is done."""
    return lambda call, carry_out: refusal(call, code, message, status)


def lost(call: Call, carry_out: CarryOut) -> Answer:
    """Carried out, and the answer is lost on its way."""
    carry_out()
    raise AnswerLost


def unreached(call: Call, carry_out: CarryOut) -> Answer:
    """The connection breaks before anything is done."""
    raise AnswerLost


def empty(call: Call, carry_out: CarryOut) -> Answer:
    """DescribeInstances that knows of nothing yet, as EC2 may right after a launch: an error where it was asked by id."""
    if "InstanceId.1" in call.fields:
        return refusal(
            call,
            "InvalidInstanceID.NotFound",
            f"The instance ID '{call.fields['InstanceId.1']}' does not exist",
            400,
        )
    return _xml(
        f'<{call.action}Response xmlns="{NAMESPACE}"><requestId>r</requestId><reservationSet/></{call.action}Response>'
    )


def state(name: str, reason: str = "") -> Effect:
    """The launch succeeds, and its instances are in this state afterwards: ``pending``, or ``terminated`` with a reason."""

    def effect(call: Call, carry_out: CarryOut) -> Answer:
        before = {each.id for each in instances(call.region)}
        answer = carry_out()
        for each in instances(call.region):
            if each.id not in before:
                set_state(each, name, reason)
        return answer

    return effect


def regions(*names: str) -> Effect:
    """DescribeRegions of an account that uses these alone; moto has all, and takes a while to make each."""
    items = "".join(f"<item><regionName>{name}</regionName></item>" for name in names)
    text = f'<DescribeRegionsResponse xmlns="{NAMESPACE}"><regionInfo>{items}</regionInfo></DescribeRegionsResponse>'
    return lambda call, carry_out: _xml(text)


def listed(name: str, items: list[dict[str, str]]) -> Effect:
    """An answer of EC2's that is a list of flat things, which moto lacks."""
    rows = "".join(
        f"<item>{''.join(f'<{key}>{escape(value)}</{key}>' for key, value in one.items())}</item>"
        for one in items
    )
    return lambda call, carry_out: _xml(
        f'<{call.action}Response xmlns="{NAMESPACE}"><{name}>{rows}</{name}></{call.action}Response>'
    )


def after(done: Callable[[Call], object]) -> Effect:
    """Carried out; then this is called, and then it is answered."""

    def effect(call: Call, carry_out: CarryOut) -> Answer:
        answer = carry_out()
        done(call)
        return answer

    return effect


def reply(body: object) -> Effect:
    """This as JSON, for services that moto lacks."""
    return lambda call, carry_out: Answer(
        200, json.dumps(body).encode(), {"Content-Type": "application/x-amz-json-1.1"}
    )


# -- when --------------------------------------------------------------------------------------------------------------


def any_call(call: Call) -> bool:
    """All calls."""
    return True


def zone(name: str) -> Callable[[Call], bool]:
    """Launches in this zone, named or by its subnet."""

    def when(call: Call) -> bool:
        named = call.fields.get("Placement.AvailabilityZone")
        subnet = call.fields.get("NetworkInterface.1.SubnetId") or call.fields.get("SubnetId")
        return bool(
            name
            == (named or (subnet and backend(call.region).get_subnet(subnet).availability_zone))
        )

    return when


# -- the server --------------------------------------------------------------------------------------------------------


class EC2:
    """The server, its script of faults, and the record of all calls.

    Attributes:
        url: for ``endpoint_url``; all services answer there.
        calls: what was asked, in order; refused and lost calls are among them.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.url = ""
        self._rules: list[Rule] = []
        self._launches: dict[str, tuple[Mapping[str, Any], Answer]] = {}
        """By region and client token."""
        self._lock = threading.RLock()

    def on(
        self,
        action: str,
        effect: Effect,
        *,
        times: int = 1,
        when: Callable[[Call], bool] = any_call,
    ) -> None:
        """Script the next calls of an action: the first rule that applies counts, so many times. ``"*"`` is every action."""
        self._rules.append(Rule(action, effect, times, when))

    def forget(self) -> None:
        """As new: nothing there, no faults, no calls so far."""
        from moto.moto_api._internal.models import moto_api_backend

        with self._lock:
            moto_api_backend.reset()
            for kept in (self._rules, self.calls, self._launches, PLACEMENTS):
                kept.clear()

    def actions(self) -> list[str]:
        """The actions that were called, in order, as IAM names them."""
        return [f"{call.service}:{call.action}" for call in self.calls]

    # -- a call --------------------------------------------------------------------------------------------------------

    def __call__(self, environ: dict[str, Any], start: Callable[..., object]) -> list[bytes]:
        """WSGI."""
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        call = parse(environ, body)
        with self._lock:  # moto's models are not made for threads
            self.calls.append(call)
            try:
                answer = self._effect(call)(call, lambda: self._carry_out(call, environ, body))
            except AnswerLost:
                with contextlib.suppress(OSError):
                    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError from None
        start(
            f"{answer.status} X",
            [*answer.headers.items(), ("Content-Length", str(len(answer.body)))],
        )
        return [answer.body]

    def _effect(self, call: Call) -> Effect:
        for rule in self._rules:
            if rule.times > 0 and rule.action in (call.action, "*") and rule.when(call):
                rule.times -= 1
                return rule.effect
        return lambda call, carry_out: carry_out()

    def _carry_out(self, call: Call, environ: Mapping[str, Any], body: bytes) -> Answer:
        if call.action == "RunInstances":
            return self._launch(call, environ, body)
        if call.action.endswith(("PlacementGroup", "PlacementGroups")):
            return self._placement_group(call)
        if call.action == "GetParameter" and str(call.fields.get("Name", "")).startswith(
            "/aws/service/"
        ):
            return _json(
                {"Parameter": {"Name": call.fields["Name"], "Type": "String", "Value": IMAGE}}
            )
        return _moto(call, environ, body)

    def _launch(self, call: Call, environ: Mapping[str, Any], body: bytes) -> Answer:
        """Idempotent by its token, as in EC2: the same answer again, and an error where the parameters differ."""
        token = call.fields.get("ClientToken")
        key = f"{call.region} {token}"
        if token and key in self._launches:
            fields, answer = self._launches[key]
            words = "Arguments on this idempotent request are inconsistent with arguments used in previous request(s)."
            return (
                answer
                if fields == call.fields
                else refusal(call, "IdempotentParameterMismatch", words, 400)
            )
        before = {each.id for each in instances(call.region)}
        answer = _moto(call, environ, body)
        if "NetworkInterface.2.DeviceIndex" in call.fields:
            for each in instances(call.region):
                if each.id not in before:  # EC2 gives none to a machine with several network cards
                    each.nics[0].stop()
                    each.nics[0].public_ip = None
                    each.nics[0].public_ip_auto_assign = False  # nor when it is started again
        if token and answer.status == 200:
            self._launches[key] = (call.fields, answer)
        return answer

    def _placement_group(self, call: Call) -> Answer:
        if call.fields.get("DryRun") == "true":
            return refusal(
                call,
                "DryRunOperation",
                "Request would have succeeded, but DryRun flag is set.",
                412,
            )
        if call.action == "DescribePlacementGroups":
            return _xml(
                f'<{call.action}Response xmlns="{NAMESPACE}"><requestId>r</requestId><placementGroupSet>'
                + "".join(
                    f"<item><groupName>{name}</groupName><state>available</state></item>"
                    for (region, name), tags in PLACEMENTS.items()
                    if region == call.region
                    and tags.get(call.fields["Filter.1.Name"]) == call.fields["Filter.1.Value.1"]
                )
                + f"</placementGroupSet></{call.action}Response>"
            )
        key = (call.region, call.fields["GroupName"])
        if call.action == "CreatePlacementGroup":
            if key in PLACEMENTS:
                return refusal(
                    call,
                    "InvalidPlacementGroup.Duplicate",
                    f"The Placement Group '{key[1]}' exists.",
                    400,
                )
            tag = "TagSpecification.1.Tag"
            PLACEMENTS[key] = {
                f"tag:{value}": call.fields[f"{name.removesuffix('.Key')}.Value"]
                for name, value in call.fields.items()
                if name.startswith(tag) and name.endswith(".Key")
            }
        elif key not in PLACEMENTS:
            return refusal(
                call,
                "InvalidPlacementGroup.Unknown",
                f"The Placement Group '{key[1]}' is unknown.",
                400,
            )
        elif any(
            one.placement.group_name == key[1]
            for one in instances(call.region)
            if one.state != "terminated"
        ):
            return refusal(
                call,
                "InvalidPlacementGroup.InUse",
                f"The placement group '{key[1]}' is in use.",
                400,
            )
        else:
            del PLACEMENTS[key]
        return _xml(
            f'<{call.action}Response xmlns="{NAMESPACE}"><requestId>r</requestId><return>true</return></{call.action}Response>'
        )


def environment() -> dict[str, str]:
    """What a process needs in its environment to be let in here, and to look nowhere else."""
    nowhere = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }
    return {**{name.upper(): value for name, value in CREDENTIALS.items()}, **nowhere}


@contextmanager
def ec2() -> Iterator[EC2]:
    """An EC2 that nobody has used before, until the end of the block."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *args: object) -> None:
            """Nothing."""

    os.environ.setdefault("MOTO_AMIS_PATH", str(IMAGES))  # read when moto is imported
    cloud = EC2()
    cloud.forget()
    server = make_server("127.0.0.1", 0, cloud, threaded=True, request_handler=Silent)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    cloud.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield cloud
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        cloud.forget()


def parse(environ: Mapping[str, Any], body: bytes) -> Call:
    """A request's action and parameters; service and region are those that it was signed for."""
    _, _, region, service, *_ = (
        environ["HTTP_AUTHORIZATION"].partition("Credential=")[2].partition(",")[0].split("/")
    )
    target = environ.get("HTTP_X_AMZ_TARGET")
    if target:
        return Call(service, region, target.rpartition(".")[2], json.loads(body or b"{}"))
    fields = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
    return Call(
        service,
        region,
        fields.pop("Action", ""),
        {k: v for k, v in fields.items() if k != "Version"},
    )


def _moto(call: Call, environ: Mapping[str, Any], body: bytes) -> Answer:
    from botocore.awsrequest import AWSPreparedRequest
    from botocore.compat import HTTPHeaders
    from moto.core.botocore_stubber import BotocoreStubber

    headers = HTTPHeaders()
    for name, value in environ.items():
        if name.startswith("HTTP_") or name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            headers[name.removeprefix("HTTP_").replace("_", "-").title()] = value
    url = f"https://{call.service}.{call.region}.amazonaws.com/"
    del headers["Host"]
    request = AWSPreparedRequest(environ["REQUEST_METHOD"], url, headers, body, False)
    answer = BotocoreStubber().process_request(request)
    assert answer is not None, call
    status, found, text = answer
    kept = {name: str(value) for name, value in found.items() if name.lower() != "content-length"}
    return Answer(status, text.encode() if isinstance(text, str) else text, kept)


def refusal(call: Call, code: str, message: str, status: int) -> Answer:
    """An error as the service of a call writes it."""
    if call.service == "ec2":
        return _xml(
            f"<Response><Errors><Error><Code>{code}</Code><Message>{escape(message)}</Message></Error></Errors>"
            "<RequestID>r</RequestID></Response>",
            status,
        )
    if call.service == "sts":
        return _xml(
            f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
            "<RequestId>r</RequestId></ErrorResponse>",
            status,
        )
    return _json({"__type": code, "message": message}, status)


def _xml(text: str, status: int = 200) -> Answer:
    return Answer(
        status,
        f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(),
        {"Content-Type": "text/xml"},
    )


def _json(body: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/x-amz-json-1.1"})


# -- what lies behind the API ------------------------------------------------------------------------------------------


def backend(region: str = REGION) -> Any:
    """moto's EC2 of a region."""
    from moto.backends import get_backend

    return get_backend("ec2")[ACCOUNT][region]


def permitted() -> set[str]:
    """The actions that the policies of docs/how-to/aws.md allow; who asks for an identity needs no permission."""
    page = Path(__file__).resolve().parents[2] / "docs/how-to/aws.md"
    return {
        "sts:GetCallerIdentity",
        *re.findall(r'"((?:ec2|ssm|pricing|sts):\w+)"', page.read_text()),
    }


def instances(region: str = REGION) -> list[Any]:
    """All instances that were ever launched there, as moto's models."""
    return list(backend(region).all_instances())


def set_state(instance: Any, name: str, reason: str = "") -> None:
    """Put an instance into a state; a terminated one gives its disks and addresses back.

    Args:
        reason: its code, as in ``Server.InsufficientInstanceCapacity``.
    """
    if name == "terminated" and instance.state != "terminated":
        instance.terminate()
    instance._state.name = name
    instance._state.code = {
        "pending": 0,
        "running": 16,
        "shutting-down": 32,
        "terminated": 48,
        "stopped": 80,
    }[name]
    if reason:
        instance.state_reason.code, instance.state_reason.message = reason, f"{reason}: injected"


def left(*regions: str) -> dict[str, list[str]]:
    """What is there and costs money, or would be in the way: kind → ids; empty when nothing is left."""
    found: dict[str, list[str]] = {}
    for region in regions or (REGION,):
        there = backend(region)
        kinds = {
            "instances": [each.id for each in there.all_instances() if each.state != "terminated"],
            "volumes": list(there.volumes),
            "groups": [one.id for one in there.describe_security_groups() if one.name != "default"],
            "addresses": [each.allocation_id for each in there.describe_addresses()],
            "placements": [name for where, name in PLACEMENTS if where == region],
            "keys": [each.name for each in there.describe_key_pairs([])],
        }
        for kind, ids in kinds.items():
            found.setdefault(kind, []).extend(ids)
    return {kind: ids for kind, ids in found.items() if ids}


def loopback_subnet(zone_name: str = f"{REGION}a", region: str = REGION, number: int = 0) -> str:
    """The id of a new subnet 127.0.`number`.0/24: its instances' private addresses are this machine's."""
    there = backend(region)
    vpc = next((one for one in there.describe_vpcs() if one.cidr_block == "127.0.0.0/16"), None)
    vpc = vpc or there.create_vpc("127.0.0.0/16")
    return str(there.create_subnet(vpc.id, f"127.0.{number}.0/24", availability_zone=zone_name).id)
