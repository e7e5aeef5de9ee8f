"""Which node may have a session, by what it claims and what was known of it before."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from skymagic.providers import channel_key
from skymagic.providers.channel_key import MARK_SEEN, ChannelKey
from skymagic.ssh.sealed import UntrustedHost
from skymagic.wire import sealed
from tests.lab.golden import Golden
from tests.lab.raising import raises

SEEN = "fingerprint of the session"
JOB = "lab-0123abcd"


class Home:
    """The home folder of the notebook's side."""

    def __init__(self, path: Path) -> None:
        self.folder = path / ".skymagic" / "channels" / JOB
        self._env = {"PATH": os.environ["PATH"], "HOME": str(path)}

    def run(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, input=text, env=self._env, capture_output=True, text=True, check=False
        )

    def holder_sees(self) -> None:
        """What a holder does on a node that shares it."""
        script = MARK_SEEN.replace("@JOB@", JOB)
        self.run("sh", "-c", f"dir=/tmp/skymagic-holder-{JOB}-n1\n{script}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(channel_key, "MARK_TIMEOUT", 0.0)
    return Home(tmp_path)


@pytest.fixture
def key(home: Home) -> ChannelKey:
    made = ChannelKey(JOB, home.run)
    made.share()
    return made


def proven(key: ChannelKey, knows: str) -> dict[str, str]:
    return {"knows": knows, "proof": sealed.proof(key.secret, sealed.NODE, SEEN)}


NOTHING = {"knows": sealed.NONE, "problem": ""}


def test_the_key_is_private_and_removed_at_the_end(home: Home, key: ChannelKey) -> None:
    assert (home.folder / "key").read_text() == key.secret
    assert (home.folder / "key").stat().st_mode & 0o777 == 0o600
    assert home.folder.stat().st_mode & 0o777 == 0o700
    key.drop()
    key.drop()
    assert not home.folder.exists()


@pytest.mark.parametrize("knows", [sealed.SHARED, sealed.STORED])
def test_a_node_that_knows_the_key(key: ChannelKey, knows: str) -> None:
    answer = key.check("n1", proven(key, knows), SEEN)
    assert answer == {"proof": sealed.proof(key.secret, sealed.NOTEBOOK, SEEN)}
    assert not key.unverified


@pytest.mark.parametrize("proof", ["", "0" * 64, "é"])
@pytest.mark.parametrize("knows", [sealed.SHARED, sealed.STORED, "something new"])
def test_a_wrong_proof_is_refused(key: ChannelKey, knows: str, proof: str) -> None:
    with raises(UntrustedHost, "channel-untrusted", f"%sky_down {JOB}"):
        key.check("n1", {"knows": knows, "proof": proof}, SEEN)


def test_proof_of_another_session_or_role_is_refused(key: ChannelKey) -> None:
    for shown in (
        sealed.proof(key.secret, sealed.NODE, "another session"),
        sealed.proof(key.secret, sealed.NOTEBOOK, SEEN),
    ):
        with pytest.raises(UntrustedHost):
            key.check("n1", {"knows": sealed.SHARED, "proof": shown}, SEEN)


def test_a_node_without_the_folder_is_trusted_once(golden: Golden, key: ChannelKey) -> None:
    assert key.check("n1", NOTHING, SEEN)["key"] == key.secret
    key.accepted("n1")
    key.accepted("n1")
    assert key.unverified == {"n1"}
    with golden.raises(UntrustedHost):
        key.check("n1", NOTHING, SEEN)
    assert key.check("n2", NOTHING, SEEN)["key"] == key.secret


def test_a_first_session_that_breaks_is_repeated(key: ChannelKey) -> None:
    for _ in range(2):
        assert key.check("n1", NOTHING, SEEN)["key"] == key.secret


def test_unproven_node_is_refused_if_a_holder_sees_the_folder(home: Home, key: ChannelKey) -> None:
    home.holder_sees()
    with pytest.raises(UntrustedHost):
        key.check("n1", NOTHING, SEEN)


def test_unproven_node_is_refused_if_another_has_proven_itself(key: ChannelKey) -> None:
    key.check("n1", proven(key, sealed.SHARED), SEEN)
    with pytest.raises(UntrustedHost):
        key.check("n2", NOTHING, SEEN)


def test_attaching_notebook_refuses_unproven_nodes(home: Home, key: ChannelKey) -> None:
    attached = ChannelKey(JOB, home.run, key.secret)
    with pytest.raises(UntrustedHost):
        attached.check("n1", NOTHING, SEEN)
    attached.check("n1", proven(key, sealed.STORED), SEEN)


def test_nodes_of_a_new_job_are_new(key: ChannelKey) -> None:
    key.check("n1", NOTHING, SEEN)
    key.accepted("n1")
    key.renew()
    assert key.check("n1", NOTHING, SEEN)["key"] == key.secret


def test_a_file_that_cannot_be_used_is_named(golden: Golden, key: ChannelKey) -> None:
    claim = {"knows": sealed.NONE, "problem": "/home/me/key: /home/me/key is open to other users"}
    with golden.raises(UntrustedHost):
        key.check("n1", claim, SEEN)


def test_unwritable_home_means_trust_on_first_use(home: Home) -> None:
    home.folder.parent.parent.touch()
    key = ChannelKey(JOB, home.run)
    key.share()
    assert key.check("n1", NOTHING, SEEN)["key"] == key.secret
