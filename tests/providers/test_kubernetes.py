"""What is asked of Kubernetes and what it says, as values and text: jobs, templates, waits, ends; no cluster is needed."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from skymagic.errors import RequestError
from skymagic.magics.arguments.cell_magics import parse_pool
from skymagic.providers import kubernetes, kubernetes_api
from tests.lab import kube, kube_rules
from tests.lab.golden import Golden
from tests.lab.notebook import ROOT

UNSCHEDULABLE = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."


def manifest(
    job_id: str = "train-1a2b3c4d", template: Any = None, image: str = "python:3.12-slim", options: str = "--gpu A100:8 --memory 64"
) -> Any:  # fmt: skip
    """A Job that an API server takes, as well as the Service that goes with it."""
    resources = kubernetes._resources(
        parse_pool(f"--provider kubernetes --nodes 4 {options}"), template or {}
    )
    made = kubernetes_api.job_manifest(job_id, 4, 3600, resources, image, template or {})
    for each in (made, kubernetes_api.service_of(made, "uid")):
        assert kube_rules.unknown_fields(each) + kube_rules.mistakes(each) == []
    return made


def template_of(**container: Any) -> Any:
    volumes = [{"name": one["name"], "emptyDir": {}} for one in container.get("volumeMounts", [])]
    return {
        "spec": {
            "volumes": volumes,
            "containers": [{"name": "main", "image": "torch:2", **container}],
        }
    }


@pytest.mark.parametrize(
    "job_id",
    ["2024-train-1a2b3c4d", "A_1-1a2b3c4d", "x" * 40 + "-1a2b3c4d", "1" * 40 + "-1a2b3c4d"],
)
def test_an_api_server_takes_the_objects_of_every_name(job_id: str) -> None:
    manifest(job_id)


def test_a_template_with_its_own_shared_memory_keeps_it() -> None:
    pod = manifest(template=template_of(volumeMounts=[{"name": "dshm", "mountPath": "/dev/shm/"}]))[
        "spec"
    ]["template"]
    assert [one["name"] for one in pod["spec"]["volumes"]] == ["dshm"]


def test_a_template_whose_fields_have_nothing_below_them() -> None:
    container = {"name": "main", "image": "torch:2", "resources": None, "volumeMounts": None}
    manifest(
        template={
            "metadata": {"labels": None},
            "spec": {"volumes": None, "containers": [container]},
        }
    )
    manifest(template={"spec": {"containers": None}})


def test_requested_gpus_and_cpus_replace_the_templates() -> None:
    kept = {"requests": {"cpu": "16", "nvidia.com/gpu": 4}, "limits": {"nvidia.com/gpu": 4}}

    def resources(options: str) -> Any:
        made = manifest(template=template_of(resources=kept), options=options)
        return made["spec"]["template"]["spec"]["containers"][0]["resources"]

    assert resources("--gpu 8") == {
        "requests": {"cpu": "16", "nvidia.com/gpu": "8"},
        "limits": {"nvidia.com/gpu": "8"},
    }
    assert resources("--cpus 4 --memory 0.5")["requests"] == {
        "cpu": "4",
        "memory": "0.5G",
        "nvidia.com/gpu": 4,
    }


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"resources": {"limits": {"memory": "1Gi"}}},
            "must be less than or equal to memory limit of 1Gi",
        ),
        ({"volumeMounts": [{"name": "gone", "mountPath": "/x"}]}, "Not found: 'gone'"),
        (
            {"imagePullPolice": "Always"},
            'unknown field "spec.template.spec.containers[0].imagePullPolice"',
        ),
        ({"name": "Main_1"}, "RFC 1123 label"),
        ({"env": [{"name": "A", "value": 1}]}, "cannot unmarshal 1"),
    ],
)
def test_imitation_refuses_as_a_real_server(change: Any, told: str) -> None:
    template = template_of(**change) | {"metadata": {}}
    template["spec"]["volumes"] = []
    resources = kubernetes._resources(parse_pool("--provider kubernetes --memory 64"), template)
    made = kubernetes_api.job_manifest("a-1a2b3c4d", 1, 60, resources, "", template)
    assert told in "; ".join(kube_rules.unknown_fields(made) or kube_rules.mistakes(made))


RESTRICTED = re.findall(
    r"```yaml\n(spec:.*?)```", (ROOT / "docs/how-to/kubernetes.md").read_text(), re.DOTALL
)


def test_the_template_of_the_docs_is_for_restricted_namespaces(golden: Golden) -> None:
    (text,) = RESTRICTED
    assert (
        kube_rules.restricted(manifest(template=yaml.safe_load(text))["spec"]["template"]["spec"])
        == ""
    )
    words = kube_rules.restricted(manifest()["spec"]["template"]["spec"])
    for part in ("allowPrivilegeEscalation", "capabilities", "runAsNonRoot", "seccompProfile"):
        assert part in words
    event = {"type": "Warning", "message": f"Error creating: pods is forbidden: {words}"}
    golden(kubernetes_api.explain_hopeless([], [event]))


CONFIG = """apiVersion: v1
kind: Config
current-context: lab
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: lab, context: {cluster: c, user: u}}, {name: production, context: {cluster: c, user: u, namespace: ml}}]
"""


@pytest.mark.parametrize(
    ("text", "context", "told"),
    [
        (CONFIG, "prodction", "the kubeconfig has no context 'prodction'.*production"),
        (CONFIG, "nowhere", "no context 'nowhere'; available: lab, production"),
        (
            CONFIG.replace("current-context: lab\n", ""),
            "",
            "no cluster is configured here: .*current-context",
        ),
        ("{", "", "no cluster is configured here: "),
        ("", "", "no cluster is configured here: "),
    ],
)
def test_unreachable_kubeconfig_is_explained(
    text: str, context: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(RequestError, match=told):
        kubernetes_api.KubernetesCluster(context)


def test_a_context_has_its_own_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(CONFIG)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    found = [kubernetes_api.KubernetesCluster(context) for context in ("", "production")]
    assert [(one.context, one.namespace) for one in found] == [
        ("lab", "default"),
        ("production", "ml"),
    ]


def test_job_manifest_matches_the_request() -> None:
    made = manifest()
    spec = made["spec"]
    assert (made["metadata"]["name"], spec["completions"], spec["parallelism"]) == (
        "train-1a2b3c4d",
        4,
        4,
    )
    assert (spec["completionMode"], spec["activeDeadlineSeconds"]) == ("Indexed", 3600)
    assert (spec["backoffLimitPerIndex"], spec["podReplacementPolicy"]) == (0, "Failed"), (
        "a pod that is lost is no other's"
    )
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    gpus = {"nvidia.com/gpu": "8"}
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "64G", **gpus},
        "limits": gpus,
    }
    assert container["volumeMounts"] == [{"name": "skymagic-shm", "mountPath": "/dev/shm"}]
    assert pod["volumes"] == [{"name": "skymagic-shm", "emptyDir": {"medium": "Memory"}}]
    assert pod["automountServiceAccountToken"] is False, "cells have no rights in the cluster"
    assert made["metadata"]["labels"]["skymagic/job"] == "train-1a2b3c4d"
    script = kube.expanded(container["command"][2], {"env": [{"name": "id -u", "value": "0"}]})
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
    assert '[ "$up" != $$ ]' in script, "Kubernetes makes $ of $$"
    assert "$(id -u)" in script, "and a variable's value of $(NAME)"


def test_template_is_kept_except_for_required_fields() -> None:
    template = {
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "lab"}, "annotations": {"note": "mine"}},
        "spec": {
            "nodeSelector": {"gpu": "a100"}, "tolerations": [{"key": "gpu"}], "restartPolicy": "Always", "subdomain": "mine",
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            "containers": [
                {
                    "name": "main", "image": "torch:2", "args": ["x"], "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    "resources": {"limits": {"rdma/ib": "1"}},
                },
                {"name": "sidecar", "image": "proxy"},
            ],
        },
    }  # fmt: skip
    made = manifest(template=template, image="")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lab", "Kueue reads the job's"
    pod = made["spec"]["template"]["spec"]
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"gpu": "a100"}, [{"key": "gpu"}])
    assert (pod["restartPolicy"], pod["subdomain"]) == ("Never", "train-1a2b3c4d")
    main, sidecar = pod["containers"]
    assert (main["name"], main["image"], sidecar["image"]) == ("main", "torch:2", "proxy")
    assert "args" not in main
    assert main["resources"]["limits"] == {"rdma/ib": "1", "nvidia.com/gpu": "8"}
    assert [one["mountPath"] for one in main["volumeMounts"]] == ["/data", "/dev/shm"]
    assert made["spec"]["template"]["metadata"]["annotations"] == {"note": "mine"}


@pytest.mark.parametrize(
    ("job_id", "name"),
    [
        ("train-1a2b3c4d", "train-1a2b3c4d"),
        ("My_Pool.v2-1a2b3c4d", "my-pool-v2-1a2b3c4d"),
        ("2024-train-1a2b3c4d", "pool-2024-train-1a2b3c4d"),
        ("x" * 80 + "-1a2b3c4d", "x" * 40 + "-1a2b3c4d"),
    ],
)
def test_objects_have_names_that_kubernetes_takes(job_id: str, name: str) -> None:
    assert kubernetes_api.object_name(job_id) == name


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--gpu all", "--gpu all: the cluster chooses the GPUs: write how many, as in --gpu 8"),
        ("--gpu 0,2", "the cluster chooses the GPUs"),
        (
            "--hosts a --spot",
            "--spot is for rented machines: write --provider aws, or leave it out",
        ),
        ("--address auto", "--address is for Ray"),
        ("--pod-template /nowhere.yaml", "--pod-template /nowhere.yaml: [Errno 2]"),
        (
            "--pods app=train --image torch",
            "--image has no effect with --pods, which uses existing pods as they are",
        ),
    ],
)
def test_impossible_requests_are_refused_offline(line: str, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        kubernetes.Kubernetes().plan(parse_pool(f"--provider kubernetes {line}"), lambda line: None)
    assert told in str(refused.value)


def test_mistakes_with_a_container_are_refused_together(golden: Golden) -> None:
    for line in (
        "--container podman:a/b --image torch --bind /data",
        "--container a/b --pods app=train --gpu 0,2",
    ):
        request = parse_pool(f"--provider kubernetes {line}")
        with golden.raises(RequestError):
            kubernetes.Kubernetes().plan(request, lambda line: None)


def test_a_template_that_is_none_is_refused(golden: Golden, tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text("- a list")
    with golden.raises(RequestError):
        kubernetes._template(str(tmp_path / "pod.yaml"))


def pending(reason: str = "Unschedulable", message: str = UNSCHEDULABLE) -> Any:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return {"metadata": {"name": "p"}, "status": {"phase": "Pending", "conditions": [condition]}}


def container(kind: str, phase: str = "Pending", **fields: Any) -> Any:
    return {
        "metadata": {"name": "p"},
        "status": {"phase": phase, "containerStatuses": [{"state": {kind: fields}}]},
    }


RUNNING = container("running", "Running")


def test_why_pods_wait(golden: Golden) -> None:
    words = kubernetes_api.waiting_words([pending(), pending(), RUNNING], 3, [], False)
    golden(words)
    pulled = container(
        "waiting", reason="ImagePullBackOff", message='Back-off pulling image "nothing"'
    )
    golden(kubernetes_api.waiting_words([pulled], 1, [], False))
    golden(kubernetes_api.explain_hopeless([pulled]))
    quota = [{"type": "Warning", "message": "exceeded quota: lab"}]
    assert kubernetes_api.waiting_words([RUNNING], 3, quota, False) == "2 pods: exceeded quota: lab"
    golden(kubernetes_api.waiting_words([], 2, [], True))
    golden(kubernetes_api.waiting_words([], 2, [], False))
    golden(kubernetes_api.waiting_words([pending("Odd", "")], 1, [], False))
    assert kubernetes_api.waiting_words([RUNNING], 1, [], False) == ""
    creating = container("waiting", reason="ContainerCreating")
    of_pod = [
        {"type": "Normal", "reason": "Pulling", "message": 'Pulling image "large"'},
        {"type": "Warning", "reason": "MissingClusterDNS", "message": "no ClusterDNS"},
    ]
    golden(kubernetes_api.waiting_words([creating, creating], 2, [], False, of_pod))
    of_pod.append({"type": "Warning", "reason": "FailedMount", "message": "no such volume"})
    golden(kubernetes_api.waiting_words([creating], 1, [], False, of_pod))


def test_why_a_pod_is_gone() -> None:
    def disrupted(reason: str, message: str) -> Any:
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": reason,
            "message": message,
        }
        return {
            "metadata": {"deletionTimestamp": "now"},
            "status": {"phase": "Running", "conditions": [condition]},
        }

    deadline = {
        "status": {
            "conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
        }
    }
    evicted = {
        "metadata": {},
        "status": {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
    }
    told: list[tuple[str, Any, Any, Any]] = [
        ("", RUNNING, {}, []),
        ("it was preempted by a pod of higher priority (PreemptionByScheduler: m)", disrupted("PreemptionByScheduler", "m"), {}, []),
        ("its node evicted it (Evicted: low on memory)", evicted, {}, []),
        (
            "it has used more memory than its limit (OOMKilled: exit status 137)",
            container("terminated", "Failed", reason="OOMKilled", exitCode=137), {}, [],
        ),
        ("the pool has reached its --max-lifetime (DeadlineExceeded)", {}, deadline, []),
        ("its node is gone (DeletionByPodGC: node n)", {}, {}, [{"reason": "DeletionByPodGC", "message": "node n"}]),
        ("pod p has ended (Error, exit status 1)", container("terminated", "Failed", reason="Error", exitCode=1), {}, []),
        ("pod p was deleted from outside this notebook", {}, {}, []),
    ]  # fmt: skip
    for words, pod, job, events in told:
        assert kubernetes_api.fate_words("p", pod, job, events) == words


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"status": "Success"}, (0, "")),
        (
            {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "3"}]}},
            (3, ""),
        ),
        ({"status": "Failure", "message": "container not found"}, (-1, "container not found")),
        (None, (-1, "")),
    ],
)
def test_how_a_shell_has_ended(said: Any, status: tuple[int, str]) -> None:
    assert kubernetes_api.exit_status(json.dumps(said).encode() if said else b"") == status


def test_refusals_have_a_remedy(golden: Golden) -> None:
    body = b'{"message":"jobs.batch is forbidden: User \\"ann\\" cannot create resource \\"jobs\\"","code":403}'
    words = kubernetes_api.refusal_words(403, body, "Kubernetes (context lab)")
    assert 'User "ann" cannot create resource "jobs"' in words
    golden(words)
    golden(kubernetes_api.refusal_words(401, b"", "Kubernetes (context lab)"))
