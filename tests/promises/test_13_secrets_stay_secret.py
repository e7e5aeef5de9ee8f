"""Promise 13, and what DESIGN says of secrets: other users read nothing, and a secret is in no argument, file, output or log."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lab.hosts import loopback
from tests.lab.notebook import Notebook, opened, seen
from tests.lab.places import home_that_knows
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


def arguments() -> list[str]:
    """Return the arguments of all processes on this machine."""
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    return [argument for command in commands for argument in command or ()]


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
    assert not [argument for argument in arguments() if SECRET in argument]
    places = [Path(tempfile.gettempdir()).glob("skymagic*"), Path("/dev/shm").glob("skymagic*")]
    folders = [path for found in places for path in found]
    assert files_with(SECRET.encode(), *folders, site.folder) == []


def test_a_scripts_text_is_in_no_command_line(site: Site) -> None:
    notebook, word = site.notebook, f"word-{os.urandom(8).hex()}"
    # the last command would take the place of the shell, and of its arguments
    running = notebook.start(f"%%sky_sh\n: {word}\necho begun\nsleep 600\necho over")
    notebook.watch(running, lambda shown: "begun" in shown.text)
    exposed = [argument for argument in arguments() if word in argument]
    notebook.interrupt()
    notebook.finish(running)
    assert exposed == []


def test_folders_and_files_are_the_users_alone(site: Site) -> None:
    site.notebook.run("big_13 = b'x' * 3_000_000")
    seen(site.notebook, "len(big_13)")
    own_files = [*(site.folder / "state").rglob("*")]
    assert own_files, "the pool has a record"
    for place in (Path(tempfile.gettempdir()), Path("/dev/shm")):
        own_files += place.glob("skymagic*")
    open_to_others = [
        str(path)
        for path in own_files
        if path.stat().st_uid == os.getuid()
        and path.stat().st_mode & 0o077
        and not path.is_symlink()
    ]
    assert open_to_others == []


def test_secret_looking_variable_is_not_sent_by_default(site: Site) -> None:
    site.notebook.run("import os\nos.environ['LAB_API_KEY_13'] = 'not for them'")
    assert seen(site.notebook, "os.environ.get('LAB_API_KEY_13')") == [None, None]


@pytest.mark.needs("sshd")
def test_a_host_with_another_key_is_refused(tmp_path: Path) -> None:
    with loopback(tmp_path / "hosts", 2) as hosts:
        first, second = (line.split() for line in hosts.known_hosts.read_text().splitlines())
        lines = [[first[0], *second[1:]], [second[0], *first[1:]]]
        hosts.known_hosts.write_text("".join(f"{' '.join(line)}\n" for line in lines))
        home = home_that_knows(hosts, tmp_path / "client", fresh=True)
        with opened(tmp_path / "client", env={"HOME": str(home)}) as notebook:
            failure = notebook.fail("%sky_pool stranger --provider ssh --hosts h1")
            assert str(hosts.known_hosts) in failure.text
        assert [*hosts[0].home.iterdir()] == []
