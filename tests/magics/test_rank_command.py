"""``%sky_shell``: a command on a rank's node."""

from __future__ import annotations

import _thread
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skymagic.errors import RequestError
from skymagic.magics import rank_command
from skymagic.magics.arguments.line_magics import parse_shell
from tests.lab.notebook import Notebook, opened


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(
        tmp_path_factory.mktemp("terminal"), "%sky_pool --ranks 2 --env GREETING=hello"
    ) as one:
        yield one


def test_what_stands_behind_the_options_is_the_command() -> None:
    request = parse_shell("--rank 1 --pool lab ls --rank -l 'a  b'")
    assert (str(request.ranks), request.pool, request.command) == (
        "1",
        "lab",
        "ls --rank -l 'a  b'",
    )
    assert parse_shell("--rank=3").command == ""
    with pytest.raises(RequestError, match="--rnk"):
        parse_shell("--rnk 3 ls")


def test_a_command_has_the_ranks_environment_and_folder_and_its_exit_code_is_said(
    notebook: Notebook,
) -> None:
    notebook.run(
        "%%sky_broadcast\nimport os\nos.makedirs('below', exist_ok=True)\nos.chdir('below')"
    )
    shown = notebook.run(
        "%sky_shell --rank 1 echo $RANK $LOCAL_RANK of $WORLD_SIZE $GREETING; pwd; which python; exit 3"
    )
    first, folder, python, end = shown.text.splitlines()
    assert first == "1 1 of 2 hello"
    assert Path(folder) == notebook.folder / "below"
    assert Path(python).parent == Path(sys.executable).parent
    assert re.fullmatch(r"\[rank 1 on \S+: exit code 3\]", end)


def test_it_runs_beside_a_cell_and_the_stop_button_ends_it_on_the_node(notebook: Notebook) -> None:
    cell = notebook.start(
        "%%sky_broadcast -a\nimport time\nwhile not os.path.exists('enough'): time.sleep(0.01)"
    )
    notebook.finish(cell)
    shown = notebook.start("%sky_shell --rank 0 echo $$; exec sleep 600")
    notebook.watch(shown, lambda one: "\n" in one.stdout)
    pid = int(shown.stdout)
    assert Path(f"/proc/{pid}").exists()
    notebook.interrupt()
    notebook.finish(shown)
    assert "SIGINT" in shown.text
    assert not Path(f"/proc/{pid}").exists()
    notebook.run("%sky_shell touch enough")


def test_the_stop_button_reaches_a_program_whose_output_is_being_shown(notebook: Notebook) -> None:
    shown = notebook.start("%sky_shell trap 'exit 7' INT; while :; do echo more; done")
    notebook.watch(shown, lambda one: "more" in one.stdout)
    notebook.interrupt()
    notebook.finish(shown)
    assert shown.error is None, shown.error
    assert "exit code 7" in shown.text


def test_wrong_ranks_and_no_command_are_refused(notebook: Notebook) -> None:
    assert "there is no rank 7" in notebook.fail("%sky_shell --rank 7 ls").text
    assert "one rank at a time" in notebook.fail("%sky_shell --rank 0,1 ls").text
    refused = notebook.fail("%sky_shell --rank 1").text
    assert "%sky_shell -t 1 nvidia-smi; for a prompt use a terminal of this machine" in refused


def test_a_stop_that_comes_just_before_the_wait_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`interrupt_main` notes a signal as one that comes then: its handler is to run, and nothing ends the wait."""

    class Node:
        written = b""

        def run(self, module: str) -> Node:
            return self

        def write(self, data: bytes) -> None:
            self.written += data

        def read(self) -> bytes:
            ended.wait(30)
            return b""

    ended, node = threading.Event(), Node()
    rank: Any = SimpleNamespace(pid=1, info={})
    agents: Any = SimpleNamespace(
        specs={0: (0, rank)}, nodes=[node], ranks={0: rank}, environment=lambda rank: {}
    )
    monkeypatch.setattr(rank_command, "INTERRUPT_TIMEOUT", 0.1)
    command = rank_command.RankCommand(agents, 0, "sleep 600")
    before = signal.signal(signal.SIGINT, lambda *_: command.interrupt())
    try:
        later = threading.Timer(0.1, _thread.interrupt_main)
        later.start()
        assert command.follow(lambda _: None) == -signal.SIGKILL
        assert b"InterruptCommand" in node.written
    finally:
        signal.signal(signal.SIGINT, before)
        ended.set()
        later.join()
