"""The GPUs of a machine, read from the text of its programs."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from skymagic.magics.arguments.cell_magics import parse_pool
from skymagic.plan import gpus
from skymagic.plan.planning import plan
from skymagic.pool.resources import devices_environment
from skymagic.runtime.info import InstanceInfo
from tests.lab.gpus import Gpu, Gpus, mig_uuid, uuid_of, visible
from tests.unit.plan.test_gpus import machine

# ----------------------------------------------------------------------------------------------------- the driver


def smi(about: Gpus, *arguments: str) -> list[str]:
    done = subprocess.run(
        ["nvidia-smi", *arguments],
        env={**about.environment()},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def listed(about: Gpus, **options: Any) -> tuple[gpus.GpuDevice, ...]:
    table = "--format=csv,noheader,nounits"
    users = smi(about, f"--query-compute-apps={gpus.APPLICATIONS}", table)
    return gpus.parse_nvidia_smi(
        smi(about, f"--query-gpu={gpus.FIELDS}", table), smi(about, "-L"), users, **options
    )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Gpus:
    """Two whole ones, one in use, and one in two parts."""
    return Gpus(
        tmp_path_factory.mktemp("mixed") / "gpus",
        [
            Gpu(),
            Gpu(processes=((77, "/usr/bin/python", 2048), (78, "x", 5))),
            Gpu("NVIDIA A100-SXM4-80GB", mig=("1g.10gb", "3g.40gb")),
        ],
    )


def test_the_inventory_of_a_machine(mixed: Gpus) -> None:
    held = [f"{gpus.HOLD}{uuid_of(0)}", f"{gpus.HOLD}{uuid_of(0)}/job-1/main"]
    first, second, *parts = listed(mixed, held=held, own=(78,))
    assert (first.uuid, first.kind, first.memory_gb, first.held) == (
        uuid_of(0),
        "H200",
        150.8,
        ("job-1", "main"),
    )
    assert second.users == ("process 77 (python, 2.0 GB)",), "the notebook's own does not count"
    assert [(one.uuid, one.index, one.kind) for one in parts] == [
        (mig_uuid(2, 0), 2, "MIG 1g.10gb of A100-80GB"),
        (mig_uuid(2, 1), 2, "MIG 3g.40gb of A100-80GB"),
    ]


@pytest.mark.parametrize(
    "said",
    [
        None,
        "",
        f"{mig_uuid(2, 1)}",
        " 1 , 0 ",
        *"0 1,0 0,5,1 GPU-00000001 GPU-0 0,0 -1 NoDevFiles 0,x,1".split(),
    ],
)
def test_visible_devices_are_those_that_cuda_shows(mixed: Gpus, said: str | None) -> None:
    whole = [one for one in listed(mixed) if not one.part or (said or "").startswith("MIG")]
    about = {
        "gpus": [{"uuid": uuid_of(number), "mig": gpu.mig} for number, gpu in enumerate(mixed.gpus)]
    }
    expected = visible(about, {} if said is None else {"CUDA_VISIBLE_DEVICES": said})
    assert [one.uuid for one in gpus.visible(whole, said)] == [uuid for uuid, _ in expected]


def test_parts_of_gpus_are_shown_to_each_rank_alone(
    mixed: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parts CUDA shows a process the first alone."""
    made = plan(parse_pool(f"--gpu {mig_uuid(2, 0)},{mig_uuid(2, 1)}"), machine(listed(mixed)))
    shown = [devices_environment(made, rank)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)]
    assert shown == [mig_uuid(2, 0), mig_uuid(2, 1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown[1])
    assert InstanceInfo(accelerators=2, local_rank=1, local_world_size=2).gpus_of_rank() == range(1)
