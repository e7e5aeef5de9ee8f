"""The API server of a Kubernetes cluster: requests, exec as a channel, and explanations.

A pool is one Indexed Job and a headless Service that belongs to it. Each pod runs a *holder*, as on
Slurm's nodes; everything else goes through exec::

    Job ──▶ pod, whose first process runs the holder ──▶ daemon ──▶ agent ──▶ ranks
    GET pods/NAME/exec, a WebSocket (v5.channel.k8s.io): /bin/sh …      a channel: scripts, daemon

Only this module imports the official client, and only on use.
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
from skymagic.providers.holder import holder_folder, holder_script
from skymagic.ssh.command import SocketChannel
from skymagic.wire import tls
from skymagic.wire.threads import start_all
from skymagic.wire.typed import JsonObject

SECONDS = (10.0, 60.0)
"""Timeouts in seconds for connecting and for an answer."""
PING_SECONDS = 20.0
"""Seconds between pings.

Load balancers cut connections that are silent for five minutes, some after one minute.
"""
PIECE = 1 << 16
OLDEST = (1, 30)
"""First version whose exec can close a shell's input and still read its output (v5.channel.k8s.io).
"""
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
"""Channels of exec: the first byte of each message."""
JOB, USER, MANAGED = "skymagic/job", "skymagic/user", "app.kubernetes.io/managed-by"
"""Labels on all of a pool's objects."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RIGHTS = (
    ("batch", "jobs", "", ("create", "get", "list", "delete")),
    ("", "services", "", ("create",)),
    ("", "pods", "", ("get", "list", "watch")),
    ("", "pods", "exec", ("get", "create")),
)
"""Permissions that a pool needs: (API group, resource, subresource, verbs).

Exec over a WebSocket is a GET; servers from 1.35 require `create` as well.
"""
ROLE = "docs/how-to/kubernetes.md has a Role with all of them"


@cache
def official_client() -> Any:
    """Return the official client. Raises ProvisionError with the command that installs it."""
    try:
        import kubernetes
        import kubernetes.stream.ws_client
        import kubernetes.watch
    except ImportError as problem:
        raise ProvisionError(
            f"--provider kubernetes needs the package kubernetes ({problem}): "
            "pip install 'skymagic[kubernetes]'",
            code="package-missing",
            names=["kubernetes"],
        ) from None
    return kubernetes


def _kubeconfigs() -> list[Path]:
    return [
        Path(file).expanduser()
        for file in os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)
        if file
    ]


def configured_at() -> tuple[object, ...]:
    """Return a value that changes whenever the kubeconfig does."""
    return tuple((str(file), file.stat().st_mtime_ns) for file in _kubeconfigs() if file.exists())


def _load_configuration(context: str) -> tuple[Any, str, str]:
    """Load the client's configuration. Raises RequestError.

    Returns:
        The configuration, the context's name ("" in a pod), and the context's namespace.
    """
    kubernetes = official_client()
    from yaml import YAMLError

    configuration, config = kubernetes.client.Configuration(), kubernetes.config
    if not context and os.environ.get("KUBERNETES_SERVICE_HOST") and not configured_at():
        config.load_incluster_config(client_configuration=configuration)
        return configuration, "", (ACCOUNT / "namespace").read_text().strip()
    try:
        # the client itself reads KUBECONFIG only on import
        files = os.pathsep.join(map(str, _kubeconfigs()))
        contexts, active = config.list_kube_config_contexts(config_file=files)
        contexts_by_name = {entry["name"]: entry["context"] for entry in contexts}
        name = context or active["name"]
        if name not in contexts_by_name:
            nearest = (
                did_you_mean(name, contexts_by_name)
                or f"; available: {', '.join(contexts_by_name)}"
            )
            raise RequestError(
                f"--context: the kubeconfig has no context {name!r}{nearest}",
                code="no-context",
                names=[name],
            )
        config.load_kube_config(config_file=files, context=name, client_configuration=configuration)
    except (config.ConfigException, OSError, YAMLError) as problem:
        raise RequestError(
            f"--provider kubernetes: no cluster is configured here: {problem}", code="no-cluster"
        ) from None
    if not configuration.verify_ssl:
        raise RequestError(
            f"--context: {name} does not check the server's certificate "
            "(insecure-skip-tls-verify): "
            "anybody between could read and change what a pool sends; "
            "give it the cluster's certificate-authority",
            code="cluster-unverified",
            names=[name],
        )
    address = urlsplit(configuration.host)
    if address.scheme == "http" and not _is_loopback(address.hostname or ""):
        raise RequestError(
            f"--context: {name} reaches its server at {configuration.host} without TLS: "
            "anybody between could read and change what "
            "a pool sends; give it the server's https:// address",
            code="cluster-unverified",
            names=[name],
        )
    return configuration, name, contexts_by_name[name].get("namespace") or "default"


def _is_loopback(host: str) -> bool:
    """Return True for a server on this machine, such as `kubectl proxy`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class KubernetesCluster:
    """Client for one namespace of a cluster. Thread-safe. Returns objects as JSON.

    Args:
        context: context of the kubeconfig; "" for the current one or, in a pod without a
            kubeconfig, its service account.
        namespace: namespace to use; "" for the context's.

    Raises:
        RequestError: the context does not exist, or no context is configured.
    """

    def __init__(self, context: str = "", namespace: str = "") -> None:
        self._configuration, self.context, usual = _load_configuration(context)
        self._configuration.retries = False  # urllib3 would print each retry
        self.namespace = namespace or usual
        client = official_client().client
        self.client = api = client.ApiClient(self._configuration)
        """The official client with its current configuration."""
        self._core, self._batch = client.CoreV1Api(api), client.BatchV1Api(api)
        self._version, self._reviews = client.VersionApi(api), client.AuthorizationV1Api(api)

    def _ask(self, call: Callable[..., Any], *args: Any, **options: Any) -> JsonObject:
        """Return the answer to a call, or ``{}`` for a missing object.

        Raises ProvisionError with the reason if the server refuses the call.
        """
        from urllib3.exceptions import HTTPError

        # an idle connection may have been closed, so everything but a creation is retried once
        repeated = not call.__name__.startswith("create")
        while True:
            try:
                answer = call(*args, **options, _preload_content=False, _request_timeout=SECONDS)
                return dict(json.loads(answer.data))
            except official_client().client.ApiException as problem:
                if problem.status == 404 and not call.__name__.startswith("create"):
                    return {}
                raise ProvisionError(
                    refusal_words(problem.status, problem.body or problem.reason, self.label),
                    code="kubernetes-refused",
                ) from None
            except (HTTPError, OSError) as problem:
                if not repeated:
                    raise ProvisionError(
                        f"{self.label}: the API server does not answer: {problem}",
                        code="kubernetes-unreached",
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
        """Return why no pool can be created here.

        Reports a server that is too old, or each missing permission.
        """
        server_version = self._ask(self._version.get_code)
        number = tuple(
            int(re.sub(r"\D.*", "", server_version.get(part, "")) or 0)
            for part in ("major", "minor")
        )
        if number < OLDEST:
            return [
                f"{self.label} runs version {server_version.get('gitVersion')}: "
                "skymagic needs 1.30 or newer, whose exec has half-close"
            ]
        needed = [right for right in RIGHTS if not attaching or right[1] == "pods"]
        missing = [
            f"you may not {verb} {'/'.join(filter(None, (resource, sub)))} "
            f"in namespace {self.namespace}"
            for group, resource, sub, verbs in needed
            for verb in verbs
            if not self._allowed(group, resource, sub, verb)
        ]
        return [*missing, ROLE] if missing else []

    def _allowed(self, group: str, resource: str, sub: str, verb: str) -> bool:
        attributes = {
            "namespace": self.namespace,
            "group": group,
            "resource": resource,
            "subresource": sub,
            "verb": verb,
        }
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        review = self._ask(
            self._reviews.create_self_subject_access_review,
            {**body, "spec": {"resourceAttributes": attributes}},
        )
        return bool(review["status"]["allowed"])

    def create(self, job: JsonObject) -> None:
        """Create a job and the Service that belongs to it."""
        # strict: otherwise a misspelt field of a template is dropped silently
        created = self._ask(
            self._batch.create_namespaced_job, self.namespace, job, field_validation="Strict"
        )
        self._ask(
            self._core.create_namespaced_service,
            self.namespace,
            service_of(job, created["metadata"]["uid"]),
        )

    def delete(self, job: str) -> None:
        """Delete a job with its pods and its Service.

        A job that does not exist counts as deleted.
        """
        self._ask(
            self._batch.delete_namespaced_job, job, self.namespace, propagation_policy="Background"
        )

    def job(self, name: str) -> JsonObject:
        """Return a job, or {} if it is gone."""
        return self._ask(self._batch.read_namespaced_job, name, self.namespace)

    def jobs(self) -> list[JsonObject]:
        """Return all pool jobs in the namespace, of every user."""
        labels = f"{MANAGED}=skymagic"
        return list(
            self._ask(self._batch.list_namespaced_job, self.namespace, label_selector=labels)[
                "items"
            ]
        )

    def pod(self, name: str) -> JsonObject:
        """Return a pod, or {} if it is gone."""
        return self._ask(self._core.read_namespaced_pod, name, self.namespace)

    def pods(self, labels: str) -> tuple[list[JsonObject], str]:
        """Return the pods with these labels by index and name, and the version of the list."""
        answer = self._ask(self._core.list_namespaced_pod, self.namespace, label_selector=labels)
        return sorted(answer["items"], key=_place), answer["metadata"]["resourceVersion"]

    def wait_for_change(self, labels: str, version: str, seconds: int) -> None:
        """Wait until one of these pods changes after that list, or until the timeout.

        Can be interrupted.
        """
        kubernetes = official_client()
        watch = kubernetes.watch.Watch()
        try:
            for _ in watch.stream(
                self._core.list_namespaced_pod,
                self.namespace,
                label_selector=labels,
                resource_version=version,
                timeout_seconds=seconds,
                _request_timeout=seconds + SECONDS[0],
            ):
                return
        except kubernetes.client.ApiException as problem:
            if problem.status != 410:  # the list is too old: the next one is not
                raise ProvisionError(
                    refusal_words(problem.status, problem.body or "", self.label),
                    code="kubernetes-refused",
                ) from None
        finally:
            watch.stop()

    def events(self, name: str) -> list[JsonObject]:
        """Return the events of an object, the newest last; nothing if reading them is forbidden."""
        try:
            answer = self._ask(
                self._core.list_namespaced_event,
                self.namespace,
                field_selector=f"involvedObject.name={name}",
            )
        except ProvisionError:
            return []
        return sorted(
            answer.get("items", []),
            key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""),
        )

    def exec(self, pod: str, container: str, command: Sequence[str]) -> Any:
        """Open a WebSocket to a command that runs in a container. Raises HostError."""
        kubernetes = official_client()
        # a separate client, because `stream` modifies the one it gets
        core = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(self._configuration))
        try:
            opened = kubernetes.stream.stream(
                core.connect_get_namespaced_pod_exec,
                pod,
                self.namespace,
                command=list(command),
                container=container,
                stdin=True,
                stdout=True,
                stderr=True,
                tty=False,
                _preload_content=False,
                binary=True,
            )
        except (kubernetes.client.ApiException, AttributeError) as failed:
            # client 36 decodes the body of each refusal, but a WebSocket's refusal has none:
            # the original error is the context of the decoding error
            problem = (
                failed if isinstance(failed, kubernetes.client.ApiException) else failed.__context__
            )
            reason = getattr(problem, "reason", None) or str(failed)
            raise HostError(
                pod,
                refusal_words(_handshake_status(reason), reason, self.label),
                code="kubernetes-refused",
            ) from None
        if opened.subprotocol != kubernetes.stream.ws_client.V5_CHANNEL_PROTOCOL:
            opened.close()
            raise HostError(
                pod,
                f"{self.label} speaks {opened.subprotocol}: "
                "something between it and here is older than 1.30",
            )
        return opened.sock


def _place(pod: JsonObject) -> tuple[int, str]:
    index = (
        pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index", "0")
    )
    return int(index), str(pod["metadata"]["name"])


# ------------------------------------------------------------------------------------ the channel


class ExecChannel(SocketChannel):
    """Channel over exec, with a thread for each direction.

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
        """Forward the shell's input until it ends."""
        with contextlib.suppress(OSError):  # closed, here or there
            while data := self._theirs.recv(PIECE):
                with self._sending:
                    out.sendall(_frame("BINARY", bytes([STDIN]) + data))
            with self._sending:
                out.sendall(_frame("BINARY", bytes([CLOSE, STDIN])))

    def _read(self, web: Any) -> None:
        """Forward the shell's output and errors until they end.

        Pings while the connection is silent.
        """
        import websocket

        status_message, silent, channel = bytearray(), 0, STDOUT
        try:
            # after three silent intervals not even a pong came: the connection was cut silently
            while silent < 3:
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
                    # frames that continue a message have no channel byte
                    if frame.opcode != frame.OPCODE_CONT and data:
                        channel, data = data[0], data[1:]
                    if channel == STATUS:
                        status_message += data
                    else:
                        (self._theirs if channel == STDOUT else self._their_errors).sendall(data)
        except (OSError, websocket.WebSocketException):
            pass  # lost, or nobody reads any more
        self._status, message = exit_status(bytes(status_message))
        with contextlib.suppress(OSError):
            self._their_errors.sendall(message.encode())
        # a lost WebSocket has no socket
        for connection in filter(None, (web.sock, self._theirs, self._their_errors)):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        web.shutdown()
        self.status_event.set()

    def _answer(self, kind: str, data: bytes) -> None:
        """Send a frame unless another thread is sending right now.

        The other thread's frame shows the server as much. Waiting for it could deadlock, because it
        may depend on what this thread reads.
        """
        if self._sending.acquire(blocking=False):
            try:
                assert self._out is not None
                self._out.sendall(_frame(kind, data))
            finally:
                self._sending.release()


def _frame(kind: str, data: bytes) -> bytes:
    frames = official_client().stream.ws_client.ABNF
    return bytes(frames.create_frame(data, getattr(frames, f"OPCODE_{kind}")).format())


def exit_status(message: bytes) -> tuple[int, str]:
    """Parse the message on exec's status channel. Pure.

    Returns:
        The exit status and "", or -1 and the reason why the status is missing.
    """
    try:
        status = json.loads(message)
    except ValueError:
        return -1, ""
    if status.get("status") == "Success":
        return 0, ""
    causes = (status.get("details") or {}).get("causes") or []
    codes = [cause.get("message", "") for cause in causes if cause.get("reason") == "ExitCode"]
    return (
        (int(codes[0]), "")
        if codes and codes[0].isdigit()
        else (-1, str(status.get("message", "")))
    )


# ------------------------------------------------------------------------------------ objects


HOME = r"""id=$(id -u)
name=$(id -un 2>/dev/null) || name=$id
: "${USER:=$name}" "${LOGNAME:=$USER}"
case $HOME in ''|/) HOME=/none ;; esac
[ -w "$HOME" ] || { HOME=/tmp/skymagic-home-$id; (umask 077; mkdir -p "$HOME"); }
export HOME USER LOGNAME
"""
"""Runs before each shell.

An image with a numeric user has neither a writable home nor a user name.
"""
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
"""First process of a pod. Forwards the signal that ends the pod.

The signal goes to the holder and to its daemons' agents, which run the ranks' hooks. The processes
are told apart by their depth below this one: holder, its subshell, daemon, agent. Ranks do not get
the signal, because it would kill them; nor do processes started through exec, because they carry
the ranks' last output.
"""


def object_name(job_id: str) -> str:
    """Return the name of a pool's objects.

    It is a DNS label that begins with a letter, as a Service's must, with room for a pod's number.
    """
    head = re.sub(r"[^a-z0-9]+", "-", job_id[:-9].lower()).strip("-")[:40].strip("-")
    return f"{'' if head[:1].isalpha() else 'pool-'}{head}".strip("-") + job_id[-9:].lower()


def user() -> str:
    """Return the local user's name in the form of a label."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", getpass.getuser()).strip("-_.")[:63]


def job_words(job: JsonObject) -> tuple[str, float | None]:
    """Describe the state of a job, with its latest end in seconds since 1970."""
    if ended := _true(job, "Complete", "Failed", "Suspended"):
        return ended[0]["type"].lower(), None
    status = job.get("status", {})
    state = f"{count(status.get('active', 0), 'pod')} active, {status.get('ready', 0)} ready"
    started = status.get("startTime")
    ends = (
        datetime.fromisoformat(started).timestamp() + job["spec"]["activeDeadlineSeconds"]
        if started
        else None
    )
    return state, ends


def job_manifest(
    job_id: str, nodes: int, seconds: int, resources: JsonObject, image: str, template: JsonObject
) -> JsonObject:
    """Return the Indexed Job of a pool. Pure.

    Args:
        seconds: lifetime after which the cluster ends the job in any case.
        resources: resources of each pod's container.
        image: image of the container; "" for the template's.
        template: pod template of the user, changed only where a pool needs it. Its labels also
            apply to the job, where Kueue reads them.
    """
    labels = {
        **(template.get("metadata", {}).get("labels") or {}),
        MANAGED: "skymagic",
        JOB: job_id,
        USER: user(),
    }
    pod_spec = template.get("spec", {})
    first, *other_containers = pod_spec.get("containers") or [{}]
    existing, mounts = first.get("resources") or {}, first.get("volumeMounts") or []
    # the default of 64 MB breaks NCCL and data loaders; this volume counts as the container's
    # memory. A template may already have one
    shm = all(mount.get("mountPath", "").rstrip("/") != "/dev/shm" for mount in mounts)
    own_mounts = [{"name": "skymagic-shm", "mountPath": "/dev/shm"}] * shm
    script = (
        "trap 'exit 143' HUP INT TERM\n"
        + HOME
        + CONTAINER.replace("@HOLDER@", holder_script(holder_folder(job_id, "pod")))
    )
    container = {
        "name": "skymagic",
        **first,
        **({"image": image} if image else {}),
        # Kubernetes turns each $$ into $, and expands $(NAME)
        "command": ["/bin/sh", "-c", script.replace("$", "$$")],
        "resources": {
            kind: {**(existing.get(kind) or {}), **resources.get(kind, {})}
            for kind in ("requests", "limits")
        },
        "volumeMounts": [*mounts, *own_mounts],
    }
    container.pop("args", None)
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **pod_spec,
        "restartPolicy": "Never",
        "subdomain": object_name(job_id),
        "containers": [container, *other_containers],
        "volumes": [
            *(pod_spec.get("volumes") or []),
            *({"name": mount["name"], "emptyDir": {"medium": "Memory"}} for mount in own_mounts),
        ],
    }
    spec = {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "activeDeadlineSeconds": seconds,
        # a lost pod takes only its own ranks with it, and is not replaced by a pod that nobody uses
        "backoffLimitPerIndex": 0,
        "podReplacementPolicy": "Failed",
        "ttlSecondsAfterFinished": 600,
        "template": {"metadata": {**template.get("metadata", {}), "labels": labels}, "spec": pod},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": object_name(job_id), "labels": labels},
        "spec": spec,
    }


def service_of(job: JsonObject, uid: str) -> JsonObject:
    """Return the headless Service that lets a job's pods resolve each other. Pure.

    It is owned by the job with this uid, and deleted with it.
    """
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": uid}
    metadata = {**job["metadata"], "ownerReferences": [owner]}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB: job["metadata"]["labels"][JOB]},
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


# --------------------------------------------------------------------------- explanations; all pure


def refusal_words(status: int, body: Any, label: str) -> str:
    """Explain why the API server refused a request, and what to do."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    match = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)"', text)
    message = json.loads(f'"{match[1]}"') if match else " ".join(text.split())[:300]
    if status == 401:
        return (
            f"{label}: your login has expired or is not valid: "
            "log in again, and try kubectl get pods"
        )
    return f"{label}: {message}" + (f"\n  {ROLE}" if status == 403 else "")


def _handshake_status(reason: str) -> int:
    match = re.search(r"Handshake status (\d+)", str(reason))
    return int(match[1]) if match else 0


CREATING = "ContainerCreating"
"""The container's volumes, network and image are being prepared.

Only events reveal which of them is slow or keeps failing.
"""
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
"""Explanations why a pod waits or has ended, by Kubernetes' reason."""
HOPELESS = ("ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
"""Reasons that do not resolve by themselves."""


def _true(thing: JsonObject, *kinds: str) -> list[JsonObject]:
    """Return the conditions of these kinds that are true."""
    conditions = thing.get("status", {}).get("conditions", [])
    return [
        condition
        for condition in conditions
        if condition["type"] in kinds and condition["status"] == "True"
    ]


def waiting_reason(pod: JsonObject) -> tuple[str, str]:
    """Return Kubernetes' reason and message why a pod does not run, or ("", "") if it runs."""
    status = pod.get("status", {})
    for container in [
        *status.get("initContainerStatuses", []),
        *status.get("containerStatuses", []),
    ]:
        if waiting_state := container.get("state", {}).get("waiting"):
            return waiting_state.get("reason", ""), waiting_state.get("message", "")
    if status.get("phase") == "Running":
        return "", ""
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", ""), condition.get("message", "")
    return status.get("phase", "Pending"), status.get("message", "")


def waiting_words(
    pods: Sequence[JsonObject],
    pod_count: int,
    events: Iterable[JsonObject],
    suspended: bool,
    creating: Sequence[JsonObject] = (),
) -> str:
    """Explain why a pool's pods do not all run, grouped by reason; "" if they do.

    Args:
        events: events of their job.
        creating: events of the first pod that is `CREATING`.
    """
    groups: dict[str, int] = {}
    for pod in pods:
        reason, message = waiting_reason(pod)
        message = _creating_words(creating) if reason == CREATING else message
        if reason:
            explanation = (
                "; ".join(filter(None, (WORDS.get(reason, ""), message))) or "nobody says why"
            )
            groups[f"{explanation} ({reason})"] = groups.get(f"{explanation} ({reason})", 0) + 1
    if (missing := pod_count - len(pods)) > 0:
        warnings = [event.get("message", "") for event in events if event.get("type") == "Warning"]
        suspension = "the job is suspended: a queue such as Kueue starts it" if suspended else ""
        groups[suspension or (warnings[-1] if warnings else "they are not made yet")] = missing
    return "; ".join(
        f"{count(number, 'pod')}: {explanation}" for explanation, number in groups.items()
    )


def _creating_words(events: Sequence[JsonObject]) -> str:
    """Return the slow step or latest failure while a container is created, or "" if unknown."""
    progress = [
        event
        for event in events
        if event.get("reason", "").startswith("Failed") or event.get("reason") == "Pulling"
    ]
    return str(progress[-1].get("message", "")) if progress else ""


def fate_words(name: str, pod: JsonObject, job: JsonObject, events: Sequence[JsonObject]) -> str:
    """Explain why a pod is gone, or return "" if it is not.

    Args:
        pod: the pod, or {} if it no longer exists.
        job: its job, or {} if it no longer exists or if the pod was not created for a pool.
        events: events of the pod.
    """
    status = pod.get("status", {})
    records = [*_true(pod, "DisruptionTarget"), *([status] if status.get("reason") else [])]
    for container in status.get("containerStatuses", []):
        if ended := container.get("state", {}).get("terminated"):
            records.append(
                {"reason": ended.get("reason"), "message": f"exit status {ended.get('exitCode')}"}
            )
    if (
        status.get("phase") == "Running"
        and not pod["metadata"].get("deletionTimestamp")
        and not records
    ):
        return ""
    records += [*_true(job, "Failed", "FailureTarget"), *events]
    reasons = [(record.get("reason") or "", record.get("message") or "") for record in records]
    if known_reason := next((entry for entry in reasons if entry[0] in WORDS), None):
        return f"{WORDS[known_reason[0]]} ({': '.join(filter(None, known_reason))})"
    if reasons and status.get("phase") in ("Failed", "Succeeded"):
        return f"pod {name} has ended ({', '.join(filter(None, reasons[0]))})"
    return f"pod {name} was deleted from outside this notebook"


def explain_hopeless(pods: Iterable[JsonObject], events: Iterable[JsonObject] = ()) -> str:
    """Explain why pods can never run, or return "" if they may.

    Args:
        events: events of their job.
    """
    states = [waiting_reason(pod) for pod in pods]
    explanations = [
        f"{WORDS[reason]}: {message} ({reason})" for reason, message in states if reason in HOPELESS
    ]
    barred = [
        event["message"] for event in events if "violates PodSecurity" in event.get("message", "")
    ][-1:]
    explanations += [
        f"{violation}\n  docs/how-to/kubernetes.md has a --pod-template for such namespaces"
        for violation in barred
    ]
    return "; ".join(dict.fromkeys(explanations))
