"""Pools over OpenSSH's own client, on a host that wants a one-time code: asked for once, in the cell, and never in the background."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.hosts import codes, loopback, masters, share_code
from tests.lab.notebook import opened
from tests.lab.shells import pip_settings

pytestmark = pytest.mark.needs("sshd", "root", "namespaces")
POOL = f"%sky_pool lab --provider ssh --hosts h1 --python {sys.executable}"
WORKING = "%%sky_broadcast\nimport time\nprint('at work', flush=True)\nwhile not os.path.exists(sign): time.sleep(0.05)\nprint('on')"


def test_one_time_code_is_requested_once(tmp_path: Path) -> None:
    """With a real sshd that accepts each code once, and OpenSSH's client with a shared master."""
    (tmp_path / "notebook").mkdir()
    with (
        codes(tmp_path / "codes", ["271828", "314159"]) as more,
        loopback(tmp_path / "hosts", 1, env=pip_settings(), **more) as hosts,
        masters(hosts) as env,
        opened(tmp_path / "notebook", env=env) as notebook,
    ):
        share_code(hosts[0].home)
        # nobody can be asked: nbconvert, papermill
        notebook.fail(POOL, "openssh-login")

        # once, for all connections of the pool, and for whoever attaches to it
        questions, shown = notebook.answering(POOL, "271828")
        assert [question.rpartition(") ")[2] for question in questions] == ["Password: "]
        assert "271828" not in str(shown.messages) + shown.text
        notebook.run("%%sky_broadcast\nimport os\nmine = 5")
        notebook.restart()
        notebook.run("%load_ext skymagic")
        notebook.run("%sky_attach lab")

        # the connection is lost under a cell, which goes on; the user opens another one in a terminal
        sign = tmp_path / "sign"
        notebook.run(f"sign = {str(sign)!r}")
        running = notebook.start(WORKING)
        notebook.watch(running, lambda cell: "at work" in cell.text)
        (master,) = [
            path
            for path in Path(env["XDG_RUNTIME_DIR"]).glob("skymagic-ssh-*/*")
            if path.suffix != ".lock"
        ]
        hosts[0].kill_sessions()
        askpass = tmp_path / "askpass"
        askpass.write_text("#!/bin/sh\necho 314159\n")
        askpass.chmod(0o700)
        asked = {**os.environ, "SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"}
        config = Path(env["HOME"]) / ".ssh" / "config"
        subprocess.run(
            ["ssh", "-F", str(config), "-fNM", "-S", str(master), "h1"], check=True, env=asked
        )
        sign.touch()
        assert notebook.finish(running).lines == ["at work", "on"]
        notebook.run("%%sky_broadcast -o seen\nmine")
        assert notebook.value("seen") == [5]
        notebook.run("%sky_down")
