"""docs/tutorials/ssh.md is a first run as it happens: its cells run in order on two hosts that nobody has logged in to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.test_readme import examples, follow
from tests.lab.distributions import own_environments
from tests.lab.hosts import loopback
from tests.lab.notebook import ROOT, opened
from tests.lab.shells import bootstrapped_home, pip_settings

__all__ = ["bootstrapped_home"]
PAGE = ROOT / "docs" / "tutorials" / "ssh.md"


@pytest.mark.needs("sshd")
def test_a_first_run(tmp_path: Path, bootstrapped_home: Path) -> None:
    with loopback(tmp_path / "hosts", env=pip_settings(), names=("gpu1", "gpu2")) as hosts:
        for host in hosts:
            own_environments(host.home, bootstrapped_home)
        ssh = tmp_path / "client" / ".ssh"
        ssh.mkdir(parents=True)
        shutil.copy(hosts.config, ssh / "config")
        keys = hosts.known_hosts.read_text()
        hosts.known_hosts.write_text("")
        (tmp_path / "notebook").mkdir()
        with opened(tmp_path / "notebook", env={"HOME": str(ssh.parent)}) as notebook:
            first, *others = examples(PAGE)
            error = follow(notebook, first)
            assert notebook.fields()["code"] == "hosts"
            assert notebook.fields()["names"] == ("gpu1", "gpu2")
            assert "ssh gpu2" in error
            hosts.known_hosts.write_text(keys)  # as two logins in a terminal do
            for example in others:
                follow(notebook, example)
