"""Pools in a real Ray cluster: asked for, waited for, used, and given back whatever happens. `tests/contracts/test_provider.py` holds the rest."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.providers import ray as provider
from skymagic.providers.channel_key import ChannelKey
from skymagic.wire.threads import start_all
from tests.lab.notebook import Notebook, at_work, opened, seen
from tests.lab.ray import SETTINGS, Cluster, lent, processes

pytestmark = pytest.mark.needs("ray")
DATA = """import ray
rows = ray.data.range(100, override_num_blocks=1).iter_rows()
sum(row["id"] for row in rows)"""
TRAIN = """%%sky_broadcast -t 0
import ray.train.torch
def train():
    import torch, torch.distributed as dist
    from pathlib import Path
    dist.all_reduce(total := torch.tensor(dist.get_rank() + 1))
    Path("{folder}", str(dist.get_rank())).write_text(str(total.item()))
storage = ray.train.RunConfig(storage_path="{folder}")
ray.train.torch.TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2), run_config=storage).fit()"""


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with lent() as made:
        yield made


@pytest.fixture(scope="module")
def kernel(ray: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("notebook")) as made:
        yield made


@pytest.fixture
def notebook(ray: Cluster, kernel: Notebook) -> Iterator[Notebook]:
    """A notebook without a pool; after the test no actor, group or process is left."""
    yield kernel
    kernel.run("%sky_down --all")
    assert ray.left() == []


def pool(ray: Cluster, options: str = "--nodes 2", name: str = "lab") -> str:
    return f"%sky_pool {name} --provider ray --address {ray.address} --python {sys.executable} {options}"


def test_no_cluster_at_the_address(notebook: Notebook) -> None:
    failure = notebook.fail("%sky_pool lab --provider ray --address 127.0.0.1:1", "ray-unreached")
    assert "127.0.0.1:1: Connection refused" in failure.text


def test_different_versions_are_refused_before_the_start(ray: Cluster, notebook: Notebook) -> None:
    own = ray("version", "2.9.0")
    try:
        failure = notebook.fail(pool(ray))
    finally:
        ray("version", own)
    assert f"Ray 2.9.0 and Python {sys.version.split()[0]}, " in failure.text
    assert f"Ray {own}" in failure.text
    assert "pip install ray==2.9.0" in failure.text


def test_impossible_placement_is_explained_and_stops(ray: Cluster, notebook: Notebook) -> None:
    waiting = notebook.start(pool(ray, "--nodes 3"))
    notebook.watch(waiting, lambda cell: "Ray has no place yet" in cell.text)
    assert re.search(r"3 × \(CPU 1\), .*\b2 .*\b3 nodes\b", waiting.text)
    assert "(Ray: PENDING" in waiting.text
    notebook.interrupt()
    notebook.finish(waiting)
    assert (ray("groups"), ray("actors")) == ([], [])


def test_ray_pool_is_left_and_ended_from_another_kernel(
    ray: Cluster, notebook: Notebook, tmp_path: Path
) -> None:
    """Ray itself runs one process of the pool on each node."""
    notebook.run(pool(ray))
    (group,) = ray("groups")
    assert sorted(ray("actors")) == [f"{group}-0", f"{group}-1"]
    notebook.run(f"%%sky_broadcast -t 1 -o sums\n{DATA}")
    assert notebook.value("sums") == [4950]
    notebook.run(TRAIN.format(folder=tmp_path))
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["3", "3"]
    notebook.restart()
    notebook.run("%load_ext skymagic")
    assert ray.address in notebook.run("%sky_status --provider ray").text
    notebook.run("%sky_down lab")
    assert ray.left() == []


def test_process_connected_to_ray_writes_a_debug_log(ray: Cluster, notebook: Notebook) -> None:
    notebook.restart()  # the process that earlier tests have started writes none
    notebook.run('%load_ext skymagic\n%config SkyMagic.log_level = "DEBUG"')
    notebook.run(pool(ray, "--nodes 1"))
    log = notebook.run('%sky_logs --debug --grep "ray_driver" -n 100').text
    lines = [line for line in log.splitlines() if line.startswith("[ray] ")]
    assert any("INFO providers.ray_driver: connected to Ray: address=" in line for line in lines)
    assert any("INFO providers.ray_driver: holders run: job=lab-" in line for line in lines)
    notebook.run('%config SkyMagic.log_level = ""')


def test_a_node_without_the_gpus_that_ray_has_promised(ray: Cluster, notebook: Notebook) -> None:
    failure = notebook.fail(pool(ray, "--nodes 1 --gpu A100:2"))
    assert "has no A100" in failure.text
    assert (ray("groups"), ray("actors")) == ([], [])


def test_kernel_killed_while_waiting_for_the_same_pool_name(
    ray: Cluster, notebook: Notebook, tmp_path: Path
) -> None:
    """Its end or death leaves nothing behind, and does not affect the first notebook's pool."""
    notebook.run(pool(ray, "--nodes 1"))
    with opened(tmp_path) as other:
        other.run(pool(ray, "--nodes 1"))
        assert len(ray("groups")) == 2
        other.run("%sky_down")
        assert seen(notebook, "7") == [7]
        assert len(ray("groups")) == 1
        notebook.run("%sky_down")
        waiting = other.start(pool(ray, "--nodes 3"))
        other.watch(waiting, lambda cell: "Ray has no place yet" in cell.text)
        os.kill(other.pid, signal.SIGKILL)
    assert ray.left() == []


def test_through_ray_client(ray: Cluster, notebook: Notebook) -> None:
    notebook.run(pool(ray, "--nodes 1").replace(ray.address, ray("client")))
    assert seen(notebook, "7") == [7]
    assert " ray://" in notebook.run("%sky_status --provider ray").text


def test_auto_is_the_cluster_of_the_environment(ray: Cluster, notebook: Notebook) -> None:
    notebook.run(f"import os; os.environ['RAY_ADDRESS'] = {ray.address!r}")
    for address in ("--address auto", ""):
        plan = notebook.run(f"%sky_pool lab --provider ray {address} --dry-run").text
        assert re.search(rf"\b1 node .* {re.escape(ray.address)}", plan)
    notebook.run("del os.environ['RAY_ADDRESS']")


def test_a_head_that_dies_under_a_pool(tmp_path: Path) -> None:
    made = Cluster(1)
    try:
        with opened(tmp_path, env=SETTINGS) as notebook:
            notebook.run(pool(made, "--nodes 1"))
            running = at_work(notebook, 1)
            made("behead")
            failure = notebook.finish(running).failure.text
            assert f"the head of the Ray cluster at {made.address} is gone" in failure
            assert "pool 'lab' is down" in notebook.run("%sky_down").text
            assert processes() == []
    finally:
        made.close()


def test_head_lost_while_its_client_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's end may be reported before the client process ends, and must be explained anyway."""
    (tmp_path / "driver.py").write_text(
        "import socket, sys\ncontrol = socket.socket(fileno=int(sys.argv[1]))\n"
        'control.send(b\'{"address": "%s"}\' % sys.argv[2].encode())\nsocket.recv_fds(control, 1 << 10, 1)\n'
    )
    monkeypatch.setattr(provider, "DRIVER", tmp_path / "driver.py")
    with socket.create_server(("127.0.0.1", 0)) as head:
        link = provider.RayLink(f"127.0.0.1:{head.getsockname()[1]}")

        def answer_once() -> None:
            with head.accept()[0] as there:
                there.sendall(provider.HELLO[-9:])
                head.close()
                there.recv(1 << 10)

        (answered,) = start_all([answer_once])
        with contextlib.closing(link):
            key = ChannelKey("lab-1a2b3c4d", provider.HERE.run)
            fate = provider.RayNode("node", "lab-1a2b3c4d", link, 0, "node", key).fate()
            assert re.search(rf"\bhead .*{re.escape(link.address)} .*\b60 s", fate)
        answered.result()


FATES = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("driver", sys.argv[1])
driver = importlib.util.module_from_spec(spec)
spec.loader.exec_module(driver)
from ray.exceptions import ActorUnavailableError, RayActorError

class Holder:
    def __init__(self, *answers):
        self.__ray_ready__, self.answers = self, list(answers)
    def remote(self):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

def get(answer, timeout):
    if isinstance(answer, Exception):
        raise answer
    return answer

unknown, dead = ActorUnavailableError("not yet known", None), RayActorError(error_msg="Once: The actor died.")
driver.ray.get, driver.POLL = get, 1.0
for answers in [(True,), (unknown, unknown, dead), (unknown, True), (unknown,)]:
    driver.holder_of = lambda job, index, held=Holder(*answers): held
    print(list(driver.fate(None, "lab", 0)))
"""


def test_why_a_node_is_gone_is_asked_until_ray_knows() -> None:
    """The window is under a second in Ray itself, so the test provides Ray's answers."""
    command = [sys.executable, "-P", "-c", FATES, str(provider.DRIVER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    alive, died = "[{'fate': ''}]", "[{'fate': 'Ray says: The actor died.'}]"
    assert done.stdout.splitlines() == [alive, died, alive, alive]
