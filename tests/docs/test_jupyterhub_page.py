"""docs/how-to/jupyterhub.md: its objects fit together, and a server that has only their rights makes a pool, is culled, and continues."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from skymagic.plan.units import duration
from tests.lab.kube import Kube, kube
from tests.lab.notebook import ROOT

PAGE = ROOT / "docs" / "how-to" / "jupyterhub.md"
TEXT = PAGE.read_text()
OBJECTS: list[Any] = [
    made
    for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    for made in yaml.safe_load_all(block)
]
ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
SERVER = """
import json, os, signal, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
for cell in json.loads(sys.argv[1]):
    if cell == "CULLED":
        os.kill(os.getpid(), signal.SIGKILL)
    if not shell.run_cell(cell).success:
        sys.exit(1)
"""
"""A user's server without a page: cells, and the culler."""


def of_kind(kind: str) -> Any:
    """The page's object of a kind."""
    (found,) = (made for made in OBJECTS if made.get("kind") == kind)
    return found


def allowed() -> set[tuple[str, str]]:
    """(resource, verb) of the page's Role."""
    return {
        (resource, verb)
        for rule in of_kind("Role")["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_objects_name_each_other() -> None:
    binding, account, role = of_kind("RoleBinding"), of_kind("ServiceAccount"), of_kind("Role")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (
        account["metadata"]["name"],
        account["metadata"]["namespace"],
    )
    (values,) = (made["singleuser"] for made in OBJECTS if "singleuser" in made)
    assert values["serviceAccountName"] == account["metadata"]["name"]
    assert values["extraPodConfig"]["automountServiceAccountToken"] is True
    assert len({made["metadata"]["namespace"] for made in OBJECTS if "kind" in made}) == 1


def test_the_role_is_that_of_the_page_on_kubernetes() -> None:
    other = (ROOT / "docs/how-to/kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(apiVersion: rbac.*?)```", other, re.DOTALL)
    assert yaml.safe_load(block)["rules"] == of_kind("Role")["rules"]


def test_idle_rules_are_settings() -> None:
    from skymagic.magics.config import SkyMagic

    rules = dict(re.findall(r'^c\.SkyMagic\.(\w+) = "(\w+)"$', TEXT, re.MULTILINE))
    assert set(rules) == {"idle", "max_lifetime"}
    assert all(duration(value) for value in rules.values())
    assert set(rules) <= set(SkyMagic.class_own_traits())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Kube]:
    """A cluster in which the servers' account has the rights of the page's Role, and no others."""
    rights = allowed()

    class Strict(Kube):
        def allows(self, verb: str, resource: str) -> bool:
            return resource == "selfsubjectaccessreviews" or (resource, verb) in rights

    with kube(tmp_path / "kube") as made:
        made.__class__ = Strict
        yield made


def served(cluster: Kube, folder: Path, *cells: str) -> subprocess.CompletedProcess[str]:
    """Cells in a server whose pod has the service account's files, and no kubeconfig."""
    config = yaml.safe_load(Path(cluster.env["KUBECONFIG"]).read_text())["clusters"][0]["cluster"]
    host, _, port = config["server"].removeprefix("https://").partition(":")
    (folder / "server.py").write_text(SERVER)
    script = f"""mount -t tmpfs run /run && mkdir -p {ACCOUNT} && cd {ACCOUNT} || exit
printf %s "$TOKEN" > token; printf %s lab > namespace; printf %s "$CA" | base64 -d > ca.crt
cd "$HOME" && exec {sys.executable} {folder}/server.py "$CELLS" """
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT),
            "TOKEN": cluster.token, "CA": config["certificate-authority-data"], "CELLS": json.dumps(cells),
            "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port,
        },
    )  # fmt: skip


@pytest.mark.needs("namespaces", "root")
def test_a_culled_server_leaves_its_pool_to_the_next_one(cluster: Kube, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    pool = f"%sky_pool train --provider kubernetes --nodes 2 --idle 30m --python {sys.executable}"
    cell = "%%sky_broadcast\nimport os\nweight = 10 * int(os.environ['RANK'])"
    first = served(cluster, home, "%load_ext skymagic", pool, cell, "CULLED")
    assert "ready in" in first.stdout, first.stdout + first.stderr
    assert first.returncode == -9
    assert len(cluster.pods()) == 2
    shown = "%%sky_broadcast --only all\nprint('weight', weight)"
    second = served(
        cluster, home, "%load_ext skymagic", "%sky_attach train", shown, "%sky_down train"
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert "[0] weight 0" in second.stdout
    assert "[1] weight 10" in second.stdout
    cluster.wait(lambda: not cluster.left())
    used = {(resource, verb) for verb, resource in cluster.requests}
    assert used - {("selfsubjectaccessreviews", "create"), ("version", "get")} <= allowed()
