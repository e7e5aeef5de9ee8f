"""Who listens to a scheduler's network learns nothing of a pool's secrets, and who stands in for a node gets none."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.providers import ray as provider
from tests.lab import ray
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
found += [in_file, *of_ranks, *printed, pushed]
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
    notebook.run(SECRETS)
    found = notebook.value("found")
    assert len(found) >= 8
    assert all(len(text) >= 16 for text in found)
    assert packets.have(notebook.value("path.stem").encode())
    assert [text for text in found if packets.have(text.encode())] == []


@pytest.mark.needs("slurm", "root")
def test_who_listens_to_slurm_learns_no_secret(notebook: Notebook, tmp_path: Path) -> None:
    never_heard(notebook, ON_SLURM, tmp_path)


@pytest.mark.needs("slurm", "root", "sshd")
def test_who_listens_to_a_cluster_behind_a_login_node_learns_no_secret(
    slurm: Cluster, tmp_path: Path
) -> None:
    """The session leads from the notebook to the node: the login node carries it, and its home has the key."""
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
def test_who_stands_in_for_a_node_that_has_the_key_is_refused(
    slurm: Cluster, notebook: Notebook
) -> None:
    """He says that he knows nothing, as a node without the home folder would."""
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
def test_a_node_without_the_home_folder_is_trusted_once_and_said_so(tmp_path: Path) -> None:
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


# ------------------------------------------------------------------------------------ Ray


@pytest.fixture(scope="module")
def on_ray() -> Iterator[ray.Cluster]:
    with ray.cluster(1) as made:
        yield made


@pytest.fixture
def notebook_of_ray(tmp_path: Path) -> Iterator[Notebook]:
    (tmp_path / "home").mkdir()
    env = {
        "HOME": str(tmp_path / "home"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "API_TOKEN": secrets.token_hex(16),
    }
    with opened(tmp_path, env=env) as made:
        yield made
        made.run("%sky_down --all")


def ray_pool(on_ray: ray.Cluster) -> str:
    return f"--provider ray --address {on_ray.address} --python {sys.executable}"


DRIVER = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("driver", sys.argv[1])
driver = importlib.util.module_from_spec(spec)
spec.loader.exec_module(driver)
"""
STRANGER = """
import ray
_, _, address, name, key, ran = sys.argv
ray.init(address, log_to_driver=False)
actor = ray.get_actor(name, "skymagic")

def said(call):
    try:
        return repr(ray.get(call, timeout=30))
    except Exception as problem:
        return str(problem).strip().splitlines()[-1]

arguments = {
    "renew": (), "needed": (), "start": ("shell", "touch " + ran), "write": ("shell", b"x"), "read": ("shell",), "close": ("shell",),
}
guess = driver.Caller("a guess")
refused = {"introduce": said(actor.introduce.remote("shell")), "__ray_call__": said(actor.__ray_call__.remote(lambda self: self._node._key()))}
for method, given in arguments.items():
    for number, ticket in enumerate([None, (), ("", 0, ""), guess.ticket(name, method, *given)]):
        refused[f"{method} {number}"] = said(getattr(actor, method).remote(ticket, *given))
own = driver.Caller(key)
ticket = own.ticket(name, "needed")
allowed = [said(actor.needed.remote(ticket))]
refused["replay"] = said(actor.needed.remote(ticket))
refused["another method"] = said(actor.renew.remote(own.ticket(name, "needed")))
refused["other arguments"] = said(actor.start.remote(own.ticket(name, "start", "shell", "true"), "shell", "touch " + ran))
refused["another node"] = said(actor.needed.remote(own.ticket(name + "1", "needed")))
late, soon = own.ticket(name, "needed"), own.ticket(name, "needed")
allowed += [said(actor.needed.remote(soon)), said(actor.needed.remote(late))]
methods = {each for each in vars(driver.RayHolder) if not each.startswith("__")}
print(json.dumps([refused, allowed, sorted(methods - {*arguments, "introduce"})]))
"""


@pytest.mark.needs("ray", "root")
def test_who_listens_to_ray_learns_no_secret(
    on_ray: ray.Cluster, notebook_of_ray: Notebook, tmp_path: Path
) -> None:
    never_heard(notebook_of_ray, ray_pool(on_ray), tmp_path)
    notebook_of_ray.run("%sky_down")
    assert not list((tmp_path / "home" / ".skymagic" / "channels").iterdir())


@pytest.mark.needs("ray")
def test_another_client_of_ray_cannot_call_the_actors(
    on_ray: ray.Cluster, notebook_of_ray: Notebook, tmp_path: Path
) -> None:
    notebook_of_ray.run(f"%sky_pool lab {ray_pool(on_ray)}")
    notebook_of_ray.run("made = []; import os; value = ''")
    notebook_of_ray.run(SECRETS)
    key = notebook_of_ray.value("access.channel_key")
    (actor,) = on_ray("actors")
    command = [sys.executable, "-P", "-c", DRIVER + STRANGER, str(provider.DRIVER), on_ray.address]
    done = subprocess.run(
        [*command, actor, key, str(tmp_path / "ran")], capture_output=True, text=True, check=True
    )
    refused, allowed, others = json.loads(done.stdout.splitlines()[-1])
    replayed = refused.pop("replay")
    assert re.search(rf"{actor} .*\bbefore\b", replayed)
    assert [name for name, words in refused.items() if "answers only" not in words] == []
    assert allowed == ["True"] * 3
    assert others == []
    assert not (tmp_path / "ran").exists()
    assert seen(notebook_of_ray, "6 * 7") == [42]


@pytest.mark.needs("ray")
def test_a_node_of_ray_without_the_home_folder_is_trusted_once_and_said_so(
    on_ray: ray.Cluster, notebook_of_ray: Notebook
) -> None:
    notebook_of_ray.run("from skymagic.providers.channel_key import ChannelKey")
    notebook_of_ray.run("ChannelKey.share = lambda self: None")
    shown = notebook_of_ray.run(f"%sky_pool lab {ray_pool(on_ray)}").text
    assert shown.count(": trusted") == 1
    notebook_of_ray.run("%%sky_broadcast\nkept = 7")
    notebook_of_ray.restart()
    assert "attached" in notebook_of_ray.run("%load_ext skymagic\n%sky_attach lab").text
    assert seen(notebook_of_ray, "kept") == [7]


WINDOWS = """
def outcome(check, key, ticket):
    try:
        check.accept(key, ticket, "actor", "needed")
        return "yes"
    except PermissionError:
        return "no"

check, caller = driver.TicketCheck(), driver.Caller("key")
tickets = [caller.ticket("actor", "needed") for _ in range(5 * driver.WINDOW)]
said = [outcome(check, "key", tickets[0]), outcome(check, "key", tickets[-1])]
said += [outcome(check, "key", tickets[n]) for n in (1, -driver.WINDOW - 1, -driver.WINDOW, -2, -2, 0)]
for ticket in tickets[-driver.WINDOW + 1:-2]:
    assert outcome(check, "key", ticket) == "yes"
said += [outcome(check, "key", ticket) for ticket in (tickets[-5], driver.Caller("key").ticket("actor", "needed"))]
said += [outcome(driver.TicketCheck(), "", driver.Caller("").ticket("actor", "needed"))]
print(" ".join(said))
"""


@pytest.mark.needs("ray")
def test_each_ticket_is_good_for_one_call_though_calls_overtake_one_another() -> None:
    command = [sys.executable, "-P", "-c", DRIVER + WINDOWS, str(provider.DRIVER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == "yes yes no no yes yes no no no yes no".split()
