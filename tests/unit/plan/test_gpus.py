"""GPUs of a machine: listed, asked for, and given to the ranks of a pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skymagic.bootstrap.builds import for_gpus
from skymagic.bootstrap.facts import HostFacts, parse
from skymagic.errors import RequestError
from skymagic.kernels.network import hcas, infiniband_ports
from skymagic.magics.arguments.cell_magics import parse_pool
from skymagic.plan import accelerators, gpus
from skymagic.plan.accelerators import canonical_device, matches, read_gpus
from skymagic.plan.planning import plan, plan_over
from skymagic.plan.plans import Inventory, Plan
from skymagic.pool.resources import devices_environment
from skymagic.runtime.info import InstanceInfo
from tests.lab.golden import Golden
from tests.lab.gpus import uuid_of

H200 = "NVIDIA H200"


def there(count: int, **options: Any) -> tuple[gpus.GpuDevice, ...]:
    return tuple(
        gpus.GpuDevice(uuid_of(number), H200, number, 150.8, **options) for number in range(count)
    )


def machine(
    devices: tuple[gpus.GpuDevice, ...] | int, name: str = "box", **options: Any
) -> Inventory:
    found = there(devices) if isinstance(devices, int) else devices
    return Inventory(name, 64, 512.0, found, "3.11", **options)


def ranks(made: Plan) -> list[str]:
    """GPUs of each rank: the numbers in nvidia-smi's list, as it finds them by its node's list and its own number."""
    found = []
    for rank in range(made.topology.world_size):
        shape = made.topology
        seen = devices_environment(made, rank).get("CUDA_VISIBLE_DEVICES")
        node = made.devices[shape.node_of(rank)] if made.devices else ()
        info = InstanceInfo(
            accelerators=len(node),
            local_rank=shape.local_rank(rank),
            local_world_size=shape.procs_per_node,
        )
        mine = [seen.split(",")[number] for number in info.gpus_of_rank()] if seen else []
        assert mine == [one.word for one in made.devices_of(rank)], "one number serves all"
        found.append("".join(str(one.index) for one in made.devices_of(rank)) or "-")
    return found


def refused(call: Any, *arguments: Any) -> str:
    with pytest.raises(RequestError) as mistakes:
        call(*arguments)
    return "; ".join(mistakes.value.mistakes)


# ------------------------------------------------------------------------------------------------- lines × GPUs

TABLE = {  # line → for 0, 1, 2, 4 and 8 GPUs: nodes × ranks, and the GPUs of each rank
    "--plugin torch": ("1×1 -", "1×1 0", "1×2 0 1", "1×4 0 1 2 3", "1×8 0 1 2 3 4 5 6 7"),
    "--plugin jax": ("1×1 -", "1×1 0", "1×2 0 1", "1×4 0 1 2 3", "1×8 0 1 2 3 4 5 6 7"),
    "--plugin keras:backend=torch": (
        "1×1 -",
        "1×1 0",
        "1×2 0 1",
        "1×4 0 1 2 3",
        "1×8 0 1 2 3 4 5 6 7",
    ),
    "--plugin accelerate": ("1×1 -", "1×1 0", "1×2 0 1", "1×4 0 1 2 3", "1×8 0 1 2 3 4 5 6 7"),
    "--plugin joblib": ("1×1 -", "1×1 -", "1×1 -", "1×1 -", "1×1 -"),
    "--plugin torch --ranks 1": ("1×1 -", "1×1 0", "1×1 01", "1×1 0123", "1×1 01234567"),
    "--plugin torch --ranks 2": ("1×2 - -", "1×2 0 0", "1×2 0 1", "1×2 01 23", "1×2 0123 4567"),
    "--plugin torch --ranks 3": ("1×3 - - -", "1×3 0 0 0", "1×3 0 0 1", "1×3 0 1 2", "1×3 0 1 2"),
    "--plugin torch --ranks 4": (
        "1×4 - - - -",
        "1×4 0 0 0 0",
        "1×4 0 0 1 1",
        "1×4 0 1 2 3",
        "1×4 01 23 45 67",
    ),
    "--plugin torch --nodes 2": (
        "2×1 - -",
        "2×1 0 0",
        "2×1 0 1",
        "2×2 0 1 2 3",
        "2×4 0 1 2 3 4 5 6 7",
    ),
    "--plugin torch --nodes 2 --procs-per-node 1": (
        "2×1 - -",
        "2×1 0 0",
        "2×1 0 1",
        "2×1 01 23",
        "2×1 0123 4567",
    ),
    "--plugin torch --gpu none": ("1×1 -", "1×1 -", "1×1 -", "1×1 -", "1×1 -"),
    "--gpu all": ("no GPU", "1×1 0", "1×2 0 1", "1×4 0 1 2 3", "1×8 0 1 2 3 4 5 6 7"),
    "--gpu 2": ("no GPU", "1 GPU of 2", "1×2 0 1", "1×2 0 1", "1×2 0 1"),
    "--gpu H200": ("no H200", "1×1 0", "1×1 0", "1×1 0", "1×1 0"),
    "--gpu H200:2 --nodes 2": (
        "no H200",
        "1 H200 of 4",
        "2 H200 of 4",
        "2×2 0 1 2 3",
        "2×2 0 1 2 3",
    ),
    "--gpu A100": ("no A100",) * 5,
    "--gpu 1,0": ("no GPU 1, 0", "no GPU 1", "1×2 1 0", "1×2 1 0", "1×2 1 0"),
    "--gpu GPU-00000001": ("no GPU GPU-00000001", "no GPU GPU-00000001", "1×1 1", "1×1 1", "1×1 1"),
}


@pytest.mark.parametrize("line", TABLE)
def test_the_gpus_of_each_rank(line: str) -> None:
    for number, expected in zip((0, 1, 2, 4, 8), TABLE[line], strict=True):
        request = parse_pool(line)
        if "×" not in expected:
            said = refused(plan, request, machine(number))
            assert expected in said
            has = (
                f"(it has: {gpus.table(there(number))})"
                if number
                else "%sky_pool --ranks 2 runs on its CPU"
            )
            assert has in said, "a refusal lists what is there"
            continue
        made = plan(request, machine(number))
        shape = made.topology
        assert " ".join([f"{shape.nodes}×{shape.procs_per_node}", *ranks(made)]) == expected, number
        # of simulated nodes each has GPUs of its own where there are enough
        words = [one.word for node in made.devices for one in node]
        assert len(words) == len(set(words)) or number < shape.nodes


def test_messages_on_distributions(golden: Golden) -> None:
    def words(line: str, number: int) -> str:
        return "; ".join(plan(parse_pool(line), machine(number)).gpu_words)

    golden(words("--plugin torch", 8))
    assert words("--plugin torch --ranks 4", 4) == "GPUs 0–3 (4 × H200)"
    assert words("--plugin torch", 1) == "GPU 0 (H200)"
    golden(words("--plugin torch --ranks 2", 1))
    assert words("--plugin torch", 0) == ""
    made = plan(parse_pool("--plugin torch"), machine(8))
    golden(made.text())
    golden(made.starting)
    golden(refused(plan, parse_pool("--plugin jax --ranks 2"), machine(1)))


def test_a_hidden_gpu_is_hidden_from_cuda() -> None:
    made = plan(parse_pool("--plugin torch --gpu none --ranks 2"), machine(2))
    assert [devices_environment(made, rank) for rank in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": ""}
    ] * 2


# ------------------------------------------------------------------------------------------------ those of others


def test_gpus_that_others_use_are_left_out_and_named(golden: Golden) -> None:
    first, second, *others = there(4)
    busy = replace(first, users=("process 77 (python, 12.0 GB)",))
    taken = replace(second, held=("job-1", "main"))
    made = plan(parse_pool("--plugin torch"), machine((busy, taken, *others)))
    assert ranks(made) == ["2", "3"]
    golden(made.gpu_words[1])
    # somebody else's process does not keep one from a GPU that is asked for by name, or is the only one; a pool does
    one = plan(parse_pool("--plugin torch"), machine((busy,)))
    golden((ranks(one), one.gpu_words[1]))
    assert ranks(plan(parse_pool("--gpu 0,"), machine((busy, taken)))) == ["0"]
    said = refused(plan, parse_pool("--gpu 1,"), machine((busy, taken)))
    golden(said)
    assert "--gpu none" in refused(plan, parse_pool("--plugin torch"), machine((taken,)))
    mine = replace(parse_pool("--plugin torch"), resizes="job-1")
    assert ranks(plan(mine, machine((taken,)))) == ["1"], (
        "a pool that gets another size keeps its own"
    )


def test_compute_modes(golden: Golden) -> None:
    alone, closed = there(2)
    alone, closed = replace(alone, mode="Exclusive_Process"), replace(closed, mode="Prohibited")
    made = plan(parse_pool("--plugin torch"), machine((alone, closed)))
    golden((ranks(made), made.gpu_words[1]))
    golden(refused(plan, parse_pool("--plugin torch --ranks 2"), machine((alone,))))


def test_unusable_gpus_are_reported(golden: Golden) -> None:
    silent = machine(0, unusable="NVIDIA's driver does not answer (nvidia-smi took more than 20 s)")
    made = plan(parse_pool("--plugin torch"), silent)
    golden(made.gpu_words)
    golden(refused(plan, parse_pool("--gpu all"), silent))


def test_options_of_gpu(golden: Golden) -> None:
    assert [str(read_gpus(text)) for text in ("all", "NONE", "4", "a100", "A100:4", "0,2", "0,", "GPU-12ab")] == [
        "all", "none", "4", "A100:1", "A100:4", "0,2", "0", "GPU-12ab",
    ]  # fmt: skip
    golden(refused(read_gpus, "0"))
    golden(refused(read_gpus, "1,1"))
    golden(refused(read_gpus, "A100,0"))
    golden(refused(read_gpus, "A10O"))
    golden(refused(_rented, "--gpu all"))


def _rented(line: str) -> None:
    from skymagic.plan.renting import Rental, plan_rented

    plan_rented(parse_pool(line), Rental("aws", "m5.large", "us-east-1b", "us-east-1", 8, 32.0))


# ---------------------------------------------------------------------------------------------------------- hosts


def test_hosts_give_all_of_their_gpus() -> None:
    made = plan_over(
        parse_pool("--plugin torch --hosts h1,h2"), [machine(4, "h1"), machine(4, "h2")], "ssh"
    )
    assert (made.topology.nodes, made.topology.procs_per_node, ranks(made)) == (
        2,
        4,
        ["0", "1", "2", "3"] * 2,
    )
    cpus = plan_over(
        parse_pool("--plugin torch --hosts h1,h2"), [machine(0, "h1"), machine(0, "h2")], "ssh"
    )
    assert (cpus.topology.world_size, cpus.devices) == (2, ())
    some = plan_over(
        parse_pool("--gpu 2 --hosts h1,h2"), [machine(4, "h1"), machine(2, "h2")], "ssh"
    )
    assert ranks(some) == ["0", "1"] * 2


def test_hosts_with_unequal_numbers_are_refused_with_a_table(golden: Golden) -> None:
    hosts = [machine(4, "h1"), machine(2, "host2"), machine(0, "h3")]
    said = refused(plan_over, parse_pool("--plugin torch --hosts h1,host2,h3"), hosts, "ssh")
    golden(said)


def test_probe_reports_gpus(golden: Golden) -> None:
    said = (
        "@sky system Linux\n@sky hostname h1\n@sky visible 1\n@sky gpu 0, GPU-a, NVIDIA L4, 23034, Default, [N/A]\n"
        "@sky gpu 1, GPU-b, NVIDIA L4, 23034, Default, [N/A]\n@sky gpu_tree GPU 0: NVIDIA L4 (UUID: GPU-a)\n"
        "@sky gpu_hold skymagic/gpu/GPU-b/job/lab\n@sky end\n"
    )
    (one,) = parse(said).inventory().gpus
    assert (one.uuid, one.held) == ("GPU-b", ("job", "lab"))
    silent = parse(
        "@sky system Linux\n@sky hostname h1\n@sky gpu_complaint it failed\n@sky end\n"
    ).inventory()
    golden(silent.unusable)
    amd = parse("@sky system Linux\n@sky hostname h1\n@sky rocm\n@sky end\n").inventory()
    golden(refused(plan_over, parse_pool("--gpu all --hosts h1"), [amd], "ssh"))


# ------------------------------------------------------------------------------------------------------- builds


def test_jax_and_torch_have_one_major_of_cuda() -> None:
    host = HostFacts(
        "Linux", "x86_64", "h", "/h", "/h/.skymagic", gpus=(H200,), driver="580.159.04"
    )
    packages = ("jax==0.10.2", "jaxtyping", "keras>=3")
    assert for_gpus(packages, host, "auto") == ("jax[cuda13]==0.10.2", "jaxtyping", "keras>=3")
    assert for_gpus(packages, replace(host, driver="550.1"), "auto")[0] == "jax[cuda12]==0.10.2"
    assert for_gpus(("jax[cuda12]",), host, "cu130") == ("jax[cuda13]",)
    assert for_gpus(("jax[cuda12]",), host, "cu126") == ("jax[cuda12]",)
    assert for_gpus(("jax[cuda12]==1", "jax"), replace(host, gpus=(), driver=""), "cpu") == (
        "jax==1",
        "jax",
    )


# ------------------------------------------------------------------------------------------------------ networks


def test_the_fabric_is_chosen_among_several_cards(tmp_path: Path) -> None:
    for name, state, layer in (
        ("mlx5_0", "4: ACTIVE", "InfiniBand"), ("mlx5_1", "1: DOWN", "InfiniBand"), ("mlx5_bond_0", "4: ACTIVE", "Ethernet"),
    ):  # fmt: skip
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "link_layer").write_text(layer + "\n")
    assert hcas(infiniband_ports(tmp_path)) == "=mlx5_0:1"
    assert hcas([("a:1", True, "Ethernet"), ("b:1", True, "Ethernet")]) == ""
    assert hcas([("a:1", True, "InfiniBand"), ("b:1", True, "InfiniBand")]) == ""
    assert hcas(infiniband_ports(tmp_path / "none")) == ""


# --------------------------------------------------------------------------------------------------------- names

# an accelerator: what drivers call it
NAMES = """\
H200: NVIDIA H200 | NVIDIA H200 NVL;
H100: NVIDIA H100 80GB HBM3 | NVIDIA H100 PCIe | NVIDIA H100 NVL | NVIDIA H100 80GB HBM2e;  H800: NVIDIA H800;
H20: NVIDIA H20 | NVIDIA H20-3e;  GH200: NVIDIA GH200 480GB | NVIDIA GH200 120GB;  B200: NVIDIA B200;
B300: NVIDIA B300 SXM6 AC;  GB200: NVIDIA GB200;  GB300: NVIDIA GB300;
A100-80GB: NVIDIA A100-SXM4-80GB | NVIDIA A100 80GB PCIe | NVIDIA A100-PCIE-80GB;
A100: NVIDIA A100-SXM4-40GB | NVIDIA A100-PCIE-40GB | A100-SXM4-40GB;  A800-80GB: NVIDIA A800-SXM4-80GB;
A30: NVIDIA A30;  A40: NVIDIA A40;  A10: NVIDIA A10;  A10G: NVIDIA A10G;  A16: NVIDIA A16;  A2: NVIDIA A2;
L4: NVIDIA L4;  L40: NVIDIA L40;  L40S: NVIDIA L40S;  L20: NVIDIA L20;  L2: NVIDIA L2;  T4: Tesla T4;  T4G: NVIDIA T4G;
V100: Tesla V100-SXM2-16GB | Tesla V100-PCIE-16GB;  V100-32GB: Tesla V100-SXM2-32GB | Tesla V100-SXM3-32GB;
V100S: Tesla V100S-PCIE-32GB;  P100: Tesla P100-PCIE-16GB | Tesla P100-SXM2-16GB;  P40: Tesla P40;  P4: Tesla P4;
K80: Tesla K80;  M60: Tesla M60;  RTXA6000: NVIDIA RTX A6000 | RTX A6000;  RTXA5000: NVIDIA RTX A5000;
RTXA4000: NVIDIA RTX A4000;  RTXA2000: NVIDIA RTX A2000;  RTX6000-Ada: NVIDIA RTX 6000 Ada Generation;
RTX5000-Ada: NVIDIA RTX 5000 Ada Generation;
RTX4000-Ada: NVIDIA RTX 4000 Ada Generation | NVIDIA RTX 4000 SFF Ada Generation;
RTXPRO6000: NVIDIA RTX PRO 6000 Blackwell Server Edition | NVIDIA RTX PRO 6000 Blackwell Workstation Edition;
RTXPRO5000: NVIDIA RTX PRO 5000 Blackwell;  RTXPRO4000: NVIDIA RTX PRO 4000 Blackwell;  RTX6000: Quadro RTX 6000;
RTX8000: Quadro RTX 8000;  RTX5090: NVIDIA GeForce RTX 5090;  RTX5080: NVIDIA GeForce RTX 5080;
RTX5070: NVIDIA GeForce RTX 5070;  RTX5070Ti: NVIDIA GeForce RTX 5070 Ti;  RTX4090: NVIDIA GeForce RTX 4090;
RTX4090D: NVIDIA GeForce RTX 4090 D;  RTX4080: NVIDIA GeForce RTX 4080;  RTX4080-SUPER: NVIDIA GeForce RTX 4080 SUPER;
RTX4070: NVIDIA GeForce RTX 4070;  RTX4070Ti: NVIDIA GeForce RTX 4070 Ti;  RTX4060: NVIDIA GeForce RTX 4060;
RTX4060Ti: NVIDIA GeForce RTX 4060 Ti;  RTX3090: NVIDIA GeForce RTX 3090;  RTX3090Ti: NVIDIA GeForce RTX 3090 Ti;
RTX3080: NVIDIA GeForce RTX 3080;  RTX3080Ti: NVIDIA GeForce RTX 3080 Ti;  RTX3070: NVIDIA GeForce RTX 3070;
RTX3060: NVIDIA GeForce RTX 3060;  RTX2080Ti: GeForce RTX 2080 Ti;  TITAN RTX: NVIDIA TITAN RTX;
TITAN V: NVIDIA TITAN V;  GeForce RTX 4090 Laptop GPU: NVIDIA GeForce RTX 4090 Laptop GPU;
GeForce GTX 1080 Ti: NVIDIA GeForce GTX 1080 Ti;  DGX Spark: NVIDIA DGX Spark;  MI300X: AMD Instinct MI300X
"""
NOBODYS = ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "llvmpipe (LLVM 15.0.7, 256 bits)", "")


@pytest.mark.parametrize("line", [line.strip() for line in NAMES.replace("\n", "").split(";")])
def test_drivers_names(line: str) -> None:
    name, _, drivers = line.partition(": ")
    # a name without a size is that of every size
    sizes = {name, name.removesuffix("-80GB").removesuffix("-32GB")} & {*accelerators.NAMES}
    for driver in drivers.split(" | "):
        assert canonical_device(driver) == name
        assert {one for one in accelerators.NAMES if matches(one, driver)} == sizes, (
            "a GPU is taken for another"
        )


@pytest.mark.parametrize("driver", NOBODYS)
def test_parts_of_gpus_have_no_name(driver: str) -> None:
    assert not [one for one in accelerators.NAMES if matches(one, driver)]
