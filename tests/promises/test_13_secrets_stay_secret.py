"""Promise 13, and what DESIGN says of secrets: other users read nothing, and a secret is in no argument, file, output or log."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lab.notebook import Notebook, seen
from tests.lab.sites import Site

SECRET = f"secret-{os.urandom(8).hex()}"


@pytest.fixture
def secretive(site: Site) -> Iterator[Notebook]:
    """A notebook with a pool that has been given a secret."""
    options = site.place.options
    with site.another(site.place.before, env={"LAB_SECRET_13": SECRET}) as notebook:
        notebook.run(f"%sky_pool secretive {options} --secret LAB_SECRET_13")
        yield notebook
        notebook.run("%sky_down --all")


def files_with(word: bytes, *folders: Path) -> list[str]:
    """Files below these folders that contain the word."""
    return [
        str(path)
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and word in path.read_bytes()
    ]


def test_a_secret_reaches_the_ranks_and_nothing_else(secretive: Notebook, site: Site) -> None:
    assert (
        seen(
            secretive, f"import os\nos.environ['LAB_SECRET_13'] == '{SECRET[:9]}' + '{SECRET[9:]}'"
        )
        == [True] * 2
    )
    shown = [
        secretive.run(cell)
        for cell in (
            "%sky_status",
            "import skymagic as sky\nprint(repr(sky.find('secretive')))\nsky.find('secretive')",
            "%sky_pool secretive --dry-run " + site.place.options + " --secret LAB_SECRET_13",
            "%sky_logs",
        )
    ]
    assert not [each for each in shown if SECRET in json.dumps(each.outputs)]
    arguments = [
        word for one in psutil.process_iter(["cmdline"]) for word in one.info["cmdline"] or ()
    ]
    assert not [word for word in arguments if SECRET in word]
    places = [Path(tempfile.gettempdir()).glob("skymagic*"), Path("/dev/shm").glob("skymagic*")]
    folders = [path for found in places for path in found]
    assert files_with(SECRET.encode(), *folders, site.folder) == []


def test_folders_and_files_are_the_users_alone(site: Site) -> None:
    site.notebook.run("big_13 = b'x' * 3_000_000")
    seen(site.notebook, "len(big_13)")
    open_to_others = [
        str(path)
        for place in (Path(tempfile.gettempdir()), Path("/dev/shm"))
        for path in place.glob("skymagic*")
        if path.stat().st_uid == os.getuid()
        and path.stat().st_mode & 0o077
        and not path.is_symlink()
    ]
    assert open_to_others == []


def test_a_variable_that_looks_like_a_secret_does_not_travel_unasked(site: Site) -> None:
    site.notebook.run("import os\nos.environ['LAB_API_KEY_13'] = 'not for them'")
    assert seen(site.notebook, "os.environ.get('LAB_API_KEY_13')") == [None, None]
