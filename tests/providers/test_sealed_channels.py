"""Who listens to a scheduler's network learns nothing of a pool's secrets, and who stands in for a node gets none."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.hosts import loopback, masters
from tests.lab.notebook import Notebook, opened, seen
from tests.lab.slurm import Cluster, cluster
from tests.lab.sniffing import heard

ON_SLURM = f"--provider slurm --time 10m --python {sys.executable}"
RECORD_CERTIFICATES = """
import os, hashlib, secrets
import skymagic.wire.tls as tls
made, plain = [], tls.certificate
def certificate():
    made.append(plain())
    return made[-1]
tls.certificate = certificate
value = secrets.token_hex(16)
"""
"""A notebook's own connections are not encrypted, so that values are made in it, and only their digests are shown."""
DIGESTS = "[hashlib.sha256(text.encode()).hexdigest() for text in (os.environ['API_TOKEN'], value)]"
SECRETS = """
from skymagic.pool import keys
(path,) = keys.records.folder().glob("*.json")
access = keys.read(path.stem).accesses[0]
found = [os.environ["API_TOKEN"], value, access.secret, getattr(access, "channel_key", "")]
found += [pem.splitlines()[-3] for pem in made]
found = [text for text in found if text]
"""
MORE_SECRETS = (
    "in_file, pushed = secrets.token_hex(16), secrets.token_hex(16)\nopen('in_file.txt', 'w').write(in_file);",
    "%sky_put in_file.txt ~/in_copy.txt",
    "%%sky_broadcast -o of_ranks\nimport secrets\nof_rank = secrets.token_hex(16)\nof_rank;",
    "%%sky_broadcast\nimport os\nprinted = secrets.token_hex(16)\nopen(os.path.expanduser('~/printed.txt'), 'w').write(printed);",
    "%sky_pull printed -t 0",
    "%sky_get ~/printed.txt printed.txt",
    "%sky_push pushed",
    "%%sky_sh\nwc -c ~/printed.txt ~/in_copy.txt",
    "%sky_restart",
    "%%sky_broadcast\nlen(pushed);",
)
"""Values, files and variables that go either way, also to ranks that are restarted."""
FOUND_MORE = "found += [in_file, *of_ranks, *printed, pushed]"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm"), 1) as made:
        yield made


@pytest.fixture
def notebook(slurm: Cluster, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook with a home folder and a state folder of its own."""
    (tmp_path / "home").mkdir()
    token = secrets.token_hex(16)
    env = {
        **slurm.env,
        "HOME": str(tmp_path / "home"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "API_TOKEN": token,
    }
    with opened(tmp_path, env=env) as made:
        yield made
        made.run("%sky_down --all")
        slurm.wait_empty()


def never_heard(notebook: Notebook, pool: str, folder: Path) -> None:
    """Start a pool and use it; none of its secrets is in any packet, and its job id is."""
    notebook.run(RECORD_CERTIFICATES)
    with heard(folder) as packets:
        notebook.run(f"%sky_pool lab {pool} --secret API_TOKEN")
        shown = notebook.run(f"%%sky_broadcast\nimport hashlib, os\nprint({DIGESTS})")
        assert str(notebook.value(DIGESTS)) in shown.text
        for cell in MORE_SECRETS:
            notebook.run(cell)
    notebook.run(f"{SECRETS}{FOUND_MORE}")
    found = notebook.value("found")
    assert len(found) >= 8
    assert all(len(text) >= 16 for text in found)
    assert packets.have(notebook.value("path.stem").encode())
    assert [text for text in found if packets.have(text.encode())] == []


@pytest.mark.needs("slurm", "root")
def test_eavesdropper_on_slurm_learns_no_secret(notebook: Notebook, tmp_path: Path) -> None:
    never_heard(notebook, ON_SLURM, tmp_path)


@pytest.mark.needs("slurm", "root", "sshd")
def test_eavesdropper_behind_a_login_node_learns_no_secret(slurm: Cluster, tmp_path: Path) -> None:
    """The login node relays the session between notebook and node, and its home folder has the key."""
    (tmp_path / "bin").mkdir()
    with (
        loopback(tmp_path / "hosts", 1, env=slurm.env, names=["login"]) as hosts,
        masters(hosts) as client,
        opened(
            tmp_path,
            env={
                **client,
                "PATH": str(tmp_path / "bin"),
                "XDG_STATE_HOME": str(tmp_path / "state"),
                "API_TOKEN": secrets.token_hex(16),
            },
        ) as notebook,
    ):
        channels = hosts[0].home / ".skymagic" / "channels"
        never_heard(notebook, f"{ON_SLURM} --login login", tmp_path)
        (key,) = channels.glob("*/key")
        assert key.stat().st_mode & 0o777 == 0o600
        notebook.run("%sky_down --all")
        slurm.wait_empty()
        assert not list(channels.iterdir())


def instead_of_srun(slurm: Cluster, notebook: Notebook, script: str) -> None:
    """Have each channel run this script of sh first; not the step of the holders."""
    only = f'case "$*" in *--unbuffered*) {script};; esac; exec "$REAL" "$@"'
    path = slurm.instead_of("srun", only)["PATH"]
    notebook.run(f"import os; os.environ['PATH'] = {path!r}")


POOL = f"%sky_pool lab {ON_SLURM}"


@pytest.mark.needs("slurm", "root")
def test_a_node_with_another_key_is_refused_at_once(slurm: Cluster, notebook: Notebook) -> None:
    instead_of_srun(
        slurm, notebook, 'for key in "$HOME"/.skymagic/channels/*/key; do echo no >"$key"; done'
    )
    assert "%sky_down" in notebook.fail(POOL, "channel-untrusted").text
    assert notebook.fields()["host"] == "n1"
    slurm.wait_empty()


@pytest.mark.needs("slurm", "root")
def test_impostor_of_a_known_node_is_refused(slurm: Cluster, notebook: Notebook) -> None:
    """It claims to know no key, as a node without the shared home folder would."""
    instead_of_srun(slurm, notebook, "HOME=/nowhere; export HOME")
    notebook.fail(POOL, "channel-untrusted")
    assert notebook.fields()["host"] == "n1"
    slurm.wait_empty()


@pytest.mark.needs("slurm", "root")
def test_the_python_that_a_site_loads_serves(notebook: Notebook, tmp_path: Path) -> None:
    (site := tmp_path / "config" / "skymagic" / "slurm").mkdir(parents=True)
    (site / "lab.sh").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    notebook.run(f"import os; os.environ['XDG_CONFIG_HOME'] = {str(tmp_path / 'config')!r}")
    notebook.run("from skymagic.ssh import sealed; sealed.INTERPRETERS = ()")
    notebook.run("import sys; own, sys.executable = sys.executable, '/nowhere/python3'")
    notebook.run(POOL)
    notebook.run("sys.executable = own")
    assert seen(notebook, "6 * 7") == [42]


@pytest.mark.needs("slurm", "root")
def test_slurm_node_without_shared_home_is_trusted_once(tmp_path: Path) -> None:
    (home := tmp_path / "homes" / "me").mkdir(parents=True)
    hidden = f'mount -t tmpfs none {home.parent} && exec "$@"'
    (tmp_path / "slurm").mkdir()
    env = {"HOME": str(home), "API_TOKEN": secrets.token_hex(16)}
    with (
        cluster(
            tmp_path / "slurm", 1, within=("unshare", "--mount", "sh", "-c", hidden, "sh")
        ) as slurm,
        opened(tmp_path, env={**slurm.env, **env}) as notebook,
    ):
        shown = notebook.run(f"{POOL} --env SKYMAGIC_HOME={tmp_path}/scratch").text
        assert shown.count("n1: trusted") == 1
        notebook.run("%%sky_broadcast\nkept = 7")
        # from then on the node must know the key, also to another kernel
        notebook.restart()
        assert "attached" in notebook.run("%load_ext skymagic\n%sky_attach lab").text
        assert seen(notebook, "kept") == [7]
        notebook.run("%sky_down")
        slurm.wait_empty()
