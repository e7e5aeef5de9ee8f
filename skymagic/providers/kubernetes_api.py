"""The API server of a cluster, as a pool needs it: what is asked of it, exec as a channel, and why pods wait or have ended, in words.

A pool is one Indexed Job and a headless Service that goes with it. Each pod runs a *holder*, as Slurm's nodes do; all else comes by exec::

    Job ──▶ pod, whose first process runs the holder ──▶ daemon ──▶ agent ──▶ ranks
    GET pods/NAME/exec, a WebSocket (v5.channel.k8s.io): /bin/sh …      a channel: scripts, processes, and the way to the daemon

Only this module imports the official client, and only when it is used.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import select
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from skymagic.errors import HostError, ProvisionError, RequestError
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import count
from skymagic.providers.cluster import holder_folder, holder_script
from skymagic.ssh.command import SocketChannel

Json = dict[str, Any]
SECONDS = (10.0, 60.0)
"""For which a connection, and an answer, may take."""
PING_SECONDS = 20.0
"""Between two pings: load balancers cut connections that say nothing for five minutes, some for one."""
BUFFER_BYTES = 1 << 20
OLDEST = (1, 30)
"""The first version whose exec can end a shell's input and go on with its output (v5.channel.k8s.io)."""
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
"""Channels of exec: the first byte of each message."""
JOB, USER, MANAGED = "skymagic/job", "skymagic/user", "app.kubernetes.io/managed-by"
"""Labels of all that a pool has."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RIGHTS = (
    ("batch", "jobs", "", ("create", "get", "list", "delete")),
    ("", "services", "", ("create",)),
    ("", "pods", "", ("get", "list", "watch")),
    ("", "pods", "exec", ("get", "create")),
)
"""(API group, resource, subresource, verbs) that a pool needs. Exec over a WebSocket is a GET; servers from 1.35 want `create` as well."""
ROLE = "docs/how-to/kubernetes.md has a Role with all of them"


@cache
def official() -> Any:
    """The official client. Raises ProvisionError with how to install it."""
    try:
        import kubernetes
        import kubernetes.stream.ws_client
        import kubernetes.watch
    except ImportError as problem:
        raise ProvisionError(
            f"--provider kubernetes needs the package kubernetes ({problem}): pip install 'skymagic[kubernetes]'"
        ) from None
    return kubernetes


def _kubeconfigs() -> list[Path]:
    return [Path(one).expanduser() for one in os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep) if one]


def configured_at() -> tuple[object, ...]:
    """A value that changes when the kubeconfig does."""
    return tuple((str(one), one.stat().st_mtime_ns) for one in _kubeconfigs() if one.exists())


def _configured(context: str) -> tuple[Any, str, str]:
    """The client's configuration, the context's name ("" in a pod), and its namespace. Raises RequestError."""
    kubernetes = official()
    configuration, config = kubernetes.client.Configuration(), kubernetes.config
    if not context and os.environ.get("KUBERNETES_SERVICE_HOST") and not configured_at():
        config.load_incluster_config(client_configuration=configuration)
        return configuration, "", (ACCOUNT / "namespace").read_text().strip()
    try:
        files = os.pathsep.join(map(str, _kubeconfigs()))  # the client has read KUBECONFIG when it was imported
        contexts, active = config.list_kube_config_contexts(config_file=files)
        found = {one["name"]: one["context"] for one in contexts}
        name = context or active["name"]
        if name not in found:
            nearest = did_you_mean(name, found) or f"; available: {', '.join(found)}"
            raise RequestError(f"--context: the kubeconfig has no context {name!r}{nearest}")
        config.load_kube_config(config_file=files, context=name, client_configuration=configuration)
    except (config.ConfigException, OSError) as problem:
        raise RequestError(f"--provider kubernetes: no cluster is configured here: {problem}") from None
    if not configuration.verify_ssl:
        raise RequestError(
            f"--context: {name} does not check the server's certificate (insecure-skip-tls-verify): "
            "anybody between could read and change what a pool sends; give it the cluster's certificate-authority"
        )
    return configuration, name, found[name].get("namespace") or "default"


class KubernetesCluster:
    """One namespace of a cluster. Thread-safe; answers are the objects' own JSON.

    Args:
        context: of the kubeconfig; "" for the current one, or, in a pod without a kubeconfig, its service account.
        namespace: "" for the context's.

    Raises:
        RequestError: there is no such context, or none at all.
    """

    def __init__(self, context: str = "", namespace: str = "") -> None:
        self._configuration, self.context, usual = _configured(context)
        self._configuration.retries = False  # urllib3 tells of each
        self.namespace = namespace or usual
        client = official().client
        self.client = api = client.ApiClient(self._configuration)
        """The official client as it is configured."""
        self._core, self._batch = client.CoreV1Api(api), client.BatchV1Api(api)
        self._version, self._reviews = client.VersionApi(api), client.AuthorizationV1Api(api)

    def _ask(self, call: Callable[..., Any], *args: Any, **options: Any) -> Json:
        """What a call answers. Raises ProvisionError with why it is refused; a missing object is ``{}``."""
        from urllib3.exceptions import HTTPError

        repeated = not call.__name__.startswith("create")  # a connection that was idle may be gone
        while True:
            try:
                answer = call(*args, **options, _preload_content=False, _request_timeout=SECONDS)
                return dict(json.loads(answer.data))
            except official().client.ApiException as problem:
                if problem.status == 404:
                    return {}
                raise ProvisionError(
                    refusal_words(problem.status, problem.body or problem.reason, self.label)
                ) from None
            except (HTTPError, OSError) as problem:
                if not repeated:
                    raise ProvisionError(f"{self.label}: the API server does not answer: {problem}") from None
                repeated = False

    @property
    def label(self) -> str:
        """Name of the cluster in messages."""
        return f"Kubernetes (context {self.context})" if self.context else "Kubernetes (this pod's service account)"

    def mistakes(self, attaching: bool) -> list[str]:
        """Why no pool can be made here: an old server, and all rights that are missing, each named."""
        told = self._ask(self._version.get_code)
        number = tuple(int(re.sub(r"\D.*", "", told.get(part, "")) or 0) for part in ("major", "minor"))
        if number < OLDEST:
            return [
                f"{self.label} runs version {told.get('gitVersion')}: skymagic needs 1.30 or newer, whose exec has half-close"
            ]
        needed = [each for each in RIGHTS if not attaching or each[1] == "pods"]
        missing = [
            f"you may not {verb} {'/'.join(filter(None, (resource, sub)))} in namespace {self.namespace}"
            for group, resource, sub, verbs in needed
            for verb in verbs
            if not self._allowed(group, resource, sub, verb)
        ]
        return [*missing, ROLE] if missing else []

    def _allowed(self, group: str, resource: str, sub: str, verb: str) -> bool:
        what = {"namespace": self.namespace, "group": group, "resource": resource, "subresource": sub, "verb": verb}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": what},
        }
        review = self._ask(self._reviews.create_self_subject_access_review, body)
        return bool(review["status"]["allowed"])

    def create(self, job: Json) -> None:
        """Make a job, and the Service that goes with it."""
        made = self._ask(self._batch.create_namespaced_job, self.namespace, job)
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": made["metadata"]["name"],
            "uid": made["metadata"]["uid"],
        }
        self._ask(self._core.create_namespaced_service, self.namespace, service_of(job, owner))

    def delete(self, job: str) -> None:
        """Delete a job with its pods and its Service; one that is not there is deleted."""
        self._ask(self._batch.delete_namespaced_job, job, self.namespace, propagation_policy="Background")

    def job(self, name: str) -> Json:
        """A job; {} where it is gone."""
        return self._ask(self._batch.read_namespaced_job, name, self.namespace)

    def jobs(self) -> list[Json]:
        """All jobs of pools here, of every user."""
        return list(
            self._ask(self._batch.list_namespaced_job, self.namespace, label_selector=f"{MANAGED}=skymagic")["items"]
        )

    def pod(self, name: str) -> Json:
        """A pod; {} where it is gone."""
        return self._ask(self._core.read_namespaced_pod, name, self.namespace)

    def pods(self, labels: str) -> tuple[list[Json], str]:
        """The pods that have these labels, in the order of their index and name; and the version of the list."""
        found = self._ask(self._core.list_namespaced_pod, self.namespace, label_selector=labels)
        return sorted(found["items"], key=_place), found["metadata"]["resourceVersion"]

    def changed(self, labels: str, version: str, seconds: int) -> None:
        """Wait until one of these pods has changed since that list, for so many seconds at most; an interrupt is heard."""
        kubernetes = official()
        watch = kubernetes.watch.Watch()
        try:
            for _ in watch.stream(
                self._core.list_namespaced_pod, self.namespace, label_selector=labels, resource_version=version,
                timeout_seconds=seconds, _request_timeout=seconds + SECONDS[0],
            ):  # fmt: skip
                return
        except kubernetes.client.ApiException as problem:
            if problem.status != 410:  # the list is too old: the next one is not
                raise ProvisionError(refusal_words(problem.status, problem.body or "", self.label)) from None
        finally:
            watch.stop()

    def events(self, name: str) -> list[Json]:
        """What was told of an object, the newest last; nothing where that may not be read."""
        try:
            found = self._ask(
                self._core.list_namespaced_event, self.namespace, field_selector=f"involvedObject.name={name}"
            )
        except ProvisionError:
            return []
        return sorted(
            found.get("items", []), key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or "")
        )

    def exec(self, pod: str, container: str, command: Sequence[str]) -> Any:
        """A WebSocket to a command that runs in a container. Raises HostError."""
        kubernetes = official()
        # a client of its own: `stream` changes the one that it is given
        core = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(self._configuration))
        try:
            opened = kubernetes.stream.stream(
                core.connect_get_namespaced_pod_exec, pod, self.namespace, command=list(command), container=container,
                stdin=True, stdout=True, stderr=True, tty=False, _preload_content=False, binary=True,
            )  # fmt: skip
        except kubernetes.client.ApiException as problem:
            raise HostError(pod, refusal_words(_handshake_status(problem.reason), problem.reason, self.label)) from None
        if opened.subprotocol != kubernetes.stream.ws_client.V5_CHANNEL_PROTOCOL:
            opened.close()
            raise HostError(
                pod, f"{self.label} speaks {opened.subprotocol}: something between it and here is older than 1.30"
            )
        return opened.sock


def _place(pod: Json) -> tuple[int, str]:
    index = pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index", "0")
    return int(index), str(pod["metadata"]["name"])


# ------------------------------------------------------------------------------------ the channel


class ExecChannel(SocketChannel):
    """Exec as a channel. One thread has the WebSocket, for TLS connections cannot be read and written by two at once.

    Args:
        connect: opens the WebSocket to a command.
        before: sh that runs before the shell.
    """

    def __init__(self, connect: Callable[[Sequence[str]], Any], before: str) -> None:
        super().__init__()
        self._connect, self._before = connect, before
        self._web: Any = None
        self._out, self._shown = bytearray(), {STDOUT: bytearray(), STDERR: bytearray()}
        self._channel, self._said = STDOUT, bytearray()
        self._input_ended = self._over = False

    def exec_command(self, command: str) -> None:
        """Start the shell in the container. Raises HostError."""
        self._web = self._connect(["/bin/sh", "-c", self._before + command])
        threading.Thread(target=self._pass_on, name="skymagic-exec", daemon=True).start()

    def _end(self) -> None:
        if self._web is not None:
            self.status_event.wait(PING_SECONDS)

    # -- the thread --------------------------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        raw = self._web.sock
        raw.setblocking(False)
        self._theirs.setblocking(False)
        self._their_errors.setblocking(False)
        try:
            ping = heard = time.monotonic()
            while not (self.closed or (self._over and not any(self._shown.values()))):
                ready = self._ready(raw, max(0.0, ping + PING_SECONDS - time.monotonic()))
                now = time.monotonic()
                if now >= ping + PING_SECONDS:
                    ping, self._out = now, self._out + self._frame(b"", "PING")
                if not self._over and (raw.fileno() in ready or _decrypted(raw)):
                    heard = now
                    self._take()
                elif now > heard + 3 * PING_SECONDS and not self._over:
                    break  # not even a pong: the connection was cut, and nobody was told
                if ready.get(self._theirs.fileno(), 0) & ~select.POLLOUT and not self._input_ended:
                    self._take_input()
                self._flush(raw)
        except OSError:
            pass  # lost, or nobody reads any more
        finally:
            self._finish(raw)

    def _ready(self, raw: Any, seconds: float) -> dict[int, int]:
        """Descriptors at which there is something to do → what."""
        poll = select.poll()
        room = sum(map(len, self._shown.values())) < BUFFER_BYTES
        reading = not self._over and room
        if reading or self._out:
            poll.register(raw, select.POLLIN * reading | select.POLLOUT * bool(self._out))
        taking = not (self._input_ended or self._over) and len(self._out) < BUFFER_BYTES
        poll.register(self._theirs, select.POLLIN * taking | select.POLLOUT * bool(self._shown[STDOUT]))
        if self._shown[STDERR]:
            poll.register(self._their_errors, select.POLLOUT)
        wait = 0.0 if reading and _decrypted(raw) else seconds
        return dict(poll.poll(wait * 1000))

    def _take(self) -> None:
        """Read the frames that are there."""
        codes, closed = official().stream.ws_client.ABNF, official().stream.ws_client.WebSocketConnectionClosedException
        while sum(map(len, self._shown.values())) < BUFFER_BYTES:
            try:
                frame = self._web.recv_frame()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except closed:
                self._over = True
                return
            if frame.opcode == codes.OPCODE_CLOSE:
                self._over = True
                return
            if frame.opcode == codes.OPCODE_PING:
                self._out += self._frame(frame.data, "PONG")
            elif frame.opcode in (codes.OPCODE_BINARY, codes.OPCODE_TEXT, codes.OPCODE_CONT):
                data = memoryview(frame.data)
                if frame.opcode != codes.OPCODE_CONT and data:  # what continues a message has no channel of its own
                    self._channel, data = data[0], data[1:]
                self._shown.get(self._channel, self._said if self._channel == STATUS else bytearray()).extend(data)

    def _take_input(self) -> None:
        data = self._theirs.recv(1 << 16)
        self._out += self._frame(bytes([STDIN]) + data if data else bytes([CLOSE, STDIN]), "BINARY")
        self._input_ended = not data

    def _frame(self, data: bytes, kind: str) -> bytes:
        codes = official().stream.ws_client.ABNF
        return bytes(codes.create_frame(data, getattr(codes, f"OPCODE_{kind}")).format())

    def _flush(self, raw: Any) -> None:
        """Send what there is, as far as it goes."""
        if self._over:
            self._out.clear()
        ways = ((raw, self._out), (self._theirs, self._shown[STDOUT]), (self._their_errors, self._shown[STDERR]))
        for stream, data in ways:
            try:
                while data:
                    del data[: stream.send(memoryview(data)[: 1 << 16].tobytes())]
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                pass

    def _finish(self, raw: Any) -> None:
        self._status, words = exit_status(bytes(self._said))
        try:
            self._their_errors.send(words.encode())
            raw.send(self._frame(b"\x03\xe8", "CLOSE"))
        except (OSError, ValueError):
            pass
        for each in (raw, self._theirs, self._their_errors):
            each.close()
        self.status_event.set()


def _decrypted(raw: Any) -> bool:
    """Whether a TLS connection holds bytes that no poll sees."""
    return isinstance(raw, ssl.SSLSocket) and raw.fileno() >= 0 and raw.pending() > 0


def exit_status(said: bytes) -> tuple[int, str]:
    """(exit status, words where there is none) of what exec's status channel says; -1 where it says nothing. Pure."""
    try:
        status = json.loads(said)
    except ValueError:
        return -1, ""
    if status.get("status") == "Success":
        return 0, ""
    causes = (status.get("details") or {}).get("causes") or []
    codes = [one.get("message", "") for one in causes if one.get("reason") == "ExitCode"]
    return (int(codes[0]), "") if codes and codes[0].isdigit() else (-1, str(status.get("message", "")))


# ------------------------------------------------------------------------------------ what is made


HOME = r"""id=$(id -u); name=$(id -un 2>/dev/null) || name=$id; : "${USER:=$name}" "${LOGNAME:=$USER}"
case $HOME in ''|/) HOME=/none ;; esac
[ -w "$HOME" ] || { HOME=/tmp/skymagic-home-$id; (umask 077; mkdir -p "$HOME"); }
export HOME USER LOGNAME
"""
"""Before each shell: an image that runs as a number without a name has neither a home that can be written nor a user's name."""
CONTAINER = r"""(
@HOLDER@) & holder=$!
depth() {
    up=$1 depth=0
    while [ "$up" -gt 1 ] && [ "$up" != $$ ]; do
        up=$(sed -n 's/^PPid:[^0-9]*//p' "/proc/$up/status" 2>/dev/null) depth=$((depth + 1))
        : "${up:=0}"
    done
    [ "$up" = $$ ] || depth=0
}
end() {
    for each in /proc/[0-9]*; do
        depth "${each#/proc/}"
        case $depth in 1|4) kill -TERM "${each#/proc/}" 2>/dev/null ;; esac
    done
}
trap end HUP INT TERM
while kill -0 $holder 2>/dev/null; do wait $holder; done
wait $holder
"""
"""The first process of a pod: passes the signal that ends the pod on to the holder and to its daemons' agents, which have the hooks of ranks run.

Holder, its subshell, daemon, agent: that is how deep they are below it. Ranks do not get it, for it would end them; nor what has come by exec,
over which their last words go.
"""


def object_name(job_id: str) -> str:
    """The name of a pool's objects: a DNS label (RFC 1123) with room for a pod's number."""
    tail = job_id[-9:]
    head = re.sub(r"[^a-z0-9]+", "-", job_id[:-9].lower()).strip("-")[:40].strip("-")
    return f"{head or 'pool'}{tail.lower()}"


def user() -> str:
    """Who makes pools here, as a label has it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", getpass.getuser()).strip("-_.")[:63]


def job_words(job: Json) -> tuple[str, float | None]:
    """How a job is, and when it ends at the latest in seconds since 1970."""
    status = job.get("status", {})
    for condition in status.get("conditions", []):
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed", "Suspended"):
            return condition["type"].lower(), None
    state = f"{count(status.get('active', 0), 'pod')} active, {status.get('ready', 0)} ready"
    begun = status.get("startTime")
    ends = datetime.fromisoformat(begun).timestamp() + job["spec"]["activeDeadlineSeconds"] if begun else None
    return state, ends


def job_manifest(job_id: str, nodes: int, seconds: int, resources: Json, image: str, template: Json) -> Json:
    """The Indexed Job of a pool; pure.

    Args:
        seconds: after which the cluster ends it in any case.
        resources: of each pod's container.
        image: "" for the template's.
        template: a pod template of the user's, which is kept but for what a pool needs; labels hold for the job too (Kueue reads them there).
    """
    labels = {
        **template.get("metadata", {}).get("labels", {}),
        MANAGED: "skymagic", JOB: job_id, USER: user(),
    }  # fmt: skip
    asked = template.get("spec", {})
    first, *others = asked.get("containers") or [{}]
    script = (
        "trap 'exit 143' HUP INT TERM\n"
        + HOME
        + CONTAINER.replace("@HOLDER@", holder_script(holder_folder(job_id, "pod")))
    )
    kept = first.get("resources", {})
    container = {
        "name": "skymagic", **first, **({"image": image} if image else {}), "command": ["/bin/sh", "-c", script],
        "resources": {kind: {**kept.get(kind, {}), **resources.get(kind, {})} for kind in ("requests", "limits")},
        "volumeMounts": [*first.get("volumeMounts", []), {"name": "skymagic-shm", "mountPath": "/dev/shm"}],
    }  # fmt: skip
    container.pop("args", None)
    pod = {
        "automountServiceAccountToken": False, "enableServiceLinks": False, **asked,
        "restartPolicy": "Never", "subdomain": object_name(job_id), "containers": [container, *others],
        # 64 MB are usual, and break NCCL and data loaders; this counts as the container's memory
        "volumes": [*asked.get("volumes", []), {"name": "skymagic-shm", "emptyDir": {"medium": "Memory"}}],
    }  # fmt: skip
    spec = {
        "completions": nodes, "parallelism": nodes, "completionMode": "Indexed", "activeDeadlineSeconds": seconds,
        # a pod that is lost takes its own ranks alone, and none comes in its place that nobody uses
        "backoffLimitPerIndex": 0, "podReplacementPolicy": "Failed", "ttlSecondsAfterFinished": 600,
        "template": {"metadata": {**template.get("metadata", {}), "labels": labels}, "spec": pod},
    }  # fmt: skip
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": object_name(job_id), "labels": labels},
        "spec": spec,
    }


def service_of(job: Json, owner: Json) -> Json:
    """The headless Service that names a job's pods for each other; it goes with the job. Pure."""
    metadata = {**job["metadata"], "ownerReferences": [owner]}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB: job["metadata"]["labels"][JOB]}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


# ------------------------------------------------------------------------------------ in words; all of it pure


def refusal_words(status: int, body: Any, label: str) -> str:
    """Why the API server refuses, with what to do."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    found = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)"', text)
    words = json.loads(f'"{found[1]}"') if found else " ".join(text.split())[:300]
    if status == 401:
        return f"{label}: your login has expired or is not valid: log in again, and try kubectl get pods"
    return f"{label}: {words}" + (f"\n  {ROLE}" if status == 403 else "")


def _handshake_status(reason: str) -> int:
    found = re.search(r"Handshake status (\d+)", str(reason))
    return int(found[1]) if found else 0


WAITS = {
    "Unschedulable": "no node has room for it",
    "SchedulingGated": "a scheduling gate holds it: a queue such as Kueue lets it through",
    "ContainerCreating": "its container is made",
    "PodInitializing": "its init containers run",
    "ErrImagePull": "its image could not be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "InvalidImageName": "its image's name is none",
    "CreateContainerConfigError": "it names something that is not there",
}
HOPELESS = ("ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
"""What does not change by itself."""
ENDS = {
    "PreemptionByScheduler": "it was preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "it was evicted: its node is drained",
    "TerminationByKubelet": "its node ended it",
    "DeletionByTaintManager": "its node is not reachable, or is not for it any more",
    "DeletionByPodGC": "its node is gone",
    "Evicted": "its node evicted it",
    "OOMKilled": "it has used more memory than its limit",
    "DeadlineExceeded": "the pool has reached its --max-lifetime",
    "Preempted": "it was preempted by a pod of higher priority",
}


def waiting(pod: Json) -> tuple[str, str]:
    """(reason, message) why a pod does not run, both Kubernetes' own; ("", "") where it runs."""
    status = pod.get("status", {})
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        if told := container.get("state", {}).get("waiting"):
            return told.get("reason", ""), told.get("message", "")
    if status.get("phase") == "Running":
        return "", ""
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", ""), condition.get("message", "")
    return status.get("phase", "Pending"), status.get("message", "")


def waiting_words(pods: Sequence[Json], wanted: int, events: Iterable[Json], suspended: bool) -> str:
    """Why a pool's pods do not all run, those with the same reason together; "" where they do."""
    groups: dict[str, int] = {}
    for pod in pods:
        reason, message = waiting(pod)
        if reason:
            told = "; ".join(filter(None, (WAITS.get(reason, ""), message))) or "nobody says why"
            groups[f"{told} ({reason})"] = groups.get(f"{told} ({reason})", 0) + 1
    if (missing := wanted - len(pods)) > 0:
        said = [one.get("message", "") for one in events if one.get("type") == "Warning"]
        why = "the job is suspended: a queue such as Kueue starts it" if suspended else ""
        groups[why or (said[-1] if said else "they are not made yet")] = missing
    return "; ".join(f"{count(number, 'pod')}: {words}" for words, number in groups.items())


def fate_words(name: str, pod: Json, job: Json, events: Sequence[Json]) -> str:
    """Why a pod is gone; "" where it is not.

    Args:
        pod, job: {} where they are not there any more; the job of a pod that was there before is {} too.
        events: of the pod.
    """
    status = pod.get("status", {})
    reasons: list[tuple[str, str]] = [
        (one.get("reason", ""), one.get("message", ""))
        for one in status.get("conditions", [])
        if one["type"] == "DisruptionTarget" and one["status"] == "True"
    ]
    reasons += [(status["reason"], status.get("message", ""))] if status.get("reason") else []
    for container in status.get("containerStatuses", []):
        if told := container.get("state", {}).get("terminated"):
            reasons.append((told.get("reason", ""), f"exit status {told.get('exitCode')}"))
    running = status.get("phase") == "Running" and not pod.get("metadata", {}).get("deletionTimestamp")
    if running and not reasons:
        return ""
    for condition in job.get("status", {}).get("conditions", []):
        if condition["type"] in ("Failed", "FailureTarget") and condition["status"] == "True":
            reasons.append((condition.get("reason", ""), condition.get("message", "")))
    reasons += [(one.get("reason", ""), one.get("message", "")) for one in events]
    known = [(ENDS[reason], reason, message) for reason, message in reasons if reason in ENDS]
    if known:
        words, reason, message = known[0]
        return f"{words} ({reason}{': ' if message else ''}{message})"
    if reasons and status.get("phase") in ("Failed", "Succeeded"):
        return f"pod {name} has ended ({', '.join(filter(None, reasons[0]))})"
    return f"pod {name} was deleted, and not from this notebook"


def hopeless(pods: Iterable[Json]) -> str:
    """Why pods will not run in any case; "" where they may."""
    told = [waiting(pod) for pod in pods]
    return "; ".join(
        dict.fromkeys(f"{WAITS[reason]}: {message} ({reason})" for reason, message in told if reason in HOPELESS)
    )
