"""Slurm's nodes run their processes in containers: by an engine of the nodes, or by Slurm's plugin pyxis."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.containers import LACKING, MARKER, STAND_IN, installable, root_file_system
from tests.lab.desk import killed
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, opened, seen
from tests.lab.slurm import Cluster, cluster

pytestmark = pytest.mark.needs("slurm", "root", "charliecloud")
INSIDE = f"import os, {LACKING}\nos.path.exists({MARKER!r}), os.environ['SLURMD_NODENAME']"
PYXIS = """
case " $* " in *" --help "*) $REAL --help; echo ' --container-image=[USER@]... [pyxis]'; exit ;; esac
image= name= options=
for word; do
    shift
    case $word in
        --container-image=*) image=${word#*=} ;;
        --container-name=*) name=${word#*=} ;;
        --container-mounts=*)
            for mount in $(echo "${word#*=}" | tr , ' '); do options="$options --bind=$mount"; done ;;
        --container-mount-home) options="$options --bind=$HOME" ;;
        --no-container-*) ;;
        --container-workdir=*) options="$options --cd=${word#*=}" ;;
        /bin/sh) set -- "$@" ${image:+env USER=root ch-run $options "$image" --} /bin/sh ;;
        *) set -- "$@" "$word" ;;
    esac
done
echo "$name" >>"$(dirname "$0")/srun.asked"
exec $REAL "$@"
"""
"""Instead of srun: does what these options of pyxis do, by charliecloud."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("images")
    yield root_file_system(folder / "image")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def notebook(slurm: Cluster, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook whose home folder is the nodes', too."""
    home = tmp_path / "home"
    (tmp_path / "notebook").mkdir()
    file = home / ".config/pip/pip.conf"
    file.parent.mkdir(parents=True)
    settings = installable(tmp_path / "wheels")
    file.write_text(f"[global]\nno-index = true\nfind-links = {settings['PIP_FIND_LINKS']}\n")
    env = {**slurm.env, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
    with opened(tmp_path / "notebook", env=env) as made:
        yield made
        made.run("%sky_down --all")
    slurm.wait_empty()


def pool(container: str, nodes: int) -> str:
    return f"%sky_pool lab --provider slurm --nodes {nodes} --time 10m --container {container}"


def test_engine_of_a_sites_module_runs_the_containers(
    slurm: Cluster, notebook: Notebook, image: Path, tmp_path: Path
) -> None:
    """The job's prologue adds it to PATH; ranks survive the notebook, and end with the job."""
    programs, site = tmp_path / "site", tmp_path / "home/.config/skymagic/slurm/lab.sh"
    programs.mkdir()
    (programs / "apptainer").write_text(STAND_IN)
    (programs / "apptainer").chmod(0o755)
    site.parent.mkdir(parents=True)
    site.write_text(f"export PATH=$PATH:{programs}\n")
    notebook.run(pool(f"apptainer:{image}", 2))
    assert seen(notebook, INSIDE) == [(True, "n1"), (True, "n2")]
    notebook.run("%%sky_broadcast\nkept = 7")
    killed(notebook)
    notebook.restart()
    notebook.run("%load_ext skymagic\n%sky_attach lab")
    assert seen(notebook, "kept") == [7, 7]
    slurm("scancel", slurm.running())
    slurm.wait_empty()
    slurm.wait(lambda: not [one for one in slurm.processes() if one.name() == "python3"])


def test_pyxis_comes_first(slurm: Cluster, notebook: Notebook, image: Path) -> None:
    path = slurm.instead_of("srun", PYXIS)["PATH"]
    notebook.run(f"import os\nos.environ['PATH'] = {path!r}")
    plan = notebook.run(f"{pool(str(image), 1)} --dry-run").text
    assert f"--container-image={image}" in plan
    notebook.run(pool(str(image), 1))
    assert seen(notebook, INSIDE) == [(True, "n1")]
    ((_, _, job_id),) = slurm.jobs()
    asked = Path(path.partition(":")[0], "srun.asked").read_text().split()
    assert set(asked) == {f"skymagic-{job_id}"}


def test_missing_pyxis_is_refused(slurm: Cluster, notebook: Notebook, golden: Golden) -> None:
    """Together with the other mistakes, and before a job is submitted."""
    refused = notebook.fail(f"{pool('pyxis:lab/image', 1)} --partition nowhere")
    golden(refused.evalue)
    assert slurm.jobs() == []
