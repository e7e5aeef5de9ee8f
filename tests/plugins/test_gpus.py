"""Ranks on stand-in GPUs: the device of each, the backend that rank 0 chooses, pools beside each other, and preloads that leave CUDA alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from skymagic.errors import RequestError
from skymagic.kernels.agent import forkserver
from skymagic.magics.arguments.cell_magics import parse_pool
from skymagic.plan.requests import PluginSpec, plugin_specs
from skymagic.plugins import load
from skymagic.plugins._torch import backends
from skymagic.plugins._torch.backends import RankHardware
from skymagic.plugins._torch.launched import lightning_arguments
from skymagic.providers import local
from skymagic.runtime.info import InstanceInfo
from tests.lab.golden import Golden
from tests.lab.gpus import DUPLICATE, FAILED, Gpu, Gpus, uuid_of
from tests.lab.hosts import loopback
from tests.lab.notebook import ROOT, Notebook, opened
from tests.lab.shells import pip_settings

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)

WHO = """%%sky_broadcast -o who
import os, torch, torch.distributed as dist
sums = torch.ones(1)
dist.all_reduce(sums)
dist.barrier()
device = torch.cuda.current_device() if torch.cuda.is_available() else None
[dist.get_backend(), device, os.environ["LOCAL_RANK"] + "/" + os.environ["LOCAL_WORLD_SIZE"], sums.item()]"""


# --------------------------------------------------------------------------------------------------- decisions


def on(*gpus: str, machine: str = "a", cuda: str = "12.8") -> list[RankHardware]:
    return [RankHardware(machine, gpu, "H200" if gpu else "", cuda) for gpu in gpus]


@pytest.mark.parametrize(
    ("asked", "posted", "backend"),
    [
        (None, on("GPU-0", "GPU-1"), "cpu:gloo,cuda:nccl"),
        (None, on("GPU-0"), "cpu:gloo,cuda:nccl"),
        (None, on("GPU-0", "GPU-0"), "cpu:gloo,cuda:gloo"),
        (None, on("GPU-0") + on("GPU-0", machine="b"), "cpu:gloo,cuda:nccl"),
        (None, on("MIG-0", "MIG-1"), "cpu:gloo,cuda:gloo"),
        (None, on("", ""), "gloo"),
        ("gloo", on("GPU-0", "GPU-1"), "gloo"),
        ("nccl", on("GPU-0", "GPU-1"), "nccl"),
        ("cpu:gloo,cuda:gloo", on("GPU-0", "GPU-0"), "cpu:gloo,cuda:gloo"),
        (
            "nccl",
            on("GPU-0", "GPU-1", "GPU-0"),
            "ranks 0, 2 share one GPU (H200 GPU-0), and NCCL refuses that",
        ),
        ("cpu:gloo,cuda:nccl", on("GPU-0", "GPU-0"), "ranks 0, 1 share one GPU"),
        (
            None,
            on("GPU-0", "", "GPU-1", ""),
            "ranks 0, 2 have a GPU and ranks 1, 3 have none: a process group cannot combine them",
        ),
        (
            None,
            on("GPU-0") + on("", cuda=""),
            "rank 0 has a GPU and rank 1 has none (its torch is built without CUDA)",
        ),
    ],
    ids=str,
)
def test_rank_0_decides_on_the_backend(
    asked: str | None, posted: list[RankHardware], backend: str
) -> None:
    if " " not in backend:
        assert backends.choose(asked, posted) == backend
        return
    with pytest.raises(ValueError, match=re.escape(backend)):
        backends.choose(asked, posted)


@pytest.mark.parametrize(
    ("backend", "device"),
    [("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo,cuda:gloo", "cpu"), ("cuda:nccl", "cuda"), ("nccl", "cuda"), ("gloo", "cpu"),
     ("cuda:nccl,cpu:gloo", "cpu"), ("cpu:ucc,cuda:nccl", "cuda"), ("xpu:xccl", "xpu"), ("cpu:other", "cpu")],
)  # fmt: skip
def test_proof_always_has_a_device(backend: str, device: str) -> None:
    assert backends.device_for_control_messages(backends.backend_by_device(backend)) == device


def test_composite_backends_in_a_line(golden: Golden) -> None:
    (torch, jax) = plugin_specs("torch:backend=cpu:gloo,cuda:nccl,timeout=30m,jax")
    assert (torch.options, jax.name) == ({"backend": "cpu:gloo,cuda:nccl", "timeout": "30m"}, "jax")
    assert load(torch).options == torch.options
    assert plugin_specs("torch:backend=gloo,jax:version=0.10") == (
        PluginSpec("torch", {"backend": "gloo"}), PluginSpec("jax", {"version": "0.10"}),
    )  # fmt: skip
    with golden.raises(RequestError):
        load(PluginSpec("torch", {"timeout": "soon"}))


def test_lightning_has_the_ranks_device() -> None:
    info = InstanceInfo(rank=1, local_rank=1, world_size=2, local_world_size=2, accelerators=8)
    assert lightning_arguments("auto", 1, "auto", info, True, 4)[0] == [0, 4]
    equal = InstanceInfo(world_size=2, local_world_size=2, accelerators=2)
    assert lightning_arguments("auto", 1, "auto", equal, True, 0)[0] == 2


# -------------------------------------------------------------------------------------------------- membership

MEMBER = """
import sys, torch, torch.distributed as dist
from skymagic.plugins._torch import membership
rank, secret, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.cuda.set_device(rank)
for number, backend in enumerate(sys.argv[4:]):
    dist.init_process_group(
        backend if backend != "None" else None, init_method=f"file://{path}-{number}", rank=rank, world_size=2
    )
    try:
        membership.verify(secret, rank)
        print("trusted", flush=True)
    except RuntimeError as problem:
        print("refused", problem, flush=True)
    dist.destroy_process_group()
"""


def test_a_stranger_is_seen_whatever_the_backend_is_called(tmp_path: Path) -> None:
    """get_backend() answers "cpu:gloo,cuda:nccl" or "undefined", and the proof must not be skipped for a name."""
    env = {**os.environ, **Gpus(tmp_path / "gpus", [Gpu()] * 2).environment()}
    backends = ["cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl", "None"]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), secret, str(tmp_path / "group"), *backends],
            stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT,
        )
        for rank, secret in enumerate(("s", "guessed"))
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0].splitlines() for process in started]
    refused = "refused the process group has an unknown process in place of rank 1"
    assert [line.startswith(refused) for line in said[0]] == [True] * 3, said


# --------------------------------------------------------------------------------------------------- this machine


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """A machine with two GPUs, as this process sees it."""
    about = Gpus(tmp_path / "gpus", [Gpu(), Gpu()])
    for name, value in about.environment().items():
        if name != "PYTHONPATH":
            monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(about.folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return about


def test_the_inventory_of_this_machine(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    request = parse_pool("--plugin torch")
    assert [one.uuid for one in local.inventory(request).gpus] == [uuid_of(0), uuid_of(1)]
    assert local.inventory(parse_pool("--plugin joblib")).gpus == (), "nobody asks the driver"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [one.uuid for one in local.inventory(request).gpus] == [uuid_of(1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local.inventory(request).gpus == (), "empty means none"
    said = parse_pool("--plugin torch --env CUDA_VISIBLE_DEVICES=0")
    assert [one.uuid for one in local.inventory(said).gpus] == [uuid_of(0)]


def test_a_driver_that_does_not_answer(
    golden: Golden, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.refuses = FAILED
    gpus.write()
    assert (
        f"NVIDIA's driver does not answer ({FAILED})"
        in local.inventory(parse_pool("--plugin torch")).unusable
    )
    gpus.refuses, gpus.hangs = "", True
    gpus.write()
    monkeypatch.setattr(local, "DRIVER_TIMEOUT", 0.5)
    golden(local.inventory(parse_pool("--gpu all")).unusable)


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_builds_for_cpus_are_refused_in_words(gpus: Gpus) -> None:
    assert local.inventory(parse_pool("--gpu all --plugin torch,jax")).unusable == ""
    for path in gpus.folder.glob("*.dist-info"):
        path.rename(path.with_suffix(".away"))
    said = local.inventory(parse_pool("--gpu all --plugin torch,jax")).unusable
    for_cpus = "is built without CUDA (install one with: pip install torch --index-url" in said
    assert for_cpus == version("torch").endswith("+cpu")
    assert re.search(r"\bjax [\d.]+ .*pip install 'jax\[cuda12\]'", said)


# ------------------------------------------------------------------------------------------------------- preloads

IMPORTS = """
import importlib, sys, traceback
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    "line", ["torch,huggingface,accelerate,joblib,sklearn,jax,keras", "torch,keras:backend=torch"]
)
def test_no_preload_touches_cuda(line: str, tmp_path: Path) -> None:
    """A process that has asked the driver for its devices forks ranks that cannot use them."""
    about = Gpus(tmp_path / "gpus", [Gpu()])
    modules = [
        module
        for spec in plugin_specs(line)
        for module in load(spec).preload
        if find_spec(module.partition(".")[0])
    ]
    backend = "torch" if "=torch" in line else "jax"
    env = {**os.environ, **about.environment(), "KERAS_BACKEND": backend}
    subprocess.run([sys.executable, "-c", IMPORTS, *modules], env=env, check=True, timeout=250)
    assert about.calls("driver") == []


def test_the_forkserver_lets_torch_ask_nvml(tmp_path: Path) -> None:
    """A preload of somebody else's may look for GPUs."""
    about = Gpus(tmp_path / "gpus", [Gpu()])
    (tmp_path / "curious.py").write_text("import torch\nassert torch.cuda.is_available()\n")
    code = (
        "import os, torch\nfrom skymagic.kernels.agent import forkserver\n"
        f"forkserver.preload(['curious'], {str(tmp_path)!r})\n"
        f"assert {forkserver.NVML_CHECK!r} not in os.environ\n"
        "pid = os.fork()\nif not pid:\n    torch.cuda.set_device(0); os._exit(0)\nassert os.waitpid(pid, 0)[1] == 0"
    )
    env = {**os.environ, **about.environment()}
    env["PYTHONPATH"] += f"{os.pathsep}{tmp_path}{os.pathsep}{ROOT}"
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=250)
    assert [call["uuid"] for call in about.calls("set_device")] == [uuid_of(0)]


# -------------------------------------------------------------------------------------------------- pools, here


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gpus, Notebook]]:
    """A notebook on a machine with four GPUs."""
    folder = tmp_path_factory.mktemp("four")
    about = Gpus(folder / "gpus", [Gpu()] * 4)
    with opened(folder, env=about.environment()) as notebook:
        yield about, notebook


def devices(about: Gpus) -> list[tuple[int, str]]:
    """(rank, UUID) of each rank's GPU, in order."""
    return sorted((int(call["rank"]), call["uuid"]) for call in about.calls("set_device"))


def test_the_first_line_of_the_readme(golden: Golden, four: tuple[Gpus, Notebook]) -> None:
    about, notebook = four
    said = notebook.run("%sky_pool --plugin torch").said
    golden.line(said, "(4 × H200)")
    assert notebook.value(f"{notebook.run(WHO) and 'who'}") == [
        ["cpu:gloo,cuda:nccl", rank, f"{rank}/4", 4.0] for rank in range(4)
    ]
    assert devices(about) == [(rank, uuid_of(rank)) for rank in range(4)]
    # a rank that replaces another, in groups that are formed again
    about.forget()
    notebook.fail(
        "%%sky_broadcast\nimport os, signal\nif dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    )
    notebook.run(WHO)
    assert notebook.value("[row[1] for row in who]") == [0, 1, 2, 3]
    assert devices(about) == [(1, uuid_of(1))], "the others keep theirs"
    assert "GPUs 0–3 taken" in (refused := notebook.fail("%sky_pool other --plugin torch").text)
    assert "'main'" in refused
    plan = notebook.run("%sky_pool cpu --plugin torch --gpu none --ranks 1 --dry-run").stdout
    assert "taken" not in plan, "ranks without GPUs are another matter"


def test_a_pool_that_gets_another_size(golden: Golden, four: tuple[Gpus, Notebook]) -> None:
    about, notebook = four
    notebook.run("%sky_pool --plugin torch")
    about.forget()
    said = notebook.run("%sky_pool --ranks 2").said
    assert "pool 'main' gets 2 ranks instead of 4" in said
    golden.line(said, "GPUs now")
    assert devices(about) == [(0, uuid_of(0)), (1, uuid_of(2))], "two GPUs each"
    notebook.run("%sky_down")


def test_ranks_that_share_gpus(golden: Golden, four: tuple[Gpus, Notebook]) -> None:
    about, notebook = four
    about.forget()
    said = notebook.run("%sky_pool few --plugin torch --gpu 1, --ranks 2").said
    golden.line(said, "(H200)", "gloo")
    notebook.run(WHO)
    assert notebook.value("who") == [
        ["cpu:gloo,cuda:gloo", 0, f"{rank}/2", 2.0] for rank in range(2)
    ]
    assert devices(about) == [(0, uuid_of(1)), (1, uuid_of(1))]
    # another pool takes others
    said = notebook.run("%sky_pool more --plugin torch --nodes 2 --procs-per-node 1").said
    golden.line(said, "GPU 1 ", "'few'")
    notebook.run(WHO.replace("-o who", "--pool more -o who"))
    assert notebook.value("who") == [["cpu:gloo,cuda:nccl", 0, "0/1", 2.0]] * 2
    assert devices(about)[-2:] != devices(about)[:2]
    notebook.run("%sky_down more\n%sky_down few")


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_jax_takes_the_same_numbers_and_leaves_memory_to_others(
    four: tuple[Gpus, Notebook],
) -> None:
    about, notebook = four
    about.forget()
    notebook.run("%sky_pool mesh --plugin jax --gpu 2,3")
    calls = sorted(about.calls("jax.distributed.initialize"), key=lambda call: call["rank"])
    assert [call["local_device_ids"] for call in calls] == [[0], [1]]
    assert {call["cuda_visible_devices"] for call in calls} == {f"{uuid_of(2)},{uuid_of(3)}"}
    assert [call["settings"] for call in calls] == [{"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}] * 2
    notebook.run("%sky_down mesh")


def test_nccl_on_a_shared_gpu_is_refused_in_words(four: tuple[Gpus, Notebook]) -> None:
    _, notebook = four
    said = notebook.fail("%sky_pool wrong --plugin torch:backend=nccl --gpu 0, --ranks 2").text
    assert re.search(r"\bNCCL\b", said)
    assert "ranks 0, 1 " in said
    assert DUPLICATE.partition(" ")[0] not in said, "it is not NCCL that says so"


# --------------------------------------------------------------------------------------------------- pools, hosts


@pytest.mark.needs("sshd")
def test_hosts_give_their_gpus(tmp_path: Path) -> None:
    """Two hosts of two GPUs each; their sessions' CUDA_VISIBLE_DEVICES leaves one of the second's out, which is refused with a table."""
    machines = [
        Gpus(
            tmp_path / f"gpus{host}", [Gpu(uuid=uuid_of(10 * host + number)) for number in range(2)]
        )
        for host in (1, 2)
    ]
    with loopback(tmp_path / "hosts", 2, env=pip_settings()) as hosts:
        for host, about in zip(hosts, machines, strict=True):
            host.env |= about.environment()
            host.stop()
            host.start()
        home = tmp_path / "client"
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh/config").write_text(Path(hosts.config).read_text())
        (tmp_path / "notebook").mkdir()
        with opened(tmp_path / "notebook", env={"HOME": str(home)}) as notebook:
            line = f"--provider ssh --hosts h[1-2] --plugin torch --python {sys.executable}"
            notebook.run(f"%sky_pool lab {line}")
            notebook.run(WHO)
            found = notebook.value("who")
            assert [row[1:] for row in found] == [
                [number, f"{number}/2", 4.0] for number in (0, 1, 0, 1)
            ]
            assert {row[0] for row in found} == {"cpu:gloo,cuda:nccl"}
            assert [uuid for about in machines for _, uuid in devices(about)] == [
                uuid_of(n) for n in (10, 11, 20, 21)
            ]
            assert "pool 'lab'" in notebook.fail(f"%sky_pool other {line}").text
            notebook.run("%sky_down lab")
            hosts[1].env["CUDA_VISIBLE_DEVICES"] = "1"
            hosts[1].stop()
            hosts[1].start()
            assert "h1  2 GPUs\n    h2  1 GPU\n" in notebook.fail(f"%sky_pool other {line}").text
