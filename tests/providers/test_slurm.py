"""Slurm's scripts and the environment of its programs, checked with a shell."""

from __future__ import annotations

import subprocess

from skymagic.providers import slurm_jobs
from skymagic.ssh.programs import Programs
from tests.unit.providers.test_slurm import directives


def test_job_script_matches_the_request() -> None:
    asked = directives(
        "--nodes 4 --gpu A100:8 --cpus 16+ --memory 64 --account lab --time 4h --slurm hint=nomultithread"
    )
    text = slurm_jobs.script(asked, "train-1a2b3c4d")
    head, _, command = text.partition("\n\n")
    assert head.splitlines() == [
        "#!/bin/sh",
        "#SBATCH --job-name=train-1a2b3c4d",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --comment=skymagic",
        "#SBATCH --no-requeue",
        "#SBATCH --no-kill",
        "#SBATCH --output=/dev/null",
        "#SBATCH --chdir=/tmp",
        "#SBATCH --mem=64G",
        "#SBATCH --gres=gpu:a100:8",
        "#SBATCH --account=lab",
        "#SBATCH --time=240",
        "#SBATCH --hint=nomultithread",
        "#SBATCH --signal=URG@120",
    ]
    unless, _, command = command.partition("\n")
    assert unless == '[ -z "$SLURM_RESTART_COUNT" ] || exit 0'
    assert command.startswith("exec srun --ntasks-per-node=1 --overlap --no-kill ")
    assert subprocess.run(["sh", "-n"], input=text, text=True).returncode == 0


def test_jobs_hear_nothing_of_the_notebooks_environment() -> None:
    environ = {
        "HOME": "/h",
        "PATH": "/bin",
        "HF_TOKEN": "secret",
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/c",
        "SBATCH_ACCOUNT": "a",
    }
    assert Programs("sbatch", slurm_jobs.KEPT).variables(environ) == {
        "HOME": "/h",
        "PATH": "/bin",
        "SLURM_CONF": "/c",
    }
