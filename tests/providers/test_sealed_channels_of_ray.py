"""Who listens to Ray learns nothing of a pool's secrets, and who calls its actors is refused."""

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
from tests.lab.notebook import Notebook, opened, seen
from tests.lab.ray import Cluster, lent
from tests.providers.test_sealed_channels import SECRETS, never_heard


@pytest.fixture
def on_ray() -> Iterator[Cluster]:
    with lent() as made:
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


def ray_pool(on_ray: Cluster) -> str:
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
def test_eavesdropper_on_ray_learns_no_secret(
    on_ray: Cluster, notebook_of_ray: Notebook, tmp_path: Path
) -> None:
    never_heard(notebook_of_ray, ray_pool(on_ray), tmp_path)
    notebook_of_ray.run("%sky_down")
    assert not list((tmp_path / "home" / ".skymagic" / "channels").iterdir())


@pytest.mark.needs("ray")
def test_another_client_of_ray_cannot_call_the_actors(
    on_ray: Cluster, notebook_of_ray: Notebook, tmp_path: Path
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
def test_ray_node_without_shared_home_is_trusted_once(
    on_ray: Cluster, notebook_of_ray: Notebook
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
def test_ticket_is_valid_once_even_if_calls_overtake_each_other() -> None:
    command = [sys.executable, "-P", "-c", DRIVER + WINDOWS, str(provider.DRIVER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == "yes yes no no yes yes no no no yes no".split()
