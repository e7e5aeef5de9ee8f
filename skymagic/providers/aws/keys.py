"""The keys of one pool: the user's, with which we log in, and the hosts', which we know before the first connection.

::

    keys = make(job)             # folder/key (0600), folder/known_hosts
    userdata.cloud_config(…)     # puts keys.host.private on the machines
    keys.endpoint(…)             # accepts that host key alone
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from skymagic.ssh.config import Endpoint
from skymagic.wire import atomic


@dataclass(frozen=True)
class KeyPair:
    """An ed25519 key in OpenSSH's formats; the private half is not shown."""

    private: str
    public: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"


@dataclass(frozen=True)
class PoolKeys:
    """Both keys of a pool.

    Attributes:
        folder: where the user's key and the known host key are; for this user alone.
        alias: the name under which the host key stands there. All machines of a launch have one key: they get the same user data.
    """

    folder: Path
    alias: str
    user: KeyPair
    host: KeyPair

    def endpoint(self, label: str, address: str, port: int, user: str, jump: tuple[Endpoint, ...] = ()) -> Endpoint:
        """How a machine is reached: with this key, and only if it shows that host key."""
        return Endpoint(
            label, address, port, user,
            identities=(str(self.folder / "key"),), identities_given=True, identities_only=True, agent=None,
            proxy_jump=jump, known_hosts=(str(self.folder / "known_hosts"),), host_key_alias=self.alias, strict="yes",
        )  # fmt: skip


def folder(job: str) -> Path:
    """Where the keys of a pool lie: in the user's state folder, so that a restarted notebook finds them."""
    from platformdirs import user_state_path

    return user_state_path("skymagic") / "keys" / job


def remove(job: str) -> None:
    """Delete the keys of a pool; twice is safe."""
    if job and Path(job).name == job:  # it may come from a tag
        shutil.rmtree(folder(job), ignore_errors=True)


def make(job: str) -> PoolKeys:
    """Fresh keys in a folder of their own."""
    at = folder(job)
    made = PoolKeys(at, job.lower(), generate("skymagic"), generate("skymagic host"))
    atomic.private_folder(at.parent)
    at.mkdir(mode=0o700)
    _write(at / "key", made.user.private)
    _write(at / "known_hosts", f"{made.alias} {made.host.public}\n")
    return made


def again(job: str) -> PoolKeys:
    """The keys of a pool that another notebook has made: the user's, and for machines to come another host key, known beside the first.

    Raises:
        OSError: they are not here.
    """
    from cryptography.hazmat.primitives import serialization as forms

    at = folder(job)
    private = (at / "key").read_text()
    key = forms.load_ssh_private_key(private.encode(), None)
    public = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    made = PoolKeys(at, job.lower(), KeyPair(private, f"{public.decode()} skymagic"), generate("skymagic host"))
    with (at / "known_hosts").open("a") as file:
        file.write(f"{made.alias} {made.host.public}\n")
    return made


def generate(comment: str) -> KeyPair:
    """A fresh key."""
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption())
    public = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    return KeyPair(private.decode(), f"{public.decode()} {comment}")


def _write(path: Path, text: str) -> None:
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
