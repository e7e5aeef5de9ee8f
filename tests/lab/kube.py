"""A Kubernetes cluster for the tests: an imitation of its API server over TLS, and pods that are real processes in namespaces of their own.

::

    with kube(tmp_path) as cluster:
        cluster.env                        # what a notebook needs to find it: KUBECONFIG
        cluster.pods(), cluster.jobs(), cluster.left()
        cluster.deny("pods", "list")       # a right that is missing
        cluster.evict("train-…-1-abcde")   # with its reason, SIGTERM, and SIGKILL after a while

The official client drives it. It imitates what a pool uses, as Kubernetes 1.34 does: Indexed Jobs with their limits and deadline, Services,
pods with lists and watches, exec (v5.channel.k8s.io), events, rights verb by verb, tokens that expire, and owners whose end is that of what
they own. Pods have an address of their own on a switch, a process table, a hostname, an empty /tmp and a /dev/shm as large as they ask for;
the rest of their files is this machine's. Their images are names. It needs root.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import ipaddress
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tornado.httpserver
import tornado.netutil
import tornado.web
import tornado.websocket
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.lab import kube_rules
from tests.lab.hosts import shared_code
from tests.lab.machines import Space, Switch
from tests.lab.notebook import ROOT

Json = dict[str, Any]
NETWORK = "10.79.0"
V5 = "v5.channel.k8s.io"
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
CHUNK = 32 << 10
FINISHED = ("Succeeded", "Failed")
DEADLINE = 20.0
# The first process of a pod's namespaces: what a container runtime does before the container's own command, which takes its place.
RUNTIME = """
import json, os, subprocess, sys
spec = json.loads(sys.argv[1])
def mount(*words): subprocess.run(["mount", *words], check=True)
subprocess.run(["hostname", spec["hostname"]], check=True)
mount("--bind", spec["hosts"], "/etc/hosts")
mount("--bind", spec["checkout"], "/mnt")
mount("--bind", sys.base_prefix, "/media")
mount("--bind", spec["code"], "/srv")
mount("-t", "tmpfs", "-o", "size=2g,mode=1777", "tmp", "/tmp")
if not spec["user"]:  # as on hosts (`share_code`)
    os.makedirs("/tmp/root/.skymagic", 0o700)
    os.symlink("/srv", "/tmp/root/.skymagic/code")
def closed(path):
    above = [path[:n] for n, each in enumerate(path) if each == "/" and n]
    return next((each for each in above if os.path.exists(each) and not os.stat(each).st_mode & 1), "")
for path, spot in (spec["checkout"], "/mnt"), (sys.base_prefix, "/media"):
    if spec["user"] and (folder := closed(path)):  # as root's home: nobody else may look into it
        mount("-t", "tmpfs", "-o", "mode=755", "closed", folder)
    if not os.path.exists(path):  # the interpreter of the tests is one of the machine's
        os.makedirs(path)
        mount("--bind", spot, path)
for path, options in spec["mounts"]:
    os.makedirs(path, exist_ok=True)
    mount("-t", "tmpfs", "-o", options, "volume", path)
for path, files in spec["files"]:
    mount("-t", "tmpfs", "files", path)
    for name, text in files.items():
        open(os.path.join(path, name), "w").write(text)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
print("up", flush=True)
sys.stdin.readline()
null = os.open(os.devnull, os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(null, number)
os.chdir("/")
if spec["user"]:
    os.setgroups([]); os.setgid(0); os.setuid(spec["user"])
os.execve(spec["command"][0], spec["command"], spec["env"])
"""


def expanded(text: str, container: Json) -> str:
    """A word of a container's command as a kubelet hands it on: ``$$`` is ``$``, and ``$(NAME)`` a variable of the spec, if there is one."""
    variables = {f"$({one['name']})": str(one["value"]) for one in container.get("env", [])}
    return re.sub(
        r"\$\$|\$\([^)]*\)",
        lambda found: "$" if found[0] == "$$" else variables.get(found[0], found[0]),
        text,
    )


class ContainerSpace(Space):
    """The namespaces of a pod; the first process is its container's."""

    def __init__(self, spec: Json) -> None:
        import subprocess
        import sys

        apart = ["--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
        self._process = subprocess.Popen(
            ["unshare", "--net", *apart, sys.executable, "-c", RUNTIME, json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "up\n":
            self.close()
            raise AssertionError("a pod could not be made")
        self.pid = psutil.Process(self._process.pid).children()[0].pid
        self.enter = [
            "nsenter",
            "--target",
            str(self.pid),
            "--net",
            "--uts",
            "--ipc",
            "--pid",
            "--mount",
        ]

    def go(self) -> None:
        """Start the container's own command."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """The exit status of the container, once it has ended."""
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Signal the first process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def processes(self) -> list[psutil.Process]:
        """All that runs in it."""
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        return []


@dataclass
class Pod:
    """A pod: its object, and what runs for it, if anything does."""

    body: Json
    space: ContainerSpace | None = None
    ending: str = ""
    """Why it is being ended, for its container's state."""

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def phase(self) -> str:
        return str(self.body["status"]["phase"])

    @property
    def index(self) -> int:
        """Its number in its job; -1 for a pod that somebody else has made."""
        return _index(self.body)

    @property
    def container(self) -> Json:
        return dict(self.body["spec"]["containers"][0])


@dataclass
class ApiError(Exception):
    """An answer that is a Status."""

    code: int
    reason: str
    message: str

    def body(self) -> Json:
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        }  # fmt: skip


@dataclass
class Kube:
    """A cluster that runs.

    Attributes:
        env: what a notebook needs to find it.
        version: what it says it is. gpus: of all its nodes together. images: that can be pulled. quota: pods of a namespace, at most.
        suspends: whether a queue such as Kueue holds jobs back. grace: seconds between SIGTERM and SIGKILL.
        silent_limit: seconds without a byte from the client after which an exec is cut; None for never.
        user: number of the user that images say containers run as; 0 for root. restricted: whether the namespace enforces that standard.
    """

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    version: tuple[str, str] = ("1", "34")
    gpus: int = 8
    images: tuple[str, ...] = ("python", "torch")
    quota: int = 100
    suspends: bool = False
    grace: float = 30.0
    silent_limit: float | None = None
    user: int = 0
    restricted: bool = False
    held: bool = False
    """Whether pods stay unscheduled."""
    denied: set[tuple[str, str]] = field(default_factory=set)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(verb, resource) of all that came."""
    lost_answer: int = -1
    """Number of the request whose answer is lost: carried out, and the connection breaks."""
    execs: list[ExecHandler] = field(default_factory=list)
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    sent: list[str] = field(default_factory=list)
    """All that a client has said besides its token: bodies, and addresses with the command lines of exec; audit logs have them."""
    files: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Folders of every pod with their files, such as a service account's."""

    def __post_init__(self) -> None:
        self._jobs: dict[str, Json] = {}
        self._services: dict[str, Json] = {}
        self._pods: dict[str, Pod] = {}
        self._events: list[Json] = []
        self._numbers, self._addresses = itertools.count(1), itertools.count(1)
        self._changes: list[tuple[int, str, Json]] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._switch = Switch()
        self.loop = asyncio.new_event_loop()
        """Of the server's thread."""

    # -- what tests see and do ---------------------------------------------------------------------------------------------

    def pods(self) -> list[str]:
        """The names of all pods, in their order."""
        with self._lock:
            return sorted(self._pods)

    def made(self) -> list[Pod]:
        """All pods."""
        with self._lock:
            return list(self._pods.values())

    def pod(self, index: int) -> Pod:
        """The pod of an index of the one job."""
        return next(one for one in self.made() if one.index == index)

    def jobs(self) -> list[str]:
        """The names of all jobs."""
        with self._lock:
            return sorted(self._jobs)

    def job(self) -> Json:
        """The one job."""
        with self._lock:
            (found,) = self._jobs.values()
            return found

    def left(self) -> list[str]:
        """All that is there, in words."""
        with self._lock:
            found = [
                *(f"job {one}" for one in self._jobs),
                *(f"service {one}" for one in self._services),
            ]
            return found + [f"pod {one.name} ({one.phase})" for one in self._pods.values()]

    def wait(self, over: Callable[[], object], seconds: float = DEADLINE) -> None:
        """Until that is so; asked again after each change."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not over():
                assert time.monotonic() < deadline, self.left()
                self._changed.wait(0.2)

    def deny(self, resource: str, verb: str) -> None:
        """Take a right away: ``("pods/exec", "get")``."""
        self.denied.add((resource, verb))

    def expire(self) -> None:
        """Let the token of the kubeconfig expire."""
        self.token = secrets.token_hex(16)

    def release(self) -> None:
        """Let pods run that were held back by `held`, or by `suspends`."""
        self.held = False
        with self._changed:
            for job in self._jobs.values():
                if job["spec"].get("suspend"):
                    job["spec"]["suspend"] = False
                    self._make_pods(job)
            for one in list(self._pods.values()):
                self._schedule(one)

    def evict(
        self,
        name: str,
        reason: str = "EvictionByEvictionAPI",
        message: str = "Eviction API: evicting",
    ) -> None:
        """Take a pod away as a drain, or the scheduler, does."""
        with self._changed:
            pod = self._pods[name]
            pod.body["status"].setdefault("conditions", []).append(
                _condition("DisruptionTarget", reason, message)
            )
            self._event(name, "Normal", "Preempted" if "Preempt" in reason else "Evicted", message)
            self._end(pod, "Completed")

    def power_cut(self, name: str) -> None:
        """Let the node of a pod lose its power; its object is collected, as after some minutes."""
        with self._changed:
            pod = self._pods[name]
            assert pod.space is not None
            self._event(name, "Warning", "DeletionByPodGC", "PodGC: node not found")
            pod.ending = "Error"
            pod.body["metadata"]["deletionTimestamp"] = _now()
        pod.space.close()

    def run_out_of_memory(self, name: str) -> None:
        """Kill all that runs in a pod as the kernel does when it has reached its limit."""
        with self._lock:
            pod = self._pods[name]
            pod.ending = "OOMKilled"
        assert pod.space is not None
        pod.space.signal(signal.SIGKILL)

    def cut(self) -> None:
        """Cut all connections of exec, as a proxy does after five minutes."""
        for one in list(self.execs):
            one.cut()

    def processes(self) -> list[psutil.Process]:
        """All that runs in pods."""
        with self._lock:
            return [
                process
                for pod in self._pods.values()
                if pod.space
                for process in pod.space.processes()
            ]

    # -- objects -----------------------------------------------------------------------------------------------------------

    def _note(self, kind: str, body: Json) -> None:
        """A pod has changed: whoever watches hears of it."""
        number = next(self._numbers)
        body["metadata"]["resourceVersion"] = str(number)
        self._changes.append((number, kind, json.loads(json.dumps(body))))
        self._changed.notify_all()

    def _event(self, name: str, kind: str, reason: str, message: str) -> None:
        self._events.append({
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{name}.{next(self._numbers)}", "namespace": "lab"},
            "involvedObject": {"name": name, "namespace": "lab"}, "type": kind, "reason": reason, "message": message, "lastTimestamp": _now(),
        })  # fmt: skip

    def create_job(self, body: Json) -> Json:
        """As POST jobs."""
        with self._changed:
            name = body["metadata"]["name"]
            if name in self._jobs:
                raise ApiError(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
            spec = body["spec"]
            body["metadata"] |= {
                "uid": str(uuid.uuid4()),
                "namespace": "lab",
                "creationTimestamp": _now(),
            }
            body["status"] = {
                "conditions": [],
                "startTime": _now(),
                "active": body["spec"]["completions"],
                "ready": 0,
            }
            self._jobs[name] = body
            if self.suspends:
                spec["suspend"] = True
            else:
                self._make_pods(body)
            return body

    def _make_pods(self, job: Json) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        due = threading.Timer(spec["activeDeadlineSeconds"], self._deadline, [job])
        due.daemon = True
        due.start()
        barred = kube_rules.restricted(spec["template"]["spec"]) if self.restricted else ""
        exceeded = f"exceeded quota: lab, requested: pods=1, used: pods={self.quota}, limited: pods={self.quota}"
        for index in range(spec["completions"]):
            if barred or len(self._pods) >= self.quota:
                said = (
                    f'pods "{name}-{index}-abcde" is forbidden: {barred}'
                    if barred
                    else f"pods is forbidden: {exceeded}"
                )
                self._event(name, "Warning", "FailedCreate", f"Error creating: {said}")
                continue
            template = json.loads(json.dumps(spec["template"]))
            labels = {
                **template["metadata"].get("labels", {}), "batch.kubernetes.io/job-name": name, "job-name": name,
                "batch.kubernetes.io/job-completion-index": str(index),
            }  # fmt: skip
            metadata = {
                "name": f"{name}-{index}-{secrets.token_hex(3)[:5]}", "namespace": "lab", "uid": str(uuid.uuid4()), "labels": labels,
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                "ownerReferences": [_reference(job)], "creationTimestamp": _now(),
            }  # fmt: skip
            own = {**template["spec"], "hostname": f"{name}-{index}"}
            self.add_pod({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": own})

    def add_pod(self, body: Json) -> Pod:
        """A pod, as whoever makes one hands it in."""
        with self._changed:
            assert not (wrong := kube_rules.unknown_fields(body) + kube_rules.mistakes(body)), wrong
            body["status"] = {"phase": "Pending", "conditions": []}
            pod = self._pods[body["metadata"]["name"]] = Pod(body)
            self._note("ADDED", body)
            self._schedule(pod)
            return pod

    def _schedule(self, pod: Pod) -> None:
        if pod.phase != "Pending" or pod.space is not None:
            return
        wanted = _gpus(pod)
        used = sum(
            _gpus(one)
            for one in self._pods.values()
            if one.space is not None and one.phase not in FINISHED
        )
        status = pod.body["status"]
        if self.held or used + wanted > self.gpus:
            lacking = f"0/1 nodes are available: 1 Insufficient {'cpu' if self.held else 'nvidia.com/gpu'}."
            status["conditions"] = [
                _condition("PodScheduled", "Unschedulable", lacking, status="False")
            ]
            self._event(pod.name, "Warning", "FailedScheduling", lacking)
            self._note("MODIFIED", pod.body)
            return
        status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        image, name = pod.container["image"], pod.container["name"]
        if image.partition(":")[0] not in self.images:
            self._waits(
                pod, "ImagePullBackOff", message=f'Back-off pulling image "{image}": not found'
            )
            return
        if self.uid(pod) == 0 and self._security(pod, "runAsNonRoot"):
            message = f"container has runAsNonRoot and image will run as root (pod: {pod.name}, container: {name})"
            self._waits(pod, "CreateContainerConfigError", message=message)
            return
        self._waits(pod, "ContainerCreating")
        pod.space = self._start(pod)
        status |= {
            "phase": "Running",
            "containerStatuses": [_state(pod, "running", startedAt=_now())],
        }
        self._note("MODIFIED", pod.body)
        thread = threading.Thread(target=self._watch, args=(pod, pod.space), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _waits(self, pod: Pod, reason: str, **more: str) -> None:
        pod.body["status"]["containerStatuses"] = [_state(pod, "waiting", reason=reason, **more)]
        self._note("MODIFIED", pod.body)

    def _start(self, pod: Pod) -> ContainerSpace:
        address = f"{NETWORK}.{next(self._addresses)}"
        spec, hostname = pod.body["spec"], pod.body["spec"].get("hostname", pod.name)
        hosts = self.folder / f"{pod.name}.hosts"
        hosts.write_text(
            f"127.0.0.1 localhost\n{address} {hostname}.{spec.get('subdomain', '')}.lab.svc {hostname}\n"
        )
        volumes = {one["name"]: one for one in spec.get("volumes", [])}
        mounts = [("/dev/shm", "size=64m,mode=1777")]
        for one in pod.container.get("volumeMounts", []):
            assert volumes[one["name"]]["emptyDir"]["medium"] == "Memory"
            mounts.append((one["mountPath"], "size=1g,mode=1777"))
        space = ContainerSpace({
            "checkout": str(ROOT), "code": str(shared_code()),
            "hostname": hostname, "hosts": str(hosts), "mounts": mounts, "files": self.files, "user": self.uid(pod),
            "command": [expanded(one, pod.container) for one in pod.container["command"]], "env": self.environment(pod),
        })  # fmt: skip
        try:
            self._switch.plug(space, "eth0")
            space.ip("addr", "add", f"{address}/24", "dev", "eth0")
        except BaseException:
            space.close()
            raise
        pod.body["status"]["podIP"] = address
        space.go()
        return space

    def uid(self, pod: Pod) -> int:
        """The user that a container's processes run as: the spec's, or the image's."""
        asked = self._security(pod, "runAsUser")
        return self.user if asked is None else int(asked)

    def _security(self, pod: Pod, key: str) -> Any:
        usual = pod.body["spec"].get("securityContext", {}).get(key)
        return pod.container.get("securityContext", {}).get(key, usual)

    def environment(self, pod: Pod) -> dict[str, str]:
        """What a container's processes have: the image's variables and the spec's; a user without a name has no home."""
        asked = {one["name"]: one["value"] for one in pod.container.get("env", [])}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        home = "/" if self.uid(pod) else "/tmp/root"
        return {
            "PATH": path,
            "HOME": home,
            "HOSTNAME": pod.body["spec"].get("hostname", pod.name),
            **asked,
        }

    def _watch(self, pod: Pod, space: ContainerSpace) -> None:
        """Kubelet's part: how a container has ended."""
        code = space.wait()
        space.close()
        with self._changed:
            reason = pod.ending or ("Completed" if code == 0 else "Error")
            if pod.ending == "Completed":
                code = 143 if code else 0
            exits = 137 if reason == "OOMKilled" else code % 256
            pod.body["status"] |= {
                "phase": "Succeeded" if exits == 0 else "Failed",
                "containerStatuses": [_state(pod, "terminated", reason=reason, exitCode=exits)],
            }
            self._note("MODIFIED", pod.body)
            if "deletionTimestamp" in pod.body["metadata"]:
                self._remove(pod)
            self._finish_jobs()

    def _finish_jobs(self) -> None:
        for job in self._jobs.values():
            mine = [one for one in self._pods.values() if _owned(one.body, job)]
            if (
                mine
                and all(one.phase in FINISHED for one in mine)
                and not job["status"]["conditions"]
            ):
                failed = any(one.phase == "Failed" for one in mine)
                ending = _condition("Failed", "FailedIndexes") if failed else _condition("Complete")
                job["status"]["conditions"] = [ending]

    def _deadline(self, job: Json) -> None:
        with self._changed:
            if self._jobs.get(job["metadata"]["name"]) is not job or job["status"]["conditions"]:
                return
            message = "Job was active longer than specified deadline"
            job["status"]["conditions"] = [_condition("Failed", "DeadlineExceeded", message)]
            self._end_all(job)

    def _end(self, pod: Pod, why: str) -> None:
        """Delete a pod with its grace."""
        if "deletionTimestamp" in pod.body["metadata"]:
            return
        pod.ending = pod.ending or why
        pod.body["metadata"]["deletionTimestamp"] = _now()
        self._note("MODIFIED", pod.body)
        if pod.space is None or pod.phase in FINISHED:
            self._remove(pod)
            return
        pod.space.signal(signal.SIGTERM)
        kill = threading.Timer(self.grace, pod.space.signal, [signal.SIGKILL])
        kill.daemon = True
        kill.start()

    def _end_all(self, job: Json) -> None:
        for one in [one for one in self._pods.values() if _owned(one.body, job)]:
            self._end(one, "Completed")

    def _remove(self, pod: Pod) -> None:
        if self._pods.pop(pod.name, None) is not None:
            self._note("DELETED", pod.body)

    def delete_job(self, name: str) -> Json:
        """As DELETE of a job: what it owns is collected."""
        with self._changed:
            job = self._jobs.pop(name, None)
            if job is None:
                raise ApiError(404, "NotFound", f'jobs.batch "{name}" not found')
            self._end_all(job)
            self._services = {
                key: one for key, one in self._services.items() if not _owned(one, job)
            }
            return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def delete_pod(self, name: str) -> Json:
        """As DELETE of a pod."""
        with self._changed:
            if name not in self._pods:
                raise ApiError(404, "NotFound", f'pods "{name}" not found')
            self._end(self._pods[name], "Completed")
            return self._pods[name].body if name in self._pods else {}

    def create_service(self, body: Json) -> Json:
        """As POST services."""
        with self._changed:
            owners = [one["uid"] for one in body["metadata"]["ownerReferences"]]
            body["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": "lab"}
            if any(
                job["metadata"]["uid"] in owners for job in self._jobs.values()
            ):  # else it is collected at once
                self._services[body["metadata"]["name"]] = body
            return body

    def listed(self, resource: str, labels: str, fields: str) -> Json:
        """As GET of a list."""
        with self._lock:
            kinds: dict[str, list[Json]] = {
                "jobs": list(self._jobs.values()), "services": list(self._services.values()),
                "pods": [one.body for one in self._pods.values()], "events": self._events,
            }  # fmt: skip
            for job in self._jobs.values():
                phases = [one.phase for one in self._pods.values() if _owned(one.body, job)]
                ended = sum(one in FINISHED for one in phases)
                job["status"] |= {"active": len(phases) - ended, "ready": phases.count("Running")}
            items = [one for one in kinds[resource] if _selected(one, labels, fields)]
            version = {"resourceVersion": str(next(self._numbers))}
            return {"kind": "List", "apiVersion": "v1", "metadata": version, "items": items}

    def read(self, resource: str, name: str) -> Json:
        """As GET of one object."""
        with self._lock:
            found = (
                self._pods[name].body
                if resource == "pods" and name in self._pods
                else self._jobs.get(name)
            )
            if found is None or (resource == "jobs") != (found["kind"] == "Job"):
                raise ApiError(404, "NotFound", f'{resource} "{name}" not found')
            return found

    def changes(self, labels: str, since: int, seconds: float) -> list[Json]:
        """What has come of pods since then; waits for so many seconds for something."""
        with self._changed:

            def news() -> list[Json]:
                return [
                    {"type": kind, "object": body, "number": number}
                    for number, kind, body in self._changes
                    if number > since and _selected(body, labels, "")
                ]

            self._changed.wait_for(news, seconds)
            return news()

    def allows(self, verb: str, resource: str) -> bool:
        """Whether the user of the kubeconfig may do that."""
        return (resource, verb) not in self.denied

    def close(self) -> None:
        """End all that there is."""
        self.cut()
        with self._lock:
            spaces = [one.space for one in self._pods.values() if one.space is not None]
        for one in spaces:
            one.close()
        for thread in self._threads:
            thread.join(DEADLINE)
        self._switch.close()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def _reference(owner: Json) -> Json:
    about = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": about["name"],
        "uid": about["uid"],
    }


def _owned(body: Json, owner: Json) -> bool:
    return any(
        one["uid"] == owner["metadata"]["uid"]
        for one in body["metadata"].get("ownerReferences", [])
    )


def _index(body: Json) -> int:
    return int(
        body["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index", -1)
    )


def _gpus(pod: Pod) -> int:
    return int(pod.container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))


def _state(pod: Pod, kind: str, **fields: Any) -> Json:
    image = {"image": pod.container["image"], "imageID": "", "restartCount": 0}
    return {
        "name": pod.container["name"],
        "ready": kind == "running",
        **image,
        "state": {kind: fields},
    }


def _selected(body: Json, labels: str, fields: str) -> bool:
    pairs = [one.partition("=")[::2] for one in labels.split(",") if one]
    has = body["metadata"].get("labels", {})
    if not all(has.get(key) == value for key, value in pairs):
        return False
    return not fields or body.get("involvedObject", {}).get("name") == fields.partition("=")[2]


# ------------------------------------------------------------------------------------ over HTTP


async def _say(handler: tornado.web.RequestHandler, code: int, body: Json) -> None:
    handler.set_status(code)
    handler.set_header("Content-Type", "application/json")
    await handler.finish(json.dumps(body))


class ApiHandler(tornado.web.RequestHandler):
    """All that is no exec: who asks, whether he may, what is answered."""

    def initialize(self, cluster: Kube) -> None:
        self.cluster = cluster

    def check(self, verb: str, group: str, resource: str) -> None:
        """Raise ApiError where the token is not good, or the right is missing."""
        self.cluster.requests.append((verb, resource))
        kind, _, token = self.request.headers.get("authorization", "").partition(" ")
        if (kind.lower(), token) != ("bearer", self.cluster.token):
            raise ApiError(401, "Unauthorized", "Unauthorized")
        if not self.cluster.allows(verb, resource):
            what = f'resource "{resource}" in API group "{group}" in the namespace "lab"'
            kind = ".".join(filter(None, (resource.partition("/")[0], group)))
            raise ApiError(
                403, "Forbidden", f'{kind} is forbidden: User "ann" cannot {verb} {what}'
            )

    async def _answered(self, answer: Callable[[], Json], code: int = 200) -> None:
        try:
            found = await asyncio.to_thread(answer)
        except ApiError as problem:
            code, found = problem.code, problem.body()
        if len(self.cluster.requests) == self.cluster.lost_answer:
            self.cluster.lost_answer = -1
            self.detach().close()
            return
        await _say(self, code, found)


class VersionHandler(ApiHandler):
    """GET /version."""

    async def get(self) -> None:
        major, minor = self.cluster.version
        await self._answered(
            lambda: {"major": major, "minor": minor, "gitVersion": f"v{major}.{minor}.1"}
        )


class ReviewHandler(ApiHandler):
    """POST selfsubjectaccessreviews: may I?"""

    async def post(self) -> None:
        body = json.loads(self.request.body)
        asked = body["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource", ""))))

        def answer() -> Json:
            self.check("create", "authorization.k8s.io", "selfsubjectaccessreviews")
            return {**body, "status": {"allowed": self.cluster.allows(asked["verb"], resource)}}

        await self._answered(answer, 201)


class ObjectsHandler(ApiHandler):
    """Lists, watches, and what is made."""

    async def get(self, group: str, namespace: str, resource: str) -> None:
        labels, fields = (
            self.get_argument("labelSelector", ""),
            self.get_argument("fieldSelector", ""),
        )
        if self.get_argument("watch", "") not in ("true", "True", "1"):

            def answer() -> Json:
                self.check("list", group, resource)
                return self.cluster.listed(resource, labels, fields)

            await self._answered(answer)
            return
        try:
            self.check("watch", group, resource)
        except ApiError as problem:
            await _say(self, problem.code, problem.body())
            return
        since = int(self.get_argument("resourceVersion", "0"))
        end = time.monotonic() + float(self.get_argument("timeoutSeconds", "300"))
        self.set_header("Content-Type", "application/json")
        await self.flush()
        with contextlib.suppress(tornado.iostream.StreamClosedError):
            while (left := end - time.monotonic()) > 0:
                for one in await asyncio.to_thread(
                    self.cluster.changes, labels, since, min(left, 0.5)
                ):
                    since = one.pop("number")
                    self.write(json.dumps(one) + "\n")
                await self.flush()

    async def post(self, group: str, namespace: str, resource: str) -> None:
        body = json.loads(self.request.body)
        make = {"jobs": self.cluster.create_job, "services": self.cluster.create_service}[resource]

        strict = self.get_argument("fieldValidation", "Warn") == "Strict"
        said = f'{body["kind"]} in version "{body["apiVersion"]}" cannot be handled as a {body["kind"]}: '

        def answer() -> Json:
            self.cluster.sent.append(self.request.body.decode())
            self.check("create", group, resource)
            if namespace != "lab":
                raise ApiError(404, "NotFound", f'namespaces "{namespace}" not found')
            if wrong := [
                one
                for one in kube_rules.unknown_fields(body)
                if strict or not one.startswith("unknown")
            ]:
                raise ApiError(
                    400, "BadRequest", f"{said}strict decoding error: {', '.join(wrong)}"
                )
            if wrong := kube_rules.mistakes(body):
                name = (
                    f"{body['kind']}.{group or ''}".rstrip(".") + f' "{body["metadata"]["name"]}"'
                )
                raise ApiError(422, "Invalid", f"{name} is invalid: {', '.join(wrong)}")
            return make(body)

        await self._answered(answer, 201)


class ObjectHandler(ApiHandler):
    """One object."""

    async def get(self, group: str, namespace: str, resource: str, name: str) -> None:
        def answer() -> Json:
            self.check("get", group, resource)
            return self.cluster.read(resource, name)

        await self._answered(answer)

    async def delete(self, group: str, namespace: str, resource: str, name: str) -> None:
        def answer() -> Json:
            self.check("delete", group, resource)
            if resource == "pods":
                return self.cluster.delete_pod(name)
            assert self.get_argument("propagationPolicy", "") == "Background", "pods would be left"
            return self.cluster.delete_job(name)

        await self._answered(answer)


class ExecHandler(tornado.websocket.WebSocketHandler):
    """Exec, as v5.channel.k8s.io has it: each message begins with the number of its channel; 255 and a number end one."""

    def initialize(self, cluster: Kube) -> None:
        self.cluster = cluster
        self._program: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = time.monotonic()

    def check_origin(self, origin: str) -> bool:
        return True

    async def prepare(self) -> None:
        self.cluster.sent.append(self.request.uri or "")
        try:
            for verb in ("get", "create"):
                ApiHandler.check(self, verb, "", "pods/exec")  # type: ignore[arg-type]
            phase = self.cluster.read("pods", self.path_kwargs["name"])["status"]["phase"]
            if phase != "Running":
                said = f"cannot exec into a container in a completed pod; current phase is {phase}"
                raise ApiError(400, "BadRequest", said)
        except ApiError as problem:
            await _say(self, problem.code, problem.body())

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        return V5 if V5 in subprotocols else None

    async def open(self, name: str) -> None:
        pod = self.cluster._pods[name]
        assert pod.space is not None
        self.set_nodelay(True)  # as Go does unless told
        who = [f"--setuid={uid}", "--setgid=0"] if (uid := self.cluster.uid(pod)) else []
        variables = [f"{key}={value}" for key, value in self.cluster.environment(pod).items()]
        assert self.get_argument("container") == pod.container["name"]
        self._program = await asyncio.create_subprocess_exec(
            # runc makes each process of exec the leader of a session
            *pod.space.enter, *who, "setsid", "env", "-i", *variables, *self.get_arguments("command", strip=False),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.cluster.execs.append(self)
        self._tasks = [
            asyncio.create_task(self._run(self._program)),
            asyncio.create_task(self._listen()),
        ]

    async def _run(self, program: asyncio.subprocess.Process) -> None:
        assert program.stdout is not None
        assert program.stderr is not None
        with contextlib.suppress(tornado.websocket.WebSocketClosedError):
            await asyncio.gather(
                self._pump(program.stdout, STDOUT), self._pump(program.stderr, STDERR)
            )
            code = await program.wait()
            await self.write_message(
                bytes([STATUS]) + json.dumps(_exec_status(code)).encode(), binary=True
            )
            self.close(1000)

    async def _pump(self, stream: asyncio.StreamReader, channel: int) -> None:
        while data := await stream.read(CHUNK):
            await self.write_message(bytes([channel]) + data, binary=True)

    async def _listen(self) -> None:
        """A load balancer's part."""
        while self.cluster.silent_limit is not None:
            await asyncio.sleep(self.cluster.silent_limit / 4)  # a limit is a time
            if time.monotonic() - self._heard > self.cluster.silent_limit:
                self.cut()
                return

    def on_ping(self, data: bytes) -> None:
        self._heard = time.monotonic()

    async def on_message(self, message: str | bytes) -> None:
        self._heard = time.monotonic()
        while self._program is None:
            await asyncio.sleep(0.001)  # a message may come while the program is started
        data, stdin = (
            message if isinstance(message, bytes) else message.encode(),
            self._program.stdin,
        )
        assert stdin is not None
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            if data[0] == CLOSE and data[1] == STDIN:
                stdin.close()
            elif data[0] == STDIN:
                stdin.write(data[1:])
                await stdin.drain()

    def cut(self) -> None:
        """Cut the connection, from any thread; nobody is told."""
        stream = self.ws_connection and self.ws_connection.stream
        if stream:
            self.cluster.loop.call_soon_threadsafe(stream.close)

    def on_close(self) -> None:
        with contextlib.suppress(ValueError):
            self.cluster.execs.remove(self)
        for one in self._tasks:
            one.cancel()
        if (
            self._program is not None and self._program.returncode is None
        ):  # what runs there hears no more than this
            transport = self._program._transport  # type: ignore[attr-defined]
            for number in (0, 1, 2):
                if pipe := transport.get_pipe_transport(number):
                    pipe.close()


def _exec_status(code: int) -> Json:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    causes = [{"reason": "ExitCode", "message": str(code if code > 0 else 128 - code)}]
    message = f"command terminated with non-zero exit code: exit status {code}"
    failure = {
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": message,
        "details": {"causes": causes},
    }
    return {"metadata": {}, **failure}


# ------------------------------------------------------------------------------------ a cluster


def _certificate(folder: Path) -> tuple[ssl.SSLContext, bytes]:
    """A server's side of TLS on 127.0.0.1, and what it is checked by."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-lab")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(secret + pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return context, pem


def kubeconfig(url: str, authority: bytes, token: str, **cluster: Any) -> Json:
    """A configuration with the context ``lab``."""
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": url, "certificate-authority-data": base64.b64encode(authority).decode(), **cluster}}],
        "users": [{"name": "ann", "user": {"token": token}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "ann", "namespace": "lab"}}],
    }  # fmt: skip


@contextmanager
def kube(folder: Path, **settings: Any) -> Iterator[Kube]:
    """A cluster; mark the test ``needs("namespaces")``. At the end nothing may run in it any more.

    Args:
        folder: an empty folder. settings: attributes of `Kube`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Kube(folder, **settings)
    context, authority = _certificate(folder)
    objects = r"/api(?:s/(?P<group>batch))?/v1/namespaces/(?P<namespace>[^/]+)/(?P<resource>[a-z]+)"
    paths = [
        (r"/version/?", VersionHandler),
        (r"/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", ReviewHandler),
        (r"/api/v1/namespaces/lab/pods/(?P<name>[^/]+)/exec", ExecHandler),
        (objects, ObjectsHandler),
        (rf"{objects}/(?P<name>[^/]+)", ObjectHandler),
    ]
    started, url = threading.Event(), ""

    def serve() -> None:
        nonlocal url
        loop = cluster.loop
        asyncio.set_event_loop(loop)

        async def listen() -> tornado.httpserver.HTTPServer:
            served = [(pattern, handler, {"cluster": cluster}) for pattern, handler in paths]
            application = tornado.web.Application(served, websocket_max_message_size=1 << 30)
            server = tornado.httpserver.HTTPServer(application, ssl_options=context)
            server.add_sockets(sockets)
            return server

        sockets = tornado.netutil.bind_sockets(0, "127.0.0.1")
        url = f"https://127.0.0.1:{sockets[0].getsockname()[1]}"
        server = loop.run_until_complete(listen())
        started.set()
        loop.run_forever()
        server.stop()
        loop.run_until_complete(server.close_all_connections())
        pending = asyncio.all_tasks(loop)
        for one in pending:
            one.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=serve, name="kube-lab", daemon=True)
    thread.start()
    assert started.wait(DEADLINE)
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig(url, authority, cluster.token)))
    cluster.env = {"KUBECONFIG": str(folder / "kubeconfig")}
    try:
        yield cluster
        cluster.wait(lambda: not cluster.processes())
    finally:
        cluster.close()
        cluster.loop.call_soon_threadsafe(cluster.loop.stop)
        thread.join(DEADLINE)
        shutil.rmtree(folder, ignore_errors=True)
