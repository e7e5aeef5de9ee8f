"""The API server of a cluster, as a pool needs it: what is asked of it, exec as a channel, and why pods wait or have ended, in words.

A pool is one Indexed Job and a headless Service that goes with it. Each pod runs a *holder*, as Slurm's nodes do; all else comes by exec::

    Job ──▶ pod, whose first process runs the holder ──▶ daemon ──▶ agent ──▶ ranks
    GET pods/NAME/exec, a WebSocket (v5.channel.k8s.io): /bin/sh …      a channel: scripts, processes, and the way to the daemon

Only this module imports the official client, and only when it is used.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skymagic.errors import HostError, ProvisionError, RequestError
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import count
from skymagic.providers.cluster import holder_folder, holder_script
from skymagic.ssh.command import SocketChannel
from skymagic.wire import tls
from skymagic.wire.threads import start_all

Json = dict[str, Any]
SECONDS = (10.0, 60.0)
"""For which a connection, and an answer, may take."""
PING_SECONDS = 20.0
"""Between two pings: load balancers cut connections that say nothing for five minutes, some for one."""
PIECE = 1 << 16
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
    return [
        Path(one).expanduser()
        for one in os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)
        if one
    ]


def configured_at() -> tuple[object, ...]:
    """A value that changes when the kubeconfig does."""
    return tuple((str(one), one.stat().st_mtime_ns) for one in _kubeconfigs() if one.exists())


def _configured(context: str) -> tuple[Any, str, str]:
    """The client's configuration, the context's name ("" in a pod), and its namespace. Raises RequestError."""
    kubernetes = official()
    from yaml import YAMLError

    configuration, config = kubernetes.client.Configuration(), kubernetes.config
    if not context and os.environ.get("KUBERNETES_SERVICE_HOST") and not configured_at():
        config.load_incluster_config(client_configuration=configuration)
        return configuration, "", (ACCOUNT / "namespace").read_text().strip()
    try:
        files = os.pathsep.join(
            map(str, _kubeconfigs())
        )  # the client has read KUBECONFIG when it was imported
        contexts, active = config.list_kube_config_contexts(config_file=files)
        found = {one["name"]: one["context"] for one in contexts}
        name = context or active["name"]
        if name not in found:
            nearest = did_you_mean(name, found) or f"; available: {', '.join(found)}"
            raise RequestError(f"--context: the kubeconfig has no context {name!r}{nearest}")
        config.load_kube_config(config_file=files, context=name, client_configuration=configuration)
    except (config.ConfigException, OSError, YAMLError) as problem:
        raise RequestError(
            f"--provider kubernetes: no cluster is configured here: {problem}"
        ) from None
    if not configuration.verify_ssl:
        raise RequestError(
            f"--context: {name} does not check the server's certificate (insecure-skip-tls-verify): "
            "anybody between could read and change what a pool sends; give it the cluster's certificate-authority"
        )
    address = urlsplit(configuration.host)
    if address.scheme == "http" and not _is_loopback(address.hostname or ""):
        raise RequestError(
            f"--context: {name} reaches its server at {configuration.host} without TLS: anybody between could read and change what "
            "a pool sends; give it the server's https:// address"
        )
    return configuration, name, found[name].get("namespace") or "default"


def _is_loopback(host: str) -> bool:
    """Whether a server is on this machine, as `kubectl proxy` is."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
                if problem.status == 404 and not call.__name__.startswith("create"):
                    return {}
                raise ProvisionError(
                    refusal_words(problem.status, problem.body or problem.reason, self.label)
                ) from None
            except (HTTPError, OSError) as problem:
                if not repeated:
                    raise ProvisionError(
                        f"{self.label}: the API server does not answer: {problem}"
                    ) from None
                repeated = False

    @property
    def label(self) -> str:
        """Name of the cluster in messages."""
        return (
            f"Kubernetes (context {self.context})"
            if self.context
            else "Kubernetes (this pod's service account)"
        )

    def mistakes(self, attaching: bool) -> list[str]:
        """Why no pool can be made here: an old server, and all rights that are missing, each named."""
        told = self._ask(self._version.get_code)
        number = tuple(
            int(re.sub(r"\D.*", "", told.get(part, "")) or 0) for part in ("major", "minor")
        )
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
        what = {
            "namespace": self.namespace,
            "group": group,
            "resource": resource,
            "subresource": sub,
            "verb": verb,
        }
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        review = self._ask(
            self._reviews.create_self_subject_access_review,
            {**body, "spec": {"resourceAttributes": what}},
        )
        return bool(review["status"]["allowed"])

    def create(self, job: Json) -> None:
        """Make a job, and the Service that goes with it."""
        # strict: else a misspelt field of a template is dropped without a word
        made = self._ask(
            self._batch.create_namespaced_job, self.namespace, job, field_validation="Strict"
        )
        self._ask(
            self._core.create_namespaced_service,
            self.namespace,
            service_of(job, made["metadata"]["uid"]),
        )

    def delete(self, job: str) -> None:
        """Delete a job with its pods and its Service; one that is not there is deleted."""
        self._ask(
            self._batch.delete_namespaced_job, job, self.namespace, propagation_policy="Background"
        )

    def job(self, name: str) -> Json:
        """A job; {} where it is gone."""
        return self._ask(self._batch.read_namespaced_job, name, self.namespace)

    def jobs(self) -> list[Json]:
        """All jobs of pools here, of every user."""
        labels = f"{MANAGED}=skymagic"
        return list(
            self._ask(self._batch.list_namespaced_job, self.namespace, label_selector=labels)[
                "items"
            ]
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
                raise ProvisionError(
                    refusal_words(problem.status, problem.body or "", self.label)
                ) from None
        finally:
            watch.stop()

    def events(self, name: str) -> list[Json]:
        """What was told of an object, the newest last; nothing where that may not be read."""
        try:
            found = self._ask(
                self._core.list_namespaced_event,
                self.namespace,
                field_selector=f"involvedObject.name={name}",
            )
        except ProvisionError:
            return []
        return sorted(
            found.get("items", []),
            key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""),
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
        except (kubernetes.client.ApiException, AttributeError) as failed:
            # client 36 decodes the body of each refusal, and that of a WebSocket has none: what it was about is behind that error
            problem = (
                failed if isinstance(failed, kubernetes.client.ApiException) else failed.__context__
            )
            reason = getattr(problem, "reason", None) or str(failed)
            raise HostError(
                pod, refusal_words(_handshake_status(reason), reason, self.label)
            ) from None
        if opened.subprotocol != kubernetes.stream.ws_client.V5_CHANNEL_PROTOCOL:
            opened.close()
            raise HostError(
                pod,
                f"{self.label} speaks {opened.subprotocol}: something between it and here is older than 1.30",
            )
        return opened.sock


def _place(pod: Json) -> tuple[int, str]:
    index = (
        pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index", "0")
    )
    return int(index), str(pod["metadata"]["name"])


# ------------------------------------------------------------------------------------ the channel


class ExecChannel(SocketChannel):
    """Exec as a channel: a thread for each way.

    Args:
        connect: opens the WebSocket to a command.
        before: sh that runs before the shell.
    """

    def __init__(self, connect: Callable[[Sequence[str]], Any], before: str) -> None:
        super().__init__()
        self._connect, self._before = connect, before
        self._sending = threading.Lock()
        self._out: socket.socket | None = None

    def exec_command(self, command: str) -> None:
        """Start the shell in the container. Raises HostError."""
        web = self._connect(["/bin/sh", "-c", self._before + command])
        if isinstance(web.sock, ssl.SSLSocket):  # which two threads cannot use at once
            near, far = socket.socketpair()
            start_all([partial(tls.pump, web.sock, far)], name="skymagic-exec-tls")
            web.sock = near
        web.sock.settimeout(PING_SECONDS)
        self._out = web.sock.dup()
        self._out.settimeout(None)
        start_all([partial(self._read, web), partial(self._write, self._out)], name="skymagic-exec")

    def _end(self) -> None:
        if self._out is not None:
            with contextlib.suppress(OSError):
                self._out.shutdown(socket.SHUT_RDWR)
            self.status_event.wait(PING_SECONDS)
            self._out.close()

    def _write(self, out: socket.socket) -> None:
        """Pass the shell's input on, to its end."""
        with contextlib.suppress(OSError):  # closed, here or there
            while data := self._theirs.recv(PIECE):
                with self._sending:
                    out.sendall(_frame("BINARY", bytes([STDIN]) + data))
            with self._sending:
                out.sendall(_frame("BINARY", bytes([CLOSE, STDIN])))

    def _read(self, web: Any) -> None:
        """Pass the shell's output and errors on, to its end; ping where nothing comes."""
        import websocket

        said, silent, channel = bytearray(), 0, STDOUT
        try:
            while (
                silent < 3
            ):  # else not even a pong came: the connection was cut, and nobody was told
                try:
                    frame = web.recv_frame()
                    silent = 0
                except websocket.WebSocketTimeoutException:
                    silent += 1
                    self._answer("PING", b"")
                    continue
                if frame.opcode == frame.OPCODE_CLOSE:
                    break
                if frame.opcode == frame.OPCODE_PING:
                    self._answer("PONG", frame.data)
                elif frame.opcode != frame.OPCODE_PONG:
                    data = memoryview(frame.data)
                    if (
                        frame.opcode != frame.OPCODE_CONT and data
                    ):  # what continues a message has no channel of its own
                        channel, data = data[0], data[1:]
                    if channel == STATUS:
                        said += data
                    else:
                        (self._theirs if channel == STDOUT else self._their_errors).sendall(data)
        except (OSError, websocket.WebSocketException):
            pass  # lost, or nobody reads any more
        self._status, words = exit_status(bytes(said))
        with contextlib.suppress(OSError):
            self._their_errors.sendall(words.encode())
        for each in filter(
            None, (web.sock, self._theirs, self._their_errors)
        ):  # a WebSocket that was lost has none
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        web.shutdown()
        self.status_event.set()

    def _answer(self, kind: str, data: bytes) -> None:
        """Unless something is sent just now, which says as much, and may wait for what is read here."""
        if self._sending.acquire(blocking=False):
            try:
                assert self._out is not None
                self._out.sendall(_frame(kind, data))
            finally:
                self._sending.release()


def _frame(kind: str, data: bytes) -> bytes:
    frames = official().stream.ws_client.ABNF
    return bytes(frames.create_frame(data, getattr(frames, f"OPCODE_{kind}")).format())


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
    return (
        (int(codes[0]), "")
        if codes and codes[0].isdigit()
        else (-1, str(status.get("message", "")))
    )


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
    """The name of a pool's objects: a DNS label that begins with a letter, as a Service's must, with room for a pod's number."""
    head = re.sub(r"[^a-z0-9]+", "-", job_id[:-9].lower()).strip("-")[:40].strip("-")
    return f"{'' if head[:1].isalpha() else 'pool-'}{head}".strip("-") + job_id[-9:].lower()


def user() -> str:
    """Who makes pools here, as a label has it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", getpass.getuser()).strip("-_.")[:63]


def job_words(job: Json) -> tuple[str, float | None]:
    """How a job is, and when it ends at the latest in seconds since 1970."""
    if ended := _true(job, "Complete", "Failed", "Suspended"):
        return ended[0]["type"].lower(), None
    status = job.get("status", {})
    state = f"{count(status.get('active', 0), 'pod')} active, {status.get('ready', 0)} ready"
    begun = status.get("startTime")
    ends = (
        datetime.fromisoformat(begun).timestamp() + job["spec"]["activeDeadlineSeconds"]
        if begun
        else None
    )
    return state, ends


def job_manifest(
    job_id: str, nodes: int, seconds: int, resources: Json, image: str, template: Json
) -> Json:
    """The Indexed Job of a pool; pure.

    Args:
        seconds: after which the cluster ends it in any case.
        resources: of each pod's container.
        image: "" for the template's.
        template: a pod template of the user's, which is kept but for what a pool needs; labels hold for the job too (Kueue reads them there).
    """
    labels = {
        **(template.get("metadata", {}).get("labels") or {}),
        MANAGED: "skymagic", JOB: job_id, USER: user(),
    }  # fmt: skip
    asked = template.get("spec", {})
    first, *others = asked.get("containers") or [{}]
    kept, mounts = first.get("resources") or {}, first.get("volumeMounts") or []
    # 64 MB are usual, and break NCCL and data loaders; this counts as the container's memory. A template may have one of its own
    shm = all(one.get("mountPath", "").rstrip("/") != "/dev/shm" for one in mounts)
    own_mounts = [{"name": "skymagic-shm", "mountPath": "/dev/shm"}] * shm
    script = (
        "trap 'exit 143' HUP INT TERM\n"
        + HOME
        + CONTAINER.replace("@HOLDER@", holder_script(holder_folder(job_id, "pod")))
    )
    container = {
        "name": "skymagic", **first, **({"image": image} if image else {}),
        "command": ["/bin/sh", "-c", script.replace("$", "$$")],  # Kubernetes makes $ of each $$, and puts variables in: $(NAME)
        "resources": {kind: {**(kept.get(kind) or {}), **resources.get(kind, {})} for kind in ("requests", "limits")},
        "volumeMounts": [*mounts, *own_mounts],
    }  # fmt: skip
    container.pop("args", None)
    pod = {
        "automountServiceAccountToken": False, "enableServiceLinks": False, **asked,
        "restartPolicy": "Never", "subdomain": object_name(job_id), "containers": [container, *others],
        "volumes": [*(asked.get("volumes") or []), *({"name": one["name"], "emptyDir": {"medium": "Memory"}} for one in own_mounts)],
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


def service_of(job: Json, uid: str) -> Json:
    """The headless Service that names a job's pods for each other; it goes with the job, which has this uid. Pure."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": uid}
    metadata = {**job["metadata"], "ownerReferences": [owner]}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB: job["metadata"]["labels"][JOB]},
    }
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


CREATING = "ContainerCreating"
"""Volumes, network and image come now; only events tell which of them takes long, or fails again and again."""
WORDS = {
    "Unschedulable": "no node has room for it",
    "SchedulingGated": "a scheduling gate holds it: a queue such as Kueue lets it through",
    "Pending": "it was only just made",
    CREATING: "its container is made",
    "PodInitializing": "its init containers run",
    "ErrImagePull": "its image could not be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "InvalidImageName": "its image's name is none",
    "CreateContainerConfigError": "its container cannot be made from its spec",
    "PreemptionByScheduler": "it was preempted by a pod of higher priority",
    "Preempted": "it was preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "it was evicted: its node is drained",
    "Evicted": "its node evicted it",
    "TerminationByKubelet": "its node ended it",
    "DeletionByTaintManager": "its node is not reachable, or is not for it any more",
    "DeletionByPodGC": "its node is gone",
    "OOMKilled": "it has used more memory than its limit",
    "DeadlineExceeded": "the pool has reached its --max-lifetime",
}
"""Kubernetes' reason → why a pod waits, or has ended."""
HOPELESS = ("ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
"""What does not change by itself."""


def _true(thing: Json, *kinds: str) -> list[Json]:
    """The conditions of these kinds that hold."""
    told = thing.get("status", {}).get("conditions", [])
    return [one for one in told if one["type"] in kinds and one["status"] == "True"]


def waiting(pod: Json) -> tuple[str, str]:
    """(reason, message) why a pod does not run, both Kubernetes' own; ("", "") where it runs."""
    status = pod.get("status", {})
    for container in [
        *status.get("initContainerStatuses", []),
        *status.get("containerStatuses", []),
    ]:
        if told := container.get("state", {}).get("waiting"):
            return told.get("reason", ""), told.get("message", "")
    if status.get("phase") == "Running":
        return "", ""
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", ""), condition.get("message", "")
    return status.get("phase", "Pending"), status.get("message", "")


def waiting_words(
    pods: Sequence[Json],
    wanted: int,
    events: Iterable[Json],
    suspended: bool,
    creating: Sequence[Json] = (),
) -> str:
    """Why a pool's pods do not all run, those with the same reason together; "" where they do.

    Args:
        events: of their job. creating: of the first one that is `CREATING`.
    """
    groups: dict[str, int] = {}
    for pod in pods:
        reason, message = waiting(pod)
        message = _creating_words(creating) if reason == CREATING else message
        if reason:
            told = "; ".join(filter(None, (WORDS.get(reason, ""), message))) or "nobody says why"
            groups[f"{told} ({reason})"] = groups.get(f"{told} ({reason})", 0) + 1
    if (missing := wanted - len(pods)) > 0:
        said = [one.get("message", "") for one in events if one.get("type") == "Warning"]
        why = "the job is suspended: a queue such as Kueue starts it" if suspended else ""
        groups[why or (said[-1] if said else "they are not made yet")] = missing
    return "; ".join(f"{count(number, 'pod')}: {words}" for words, number in groups.items())


def _creating_words(events: Sequence[Json]) -> str:
    """What takes long, or has failed last, while a container is made; "" where nobody tells."""
    told = [
        one
        for one in events
        if one.get("reason", "").startswith("Failed") or one.get("reason") == "Pulling"
    ]
    return str(told[-1].get("message", "")) if told else ""


def fate_words(name: str, pod: Json, job: Json, events: Sequence[Json]) -> str:
    """Why a pod is gone; "" where it is not.

    Args:
        pod, job: {} where they are not there any more; the job of a pod that was there before is {} too.
        events: of the pod.
    """
    status = pod.get("status", {})
    told = [*_true(pod, "DisruptionTarget"), *([status] if status.get("reason") else [])]
    for container in status.get("containerStatuses", []):
        if ended := container.get("state", {}).get("terminated"):
            told.append(
                {"reason": ended.get("reason"), "message": f"exit status {ended.get('exitCode')}"}
            )
    if (
        status.get("phase") == "Running"
        and not pod["metadata"].get("deletionTimestamp")
        and not told
    ):
        return ""
    told += [*_true(job, "Failed", "FailureTarget"), *events]
    reasons = [(one.get("reason") or "", one.get("message") or "") for one in told]
    if known := next((each for each in reasons if each[0] in WORDS), None):
        return f"{WORDS[known[0]]} ({': '.join(filter(None, known))})"
    if reasons and status.get("phase") in ("Failed", "Succeeded"):
        return f"pod {name} has ended ({', '.join(filter(None, reasons[0]))})"
    return f"pod {name} was deleted, and not from this notebook"


def hopeless(pods: Iterable[Json], events: Iterable[Json] = ()) -> str:
    """Why pods will not run in any case; "" where they may.

    Args:
        events: of their job.
    """
    told = [waiting(pod) for pod in pods]
    said = [
        f"{WORDS[reason]}: {message} ({reason})" for reason, message in told if reason in HOPELESS
    ]
    barred = [one["message"] for one in events if "violates PodSecurity" in one.get("message", "")][
        -1:
    ]
    said += [
        f"{words}\n  docs/how-to/kubernetes.md has a --pod-template for such namespaces"
        for words in barred
    ]
    return "; ".join(dict.fromkeys(said))
