"""A machine's own disks as the place for environments: the script that mounts them, run as root of a namespace of mounts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from skymagic.bootstrap.quoting import MARK
from skymagic.providers.aws import nvme

pytestmark = pytest.mark.needs("mounts")
PROGRAM = """#!/bin/sh
echo "${0##*/} $@" >>"$RECORD"
"""
MOUNT = """#!/bin/sh
# a disk is memory here
echo "mount $@" >>"$RECORD"
case $1 in --bind) exec /bin/mount "$@" ;; *) exec /bin/mount -t tmpfs disk "$4" ;; esac
"""
LOOK = """
stat -c 'mode %a' "$HOME/.skymagic"
grep -q " $HOME/.skymagic " /proc/mounts && echo apart
touch "$HOME/.skymagic/written"
"""


class Machine:
    """This machine with disks of one's own choice, as the kernel would list them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.sys = folder, folder / "home", folder / "sys"
        self.record = folder / "record"
        self.record.touch()
        self.image = folder / "dlami"
        for path in (self.home, self.sys, self.image, folder / "bin"):
            path.mkdir()
        for name, text in {"mkfs.ext4": PROGRAM, "mdadm": PROGRAM, "mount": MOUNT}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def disk(self, name: str, model: str = nvme.MODEL, *inside: str) -> None:
        """Another disk; `inside` are its partitions, and who holds it."""
        (self.sys / name / "device").mkdir(parents=True)
        (self.sys / name / "device/model").write_text(f"{model}          \n")
        for one in inside:
            (self.sys / name / one).mkdir(parents=True)

    def boot(self, before: str = "", times: int = 1) -> list[str]:
        """What is said and seen there once the script has run."""
        text = "\n".join([before, *[nvme.script(str(self.sys), str(self.image))] * times, LOOK])
        env = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin", "HOME": str(self.home),
            "RECORD": str(self.record),
        }  # fmt: skip
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-s"], input=text, env=env, capture_output=True, text=True, check=False, timeout=60
        )
        return [line.removeprefix(MARK).strip() for line in (done.stdout + done.stderr).splitlines()]

    @property
    def did(self) -> list[str]:
        return [line.split()[0] for line in self.record.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.disk("nvme0n1", "Amazon Elastic Block Store", "nvme0n1p1")
    return made


def test_one_disk(machine: Machine) -> None:
    machine.disk("nvme1n1")
    assert machine.boot(times=2) == ["nvme", "nvme", "mode 700", "apart"], "twice is safe"
    assert machine.did == ["mkfs.ext4", "mount"]
    assert "/dev/nvme1n1" in machine.record.read_text()
    assert not list((machine.home / ".skymagic").iterdir()), "what was written there is on the disk"


def test_several_disks_are_one(machine: Machine) -> None:
    for number in range(1, 9):
        machine.disk(f"nvme{number}n1")
    assert machine.boot()[0] == "nvme"
    assert machine.did == ["mdadm", "mkfs.ext4", "mount"]
    assert "--level=0 --raid-devices=8 /dev/nvme1n1 " in machine.record.read_text()


def test_where_the_image_has_mounted_them(machine: Machine) -> None:
    machine.disk("nvme1n1", nvme.MODEL, "holders/dm-0")
    assert machine.boot(f"/bin/mount -t tmpfs disk {machine.image}") == ["nvme", "mode 700", "apart"]
    assert machine.did == ["mount"]


@pytest.mark.parametrize("inside", ["holders/dm-0", "nvme1n1p1"])
def test_a_disk_that_is_in_use_is_left_alone(machine: Machine, inside: str) -> None:
    machine.disk("nvme1n1", nvme.MODEL, inside)
    assert machine.boot() == ["nvme there is none that is not in use", "mode 700"]
    assert machine.did == []


def test_nothing_is_hidden_below_a_disk(machine: Machine) -> None:
    machine.disk("nvme1n1")
    (machine.home / ".skymagic/env").mkdir(parents=True)
    assert "there is something in" in machine.boot()[0]
    assert machine.did == []


def test_what_goes_wrong_is_no_reason_not_to_work(machine: Machine) -> None:
    machine.disk("nvme1n1")
    (machine.folder / "bin/mkfs.ext4").write_text("#!/bin/sh\necho 'mkfs.ext4: no such device' >&2\nexit 1\n")
    said = machine.boot()
    assert said[0] == "mkfs.ext4: no such device"
    assert "apart" not in said
