"""What ssh itself would not trust: a configuration that others can write."""

from __future__ import annotations

from pathlib import Path

import pytest

from skymagic.errors import RequestError
from skymagic.ssh.config import SshConfig
from skymagic.ssh.hostlist import HostSpec
from tests.lab.golden import Golden


@pytest.mark.parametrize("name", ["config", "more"])
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_configuration_that_others_can_write(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int
) -> None:
    """They could choose the ProxyCommand that runs here; included files count too."""
    folder = tmp_path / ".ssh"
    folder.mkdir()
    (folder / "config").write_text("Include more\n")
    (folder / "more").write_text("Host h1\n  Hostname 127.0.0.9\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SshConfig().endpoint(HostSpec("h1", "h1")).hostname == "127.0.0.9"
    (folder / name).chmod(mode)
    with golden.raises(RequestError):
        SshConfig()
