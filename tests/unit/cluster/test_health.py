"""How nodes are judged by what their own programs say: texts of nvidia-smi and of the kernel's log, clocks."""

from __future__ import annotations

import pytest

from skymagic.cluster.health import Findings, Gpu, Health, Xid, gpus, xids

A100 = "NVIDIA A100-SXM4-80GB"
EIGHT = "".join(f"{number}, {A100}, 550.163.01, 0\n" for number in range(8))
LISTED = {
    EIGHT: tuple(Gpu(number, A100, "550.163.01", 0) for number in range(8)),
    "0, Tesla T4, 535.183.06, 3": (Gpu(0, "Tesla T4", "535.183.06", 3),),
    "0, NVIDIA GeForce RTX 4090, 570.86.10, [N/A]": (
        Gpu(0, "NVIDIA GeForce RTX 4090", "570.86.10", None),
    ),
    "0, Quadro K620, 390.157, [Not Supported]": (Gpu(0, "Quadro K620", "390.157"),),
    f"0, {A100}, 550.163.01, [Unknown Error]": (Gpu(0, A100, "550.163.01"),),
    "No devices were found": (),
    "": (),
}
KERNEL = """\
[    3.141592] nvidia 0000:3b:00.0: enabling device (0140 -> 0142)
[12345.678901] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[12346.000001] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
Nov 22 16:54:44 gpu1 kernel: NVRM: Xid (PCI:0000:af:00): 31, pid=4242, name=python, Ch 00000008, intr 00000000. MMU Fault
NVRM: Xid (0000:d8:00): 48
""".splitlines()
GOOD = Health("gpu1", gpus=gpus(EIGHT), disk_free=200_000_000_000)


@pytest.mark.parametrize(("text", "expected"), LISTED.items(), ids=range(len(LISTED)))
def test_nvidia_smi_output_is_parsed(text: str, expected: tuple[Gpu, ...]) -> None:
    assert gpus(text) == expected


def test_xids_of_the_kernels_log() -> None:
    assert [(one.device, one.number) for one in xids(KERNEL)] == [
        ("0000:3b:00", 79),
        ("0000:af:00", 31),
        ("0000:d8:00", 48),
    ]


def judged(node: Health, expected: int = 8) -> list[tuple[str, bool]]:
    return [
        (one.problem, one.broken)
        for one in Findings((GOOD, node, GOOD), expected=expected).verdicts
    ]


def test_a_good_node() -> None:
    assert judged(GOOD) == []
    assert Findings((GOOD,), expected=8).rows() == [
        ("gpu1", f"8 × {A100}", "550.163.01", "0 ECC, no Xid", "200.0 GB", "same", "good")
    ]


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"unreached": "no route to host"}, "not checked: no route to host"),
        ({"gpus": gpus(EIGHT)[:7]}, "7 GPUs, and 8 should be there"),
        ({"gpus": ()}, "0 GPUs, and 8 should be there"),
        ({"gpus": (), "complaint": "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.163"},
         "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch NVML library version: 550.163"),
        ({"gpus": (), "complaint": "nvidia-smi has not answered within 20 s"}, "nvidia-smi: nvidia-smi has not answered within 20 s"),
        ({"gpus": (*gpus(EIGHT)[:7], Gpu(7, A100, "550.163.01", 2))}, "GPU 7 has 2 uncorrected ECC errors"),
        ({"xids": (Xid("0000:3b:00", 79),)}, "GPU at 0000:3b:00: fallen off the bus (Xid 79)"),
    ],
)  # fmt: skip
def test_a_broken_node(about: dict[str, object], words: str) -> None:
    assert judged(Health(**{**vars(GOOD), **about})) == [(words, True)]


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (
            {"gpus": tuple(Gpu(n, A100, "535.1", 0) for n in range(8))},
            "driver 535.1, where most have 550.163.01",
        ),
        (
            {"xids": (Xid("0000:3b:00", 31),)},
            "a program has failed on the GPU at 0000:3b:00 (Xid 31)",
        ),
        ({"disk_free": 3_000_000_000}, "3.0 GB of its disk free"),
        ({"clock_offset": -7.25, "clock_error": 0.01}, "its clock is 7.25 s behind"),
    ],
)
def test_notes_about_usable_nodes(about: dict[str, object], words: str) -> None:
    assert judged(Health(**{**vars(GOOD), **about})) == [(words, False)]


def test_a_clock_that_could_not_be_read_well_is_not_wrong() -> None:
    assert judged(Health(**{**vars(GOOD), "clock_offset": 1.5, "clock_error": 0.8})) == []


def test_missing_gpus_are_ignored_unless_requested() -> None:
    assert judged(Health("cpu1", disk_free=200_000_000_000), expected=0) == []


def test_a_node_that_is_gone_is_broken() -> None:
    assert Findings((GOOD, Health("gone", unreached="x"))).broken == [1]


def test_hostile_texts_stay_text() -> None:
    node = Health("<b>x", gpus=gpus("0, <script>, 1, 0"), disk_free=200_000_000_000)
    html = Findings((node,))._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
