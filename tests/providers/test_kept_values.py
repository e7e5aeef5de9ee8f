"""Whether hosts keep large values on their disks is the user's to say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lab.waiting import until
from tests.providers.test_ssh_pools import lab

pytestmark = pytest.mark.needs("sshd")
POOL = f"%sky_pool {{}} --provider ssh --hosts h1 --python {sys.executable}"


def test_values_are_kept_unless_it_is_switched_off(tmp_path: Path) -> None:
    """Two pools on one host: the first one's value has been there for longer when the second one's is kept."""
    with lab(tmp_path, 1) as (hosts, notebook):
        notebook.run("%config SkyMagic.keep_values = False")
        notebook.run(POOL.format("none"))
        notebook.run("big = bytes(3_000_000)")
        notebook.run("%%sky_broadcast --pool none\nlen(big)")
        notebook.run("%config SkyMagic.keep_values = True")
        notebook.run(POOL.format("some"))
        notebook.run("other = b'1' * 2_000_000")
        notebook.run("%%sky_broadcast --pool some\nlen(other)")
        values = next(iter(hosts)).home / ".skymagic" / "values"
        until(lambda: values.exists() and any(len(path.name) == 32 for path in values.iterdir()))
        assert {path.read_bytes()[:1] for path in values.iterdir()} == {b"1"}
