"""Pools of pods on the imitation of a cluster: what a job has, why it waits, how it ends, and what is left. `tests/contracts/test_provider.py` holds the rest."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote_plus

import pytest
import yaml

from skymagic.errors import HostError, ProvisionError, RequestError
from skymagic.magics.arguments.cell_magics import parse_pool
from skymagic.providers import kubernetes_api
from skymagic.providers.kubernetes import Kubernetes, PodNode
from skymagic.providers.kubernetes_api import KubernetesCluster
from skymagic.ssh.host import ChannelConnection
from tests.lab.kube import Kube, kube
from tests.lab.notebook import ROOT, Notebook, Shown, at_work, opened, seen
from tests.lab.raising import raises
from tests.providers.test_kubernetes import RESTRICTED

pytestmark = pytest.mark.needs("namespaces", "root")
POOL = f"%sky_pool lab --provider kubernetes --nodes 2 --python {sys.executable}"
ONE = POOL.replace("--nodes 2", "--nodes 1")
NOTHING: dict[str, dict[str, str]] = {"requests": {}, "limits": {}}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Kube]:
    with kube(tmp_path / "kube") as made:
        yield made


@pytest.fixture
def notebook(cluster: Kube, tmp_path: Path) -> Iterator[Notebook]:
    with opened(tmp_path, env={**cluster.env, "LAB_TOKEN": "a secret"}) as made:
        yield made


@pytest.fixture
def api(cluster: Kube, monkeypatch: pytest.MonkeyPatch) -> KubernetesCluster:
    monkeypatch.setenv("KUBECONFIG", cluster.env["KUBECONFIG"])
    return KubernetesCluster()


def waiting(cluster: Kube, notebook: Notebook, why: str) -> Shown:
    """A start that waits, and says why."""
    return notebook.watch(notebook.start(POOL), lambda cell: why in cell.text)


def started(api: KubernetesCluster, cluster: Kube) -> ChannelConnection:
    """A job of one pod, and a connection to it."""
    api.create(kubernetes_api.job_manifest("lab-1a2b3c4d", 1, 600, NOTHING, "python:3.12", {}))
    name = cluster.pod(0).name
    return PodNode(
        name, "lab-1a2b3c4d", api.context, api.namespace, "skymagic", holder=True
    ).connection()


def ended(api: KubernetesCluster, cluster: Kube, connection: ChannelConnection) -> None:
    connection.close()
    api.delete("lab-1a2b3c4d")
    cluster.wait(lambda: not cluster.left())


def test_pods_survive_lost_connections_and_notebooks(
    cluster: Kube, notebook: Notebook, tmp_path: Path
) -> None:
    # a queue lets the job through
    """On an imitation of the API server: a queue, lost connections, an expired login, a killed kernel, and an attach."""
    cluster.suspends = True
    running = notebook.start(f"{POOL} --secret LAB_TOKEN --max-lifetime 1h")
    notebook.watch(running, lambda cell: "a queue such as Kueue starts it" in cell.text)
    cluster.release()
    assert notebook.finish(running).error is None
    cluster.suspends = False

    # nothing secret is in its objects, nor on the command lines of exec
    here = "import os, shutil, socket\n(socket.gethostname(), os.environ['LAB_TOKEN'], shutil.disk_usage('/dev/shm').total > 1 << 29)"
    (name,) = cluster.jobs()
    assert seen(notebook, here) == [(f"{name}-{index}", "a secret", True) for index in (0, 1)]
    assert cluster.job()["spec"]["activeDeadlineSeconds"] == 3660
    notebook.run(
        f"from skymagic.pool import keys\nfound = [one.secret for one in keys.read({name!r}).accesses]"
    )
    secrets = ["a secret", cluster.token, *notebook.value("found")]
    assert len(set(secrets)) == 4
    assert [one for one in secrets if any(one in unquote_plus(each) for each in cluster.sent)] == []
    assert sum("/exec?" in each for each in cluster.sent) > 2, "audit logs have the command lines"
    assert cluster.left()[1] == f"service {name}"
    assert re.search(
        r"kubernetes · 2 nodes × 1 rank .* (59m|1h)",
        notebook.run("%sky_status").rich[-1]["text/html"],
    )

    # a cell goes on when exec is cut
    gate = "/dev/shm/gate"
    running = notebook.start(f"%%sky_broadcast --only all -o seen\nimport os, time\nprint('at work', flush=True)\n"
                             f"while not os.path.exists({gate!r}): time.sleep(0.05)\nme = 7\nme")  # fmt: skip
    notebook.watch(running, lambda cell: cell.text.count("at work") == 2)
    cluster.cut()
    for index in (0, 1):
        space = cluster.pod(index).space
        assert space is not None
        subprocess.run([*space.enter, "touch", gate], check=True)
    assert notebook.finish(running).error is None
    assert notebook.value("seen") == [7, 7]

    # another notebook has a pool of the same name, which is another one; it finds and ends also this notebook's
    (tmp_path / "other").mkdir()
    with opened(tmp_path / "other", env=cluster.env) as other:
        other.run(ONE)
        assert len(cluster.jobs()) == 2
        other.run("%sky_down")
        assert (seen(notebook, "7"), cluster.jobs()) == ([7, 7], [name])

        # connections that are there stay when the login expires; who ends the pool needs a login, and its job is named meanwhile
        token = cluster.token
        cluster.expire()
        assert seen(notebook, "7") == [7, 7]
        assert "login" in notebook.fail("%sky_down", "not-released").text
        cluster.token = token
        job_id = cluster.job()["metadata"]["labels"]["skymagic/job"]
        listed = other.run("%sky_status --provider kubernetes").text
        assert re.search(rf"{job_id}\): Kubernetes job {job_id} in namespace lab", listed)
        assert (
            f"pool 'lab' ({job_id}) is down"
            in other.run("%sky_down lab --provider kubernetes").text
        )
    cluster.wait(lambda: not cluster.left())


def test_waiting_start_gives_reason_and_can_be_stopped(
    cluster: Kube, notebook: Notebook, tmp_path: Path
) -> None:
    cluster.held = True
    words = "2 pods: no node has room for it; 0/1 nodes are available: 1 Insufficient cpu. (Unschedulable)"
    running = waiting(cluster, notebook, f" waits: {words}")
    notebook.interrupt()
    assert "is deleted]" in notebook.finish(running).text
    cluster.wait(lambda: not cluster.left())

    # a kernel that is killed leaves a job that can be ended
    (tmp_path / "other").mkdir()
    with opened(tmp_path / "other", env=cluster.env) as other:
        waiting(cluster, other, " waits: ")
        os.kill(other.pid, signal.SIGKILL)
    assert "2 pods active, 0 ready" in notebook.run("%sky_status --provider kubernetes").text
    notebook.run("%sky_down lab --provider kubernetes")
    cluster.wait(lambda: not cluster.left())

    cluster.held, cluster.quota = False, 1
    running = waiting(cluster, notebook, "1 pod: Error creating: pods is forbidden: exceeded quota")
    notebook.interrupt()
    notebook.finish(running)
    cluster.wait(lambda: not cluster.left())


def test_failed_start_is_explained_and_leaves_nothing(cluster: Kube, notebook: Notebook) -> None:
    not_pulled = 'cannot start: its image cannot be pulled: Back-off pulling image "nothing:1": not found (ImagePullBackOff)'
    for options, told in {
        **dict.fromkeys(("--image nothing:1", "--container nothing:1"), not_pulled),
        "--context nowhere": "--context: the kubeconfig has no context 'nowhere'; available: lab",
        "--pods app=train": "--pods app=train: 0 running pods with these labels in namespace lab",
    }.items():
        assert told in notebook.fail(f"{POOL} {options}").text
        cluster.wait(lambda: not cluster.left())


def test_eviction_interrupts_and_oom_is_named(cluster: Kube, notebook: Notebook) -> None:
    notebook.run(POOL)
    with TemporaryDirectory(dir="/var/tmp") as shared:  # pods have a /tmp of their own
        notebook.run(
            f"%%sky_broadcast\nimport skymagic as sky\nkept = 7\n"
            f"sky.on_interruption(lambda notice: open(f'{shared}/{{sky.instance_info().rank}} {{notice.mine}}', 'x').close())"
        )
        running = at_work(notebook)
        cluster.evict(cluster.pod(1).name)
        failure = notebook.finish(running).failure.text
        cluster.wait(lambda: len(cluster.pods()) == 1)
        assert sorted(path.name for path in Path(shared).iterdir()) == ["0 False", "1 True"]
    assert re.search(r"\(EvictionBy|\(Evicted", failure), failure
    notebook.run("%%sky_broadcast -t 0 -o left\nkept")
    assert notebook.value("left") == [7]
    running = at_work(notebook, 1, "-t 0")
    cluster.run_out_of_memory(cluster.pod(0).name)
    failure = notebook.finish(running).failure.text
    assert "(OOMKilled: exit status 137)" in failure
    notebook.run("%sky_down")


def test_existing_pods_are_used_and_kept(cluster: Kube, notebook: Notebook) -> None:
    for number in (0, 1):
        cluster.add_pod({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"train-{number}", "namespace": "lab", "labels": {"app": "train"}},
            "spec": {"containers": [{"name": "main", "image": "torch:2", "command": ["/bin/sleep", "600"]}]},
        })  # fmt: skip
    before = cluster.left()
    notebook.run(f"%sky_pool lab --provider kubernetes --pods app=train --python {sys.executable}")
    assert seen(notebook, "import socket; socket.gethostname()") == ["train-0", "train-1"]
    notebook.run("%sky_down")
    assert cluster.left() == before
    cluster.close()


def test_try_kubernetes_script_completes(cluster: Kube) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks/try_kubernetes.py"),
        "--silence",
        "1",
        "--python",
        sys.executable,
    ]
    done = subprocess.run(
        command, env={**os.environ, **cluster.env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.wait(lambda: not cluster.left())


# ------------------------------------------------------------------------------------ the API, without a notebook


def test_missing_permissions_are_named_before_creation(
    cluster: Kube, api: KubernetesCluster
) -> None:
    for _, resource, sub, verbs in kubernetes_api.RIGHTS:
        for verb in verbs:
            what = "/".join(filter(None, (resource, sub)))
            cluster.denied = {(what, verb)}
            assert api.mistakes(attaching=False) == [
                f"you may not {verb} {what} in namespace lab",
                kubernetes_api.ROLE,
            ]
    cluster.denied = set()
    assert api.mistakes(attaching=False) == []


def test_a_refusal_on_the_way_is_the_servers_own(cluster: Kube, api: KubernetesCluster) -> None:
    cluster.deny("jobs", "create")
    with raises(ProvisionError, "kubernetes-refused", r'"jobs" in API group "batch".*"lab"'):
        api.create(kubernetes_api.job_manifest("lab-1a2b3c4d", 1, 600, NOTHING, "python", {}))
    cluster.expire()
    with raises(ProvisionError, "kubernetes-refused", r"expired"):
        api.jobs()


def test_an_old_server_is_refused(cluster: Kube, api: KubernetesCluster) -> None:
    cluster.version = ("1", "29+")
    (mistake,) = api.mistakes(attaching=False)
    assert re.search(r"\(context lab\) .*v1\.29\+\.1: .*\b1\.30\b", mistake)


def test_unreachable_api_server_is_explained(
    cluster: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(cluster.env["KUBECONFIG"])
    config = yaml.safe_load(path.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    with raises(ProvisionError, "kubernetes-unreached"):
        KubernetesCluster().jobs()
    del config["clusters"][0]["cluster"]["certificate-authority-data"]
    config["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
    path.write_text(yaml.safe_dump(config))
    with raises(RequestError, "cluster-unverified", r"certificate"):
        KubernetesCluster()
    for server in ("http://192.0.2.7:8080", "http://api.example:8080", "http://[2001:db8::7]:8080"):
        config["clusters"][0]["cluster"] = {"server": server}
        path.write_text(yaml.safe_dump(config))
        with pytest.raises(RequestError, match="without TLS"):
            KubernetesCluster()
    for server in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):  # kubectl proxy
        config["clusters"][0]["cluster"] = {"server": server}
        path.write_text(yaml.safe_dump(config))
        assert KubernetesCluster().context == config["current-context"]


def test_exec_into_a_missing_pod_is_explained(api: KubernetesCluster) -> None:
    """The official client itself crashes on such a reply."""
    with pytest.raises(HostError, match='pods "nosuch" not found'):
        api.exec("nosuch", "skymagic", ["true"])


def test_nothing_is_left_wherever_a_start_ends(cluster: Kube, api: KubernetesCluster) -> None:
    """Each reply of the API server is lost in turn until a start succeeds, which is then interrupted."""

    def interrupt(line: str) -> None:
        if line.startswith("Kubernetes runs"):
            raise KeyboardInterrupt

    cluster.grace = 2.0  # a process that has not begun yet hears nothing
    request = parse_pool(f"--provider kubernetes --python {sys.executable}")
    ends: list[type[BaseException]] = []
    while KeyboardInterrupt not in ends:
        survey = Kubernetes().plan(request, print)
        cluster.lost_answer = len(cluster.requests) + len(ends) + 1
        with pytest.raises((ProvisionError, KeyboardInterrupt)) as raised:
            Kubernetes().acquire(survey, f"lab-{len(ends):08x}", interrupt)
        ends.append(raised.type)
        cluster.lost_answer = -1
        survey.close()
        survey.close()
        cluster.wait(lambda: not cluster.left())
    assert ends[0] is ProvisionError, "the answer to the creation"


def test_pods_end_signal_reaches_agents(cluster: Kube, api: KubernetesCluster) -> None:
    """Not the ranks, nor processes started by exec, which carry the ranks' last output."""
    connection = started(api, cluster)
    rank = "trap 'touch /tmp/killed' TERM; while :; do sleep 0.05; done"
    agent = f"sh -c {shlex.quote(rank)} & trap 'touch /tmp/heard; sleep 1; exit' TERM; touch /tmp/up; while :; do sleep 0.05; done"
    begun = f"until [ -p $SKYMAGIC_HOLDER/start ]; do sleep 0.05; done; cd $SKYMAGIC_HOLDER; echo {shlex.quote(f'sh -c {shlex.quote(agent)}; true')} > daemon; echo daemon > start"
    assert connection.run(f"{begun}; while [ ! -e /tmp/up ]; do sleep 0.05; done").status == 0
    relay = connection.open("while [ ! -e /tmp/heard ]; do sleep 0.05; done; sleep 0.3; ls /tmp")
    cluster.evict(cluster.pod(0).name)
    told = b"".join(iter(relay.read, b"")).split()
    assert (b"heard" in told, b"killed" in told) == (True, False)
    cluster.wait(lambda: not cluster.pods())
    relay.close()
    ended(api, cluster, connection)


def test_a_user_without_a_name_or_home_has_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kube(tmp_path / "kube", user=54321) as cluster:
        monkeypatch.setenv("KUBECONFIG", cluster.env["KUBECONFIG"])
        api = KubernetesCluster()
        connection = started(api, cluster)
        done = connection.run(
            'echo "$HOME $USER $LOGNAME $(id -u)"; [ -w "$HOME" ]; until test -p "$SKYMAGIC_HOLDER/start"; do sleep 0.05; done'
        )
        assert (done.out, done.status) == ("/tmp/skymagic-home-54321 54321 54321 54321\n", 0)
        ended(api, cluster, connection)


def test_a_pool_in_a_namespace_that_is_restricted(
    cluster: Kube, notebook: Notebook, tmp_path: Path
) -> None:
    """Pods are admitted only with the documented template, and run as a user without home, name or rights."""
    cluster.restricted = True
    told = notebook.fail(ONE).text
    assert 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false' in told
    cluster.wait(lambda: not cluster.left())
    (tmp_path / "pod.yaml").write_text(RESTRICTED[0].replace("runAsUser: 1000, ", ""))
    told = notebook.fail(f"{ONE} --pod-template {tmp_path}/pod.yaml").text
    assert "container has runAsNonRoot and image will run as root" in told
    (tmp_path / "pod.yaml").write_text(RESTRICTED[0])
    notebook.run(f"{ONE} --pod-template {tmp_path}/pod.yaml")
    here = "(os.getuid(), str(pathlib.Path.home()), os.access('/dev/shm', os.W_OK), os.access('/etc', os.W_OK))"
    assert seen(notebook, f"import os, pathlib\n{here}") == [
        (1000, "/tmp/skymagic-home-1000", True, False)
    ]
    notebook.run("%sky_down")
    cluster.wait(lambda: not cluster.left())


def test_server_refusal_is_shown_and_leaves_nothing(
    cluster: Kube, api: KubernetesCluster, tmp_path: Path
) -> None:
    (tmp_path / "pod.yaml").write_text("spec: {nodeSelectr: {gpu: a100}}")
    for options, told in {
        f"--pod-template {tmp_path}/pod.yaml": r'unknown field "spec.template.spec.nodeSelectr"',
        "--namespace labb": r'namespaces "labb" not found',
    }.items():
        survey = Kubernetes().plan(
            parse_pool(f"--provider kubernetes {options} --python {sys.executable}"), print
        )
        with pytest.raises(ProvisionError, match=told):
            Kubernetes().acquire(survey, "lab-1a2b3c4d", print)
        survey.close()
    assert cluster.left() == []


def test_pings_keep_an_idle_connection(
    cluster: Kube, api: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.silent_limit = 1.0
    monkeypatch.setattr(kubernetes_api, "PING_SECONDS", 0.2)
    connection = started(api, cluster)
    done = connection.run("sleep 2.5; echo still here")
    assert (done.status, done.out) == (0, "still here\n")
    monkeypatch.setattr(kubernetes_api, "PING_SECONDS", 20.0)
    assert connection.run("sleep 2.5; echo still here").status == -1, "it was cut"
    ended(api, cluster, connection)


def test_a_holder_without_a_daemon_is_ended_by_its_deadline(
    cluster: Kube, api: KubernetesCluster
) -> None:
    """As when a notebook is killed right after it created its job."""
    api.create(kubernetes_api.job_manifest("lab-1a2b3c4d", 2, 1, NOTHING, "python", {}))
    cluster.wait(lambda: not cluster.pods())
    assert "--max-lifetime" in kubernetes_api.fate_words("p", {}, api.job("lab-1a2b3c4d"), [])
    api.delete("lab-1a2b3c4d")


def test_in_a_pod_the_service_account_is_used(cluster: Kube) -> None:
    """In a mount namespace with the account's files where Kubernetes puts them."""
    config = yaml.safe_load(Path(cluster.env["KUBECONFIG"]).read_text())
    host, _, port = (
        config["clusters"][0]["cluster"]["server"].removeprefix("https://").partition(":")
    )
    account = "/run/secrets/kubernetes.io/serviceaccount"
    script = f"""mount -t tmpfs run /run && mkdir -p {account} && cd {account} || exit
printf %s "$TOKEN" > token; printf %s lab > namespace; printf %s "$CA" | base64 -d > ca.crt
exec {sys.executable} -c 'from skymagic.providers.kubernetes_api import KubernetesCluster as K; one = K(); print(one.label, one.namespace, one.jobs())'"""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, cwd=ROOT,
        env={
            "PATH": "/usr/bin:/bin", "HOME": "/nowhere", "PYTHONPATH": str(ROOT), "TOKEN": cluster.token,
            "CA": config["clusters"][0]["cluster"]["certificate-authority-data"],
            "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port,
        },
    )  # fmt: skip
    assert done.stdout.startswith("Kubernetes (this pod's "), done.stderr
    assert done.stdout.endswith(" lab []\n"), "its namespace, and no job"
