"""What a real API server refuses, for the imitation of one: fields that no object has, values of the wrong kind, and Kubernetes' own rules.

The fields and their kinds are those of the official client's models, which are made from the server's OpenAPI description. The rules are those
that a pool's Job, Service and pods can break, as `pkg/apis/*/validation` of Kubernetes 1.34 and the Pod Security Standards have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
SIMPLE = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "datetime": (str,),
    "object": (object,),
}
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1123; a Service's name begins with a letter besides (RFC 1035)."""
SUBDOMAIN = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?)(m|[kMGTPE]|[KMGTPE]i|e[0-9]+)?")
UNITS = {"": 1.0, "m": 1e-3} | {unit: 1000.0**n for n, unit in enumerate("_kMGTPE")}
UNITS |= {f"{unit}i": 1024.0**n for n, unit in enumerate("_KMGTPE")}


def unknown_fields(body: Json) -> list[str]:
    """What decoding says of an object: fields that are not there (unless it is lenient), and values of the wrong kind."""
    return list(_decoded(f"V1{body['kind']}", body, ""))


def _decoded(kind: str, value: Any, path: str) -> Iterator[str]:
    from kubernetes.client import models

    if inner := re.fullmatch(r"list\[(.*)\]", kind):
        if not isinstance(value, list):
            yield f"json: cannot unmarshal {value!r} into {path.lstrip('.')} of type array"
            return
        for index, one in enumerate(value):
            yield from _decoded(inner[1], one, f"{path}[{index}]")
    elif inner := re.fullmatch(r"dict[\[(]str, (.*)[\])]", kind):
        for key, one in value.items():
            quantity = path.endswith((".requests", ".limits")) and isinstance(one, int)
            yield from () if quantity else _decoded(inner[1], one, f"{path}.{key}")
    elif simple := SIMPLE.get(kind):
        if not isinstance(value, simple) or (
            isinstance(value, bool) and bool not in simple and object not in simple
        ):
            yield f"json: cannot unmarshal {value!r} into {path.lstrip('.')} of type {kind}"
    elif not isinstance(value, dict):
        yield f"json: cannot unmarshal {value!r} into {path.lstrip('.')} of type {kind}"
    else:
        model = getattr(models, kind)
        fields = {wire: name for name, wire in model.attribute_map.items()}
        for key, one in value.items():
            if key not in fields:
                yield f'unknown field "{path.lstrip(".")}.{key}"'.replace('".', '"')
            elif one is not None:
                yield from _decoded(model.openapi_types[fields[key]], one, f"{path}.{key}")


def mistakes(body: Json) -> list[str]:
    """Why an object is refused, as a server says it."""
    return list({"Job": _job, "Service": _service, "Pod": _pod_object}[body["kind"]](body))


def _metadata(metadata: Json, path: str) -> Iterator[str]:
    for kind in ("labels", "annotations"):
        for key, value in metadata.get(kind, {}).items():
            prefix, _, name = key.rpartition("/")
            if (
                not VALUE.fullmatch(name)
                or not name
                or (prefix and not SUBDOMAIN.fullmatch(prefix))
            ):
                yield f"{path}.{kind}: Invalid value: {key!r}: name part must consist of alphanumeric characters, '-', '_' or '.'"
            if kind == "labels" and not VALUE.fullmatch(value):
                yield f"{path}.{kind}: Invalid value: {value!r}: a valid label must be an empty string or consist of alphanumeric characters"
    for one in metadata.get("ownerReferences", []):
        yield from (f"{path}.ownerReferences.{key}: Required value" for key in ("apiVersion", "kind", "name", "uid") if not one.get(key))  # fmt: skip


def _job(body: Json) -> Iterator[str]:
    metadata, spec = body["metadata"], body["spec"]
    yield from _metadata(metadata, "metadata")
    if not SUBDOMAIN.fullmatch(metadata["name"]):
        yield f"metadata.name: Invalid value: {metadata['name']!r}: a lowercase RFC 1123 subdomain"
    for key in ("completions", "parallelism", "activeDeadlineSeconds", "backoffLimitPerIndex", "ttlSecondsAfterFinished"):  # fmt: skip
        if spec.get(key, 0) < 0:
            yield f"spec.{key}: Invalid value: {spec[key]}: must be greater than or equal to 0"
    indexed, template = spec.get("completionMode") == "Indexed", spec["template"]
    if indexed:
        if "completions" not in spec:
            yield "spec.completions: Required value: when completion mode is Indexed"
        last = f"{metadata['name']}-{spec.get('completions', 1) - 1}"
        if not LABEL.fullmatch(last):
            yield f"metadata.name: Invalid value: {last!r}: will not able to create pod with invalid DNS label"
    restart = template["spec"].get("restartPolicy", "Always")
    if restart not in ("Never", "OnFailure"):
        yield f"spec.template.spec.restartPolicy: Unsupported value: {restart!r}"
    if "backoffLimitPerIndex" in spec and not (indexed and restart == "Never"):
        yield "spec.backoffLimitPerIndex: Invalid value: requires indexed completion mode and restartPolicy Never"
    if spec.get("podReplacementPolicy", "Failed") not in ("Failed", "TerminatingOrFailed"):
        yield "spec.podReplacementPolicy: Unsupported value"
    yield from _metadata(template.get("metadata", {}), "spec.template.metadata")
    yield from _pod(template["spec"], "spec.template.spec")


def _service(body: Json) -> Iterator[str]:
    metadata, spec = body["metadata"], body["spec"]
    yield from _metadata(metadata, "metadata")
    if not LABEL.fullmatch(metadata["name"]) or metadata["name"][0].isdigit():
        yield f"metadata.name: Invalid value: {metadata['name']!r}: a DNS-1035 label must start with an alphabetic character"
    if not spec.get("ports") and spec.get("clusterIP") != "None":
        yield "spec.ports: Required value"
    yield from _metadata({"labels": spec.get("selector", {})}, "spec.selector")


def _pod_object(body: Json) -> Iterator[str]:
    yield from _metadata(body["metadata"], "metadata")
    yield from _pod(body["spec"], "spec")


def _pod(spec: Json, path: str) -> Iterator[str]:
    for key in ("hostname", "subdomain"):
        if key in spec and not LABEL.fullmatch(spec[key]):
            yield f"{path}.{key}: Invalid value: {spec[key]!r}: a lowercase RFC 1123 label"
    volumes = [one["name"] for one in spec.get("volumes", [])]
    for index, one in enumerate(spec.get("volumes", [])):
        if volumes.index(one["name"]) < index:
            yield f"{path}.volumes[{index}].name: Duplicate value: {one['name']!r}"
        if len(one) == 1:
            yield f"{path}.volumes[{index}]: Required value: must specify a volume type"
    containers = [*(spec.get("containers") or [])]
    if not containers:
        yield f"{path}.containers: Required value"
    names = [one.get("name", "") for one in containers]
    for index, one in enumerate(containers):
        where = f"{path}.containers[{index}]"
        if not LABEL.fullmatch(names[index]):
            yield f"{where}.name: Invalid value: {names[index]!r}: a lowercase RFC 1123 label"
        if names.index(names[index]) < index:
            yield f"{where}.name: Duplicate value: {names[index]!r}"
        yield from _container(one, where, volumes)


def _container(one: Json, path: str, volumes: list[str]) -> Iterator[str]:
    if not one.get("image"):
        yield f"{path}.image: Required value"
    elif one["image"] != one["image"].strip():
        yield f"{path}.image: Invalid value: {one['image']!r}: must not have leading or trailing whitespace"
    mounts = one.get("volumeMounts", [])
    paths = [each["mountPath"] for each in mounts]
    for index, each in enumerate(mounts):
        if each["name"] not in volumes:
            yield f"{path}.volumeMounts[{index}].name: Not found: {each['name']!r}"
        if paths.index(each["mountPath"]) < index:
            yield f"{path}.volumeMounts[{index}].mountPath: Invalid value: {each['mountPath']!r}: must be unique"
    resources = one.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name, amount in [*requests.items(), *limits.items()]:
        if not QUANTITY.fullmatch(str(amount)):
            yield f"{path}.resources: Invalid value: {amount!r}: quantities must match the regular expression"
            return
        if "/" in name and not str(amount).isdigit():
            yield f"{path}.resources: Invalid value: {amount!r}: must be an integer"
    for name, amount in requests.items():
        if "/" in name and name not in limits:
            yield f"{path}.resources.limits: Required value: Limit must be set for non overcommitable resources"
        elif "/" in name and str(amount) != str(limits[name]):
            yield f"{path}.resources.requests: Invalid value: {str(amount)!r}: must be equal to {name} limit of {limits[name]}"
        elif name in limits and _number(amount) > _number(limits[name]):
            yield f"{path}.resources.requests: Invalid value: {str(amount)!r}: must be less than or equal to {name} limit of {limits[name]}"


def _number(amount: object) -> float:
    found = QUANTITY.fullmatch(str(amount))
    assert found is not None
    return float(found[1]) * (
        UNITS[unit] if (unit := found[2] or "") in UNITS else float(f"1{unit}")
    )


def restricted(spec: Json) -> str:
    """Why a namespace with ``pod-security.kubernetes.io/enforce: restricted`` has no such pod; "" where it may have it."""
    pod, told = spec.get("securityContext", {}), []
    for one in [*spec["containers"], *spec.get("initContainers", [])]:
        own, name = one.get("securityContext", {}), one["name"]
        if own.get("allowPrivilegeEscalation") is not False:
            told.append(
                f'allowPrivilegeEscalation != false (container "{name}" must set securityContext.allowPrivilegeEscalation=false)'
            )
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            told.append(
                f'unrestricted capabilities (container "{name}" must set securityContext.capabilities.drop=["ALL"])'
            )
        if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            told.append(
                f'runAsNonRoot != true (pod or container "{name}" must set securityContext.runAsNonRoot=true)'
            )
        if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in (
            "RuntimeDefault",
            "Localhost",
        ):
            told.append(
                f'seccompProfile (pod or container "{name}" must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost")'
            )
    kinds = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    if barred := [one["name"] for one in spec.get("volumes", []) if not kinds & one.keys()]:
        told.append(f"restricted volume types (volumes {barred} use restricted volume types)")
    if spec.get("hostNetwork") or spec.get("hostPID") or spec.get("hostIPC"):
        told.append("host namespaces")
    return f'violates PodSecurity "restricted:latest": {", ".join(told)}' if told else ""
