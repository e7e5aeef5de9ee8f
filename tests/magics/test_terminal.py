"""``%sky_shell``: a command on a rank's node from a notebook, and a prompt there from IPython in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.errors import RequestError
from skymagic.magics.arguments.line_magics import parse_shell
from tests.lab.notebook import ROOT, Notebook, opened, own_folders


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("terminal"), "%sky_pool --ranks 2 --env GREETING=hello") as one:
        yield one


def test_what_stands_behind_the_options_is_the_command() -> None:
    request = parse_shell("--rank 1 --pool lab ls --rank -l 'a  b'")
    assert (str(request.ranks), request.pool, request.command) == ("1", "lab", "ls --rank -l 'a  b'")
    assert parse_shell("--rank=3").command == ""
    with pytest.raises(RequestError, match="--rnk"):
        parse_shell("--rnk 3 ls")


def test_a_command_has_the_ranks_environment_and_folder_and_its_exit_code_is_said(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nimport os\nos.makedirs('below', exist_ok=True)\nos.chdir('below')")
    shown = notebook.run(
        "%sky_shell --rank 1 echo $RANK $LOCAL_RANK of $WORLD_SIZE $GREETING; pwd; which python; exit 3"
    )
    first, folder, python, end = shown.text.splitlines()
    assert first == "1 1 of 2 hello"
    assert Path(folder) == notebook.folder / "below"
    assert Path(python).parent == Path(sys.executable).parent
    assert re.fullmatch(r"\[rank 1 on \S+: exit code 3\]", end)


def test_it_runs_beside_a_cell_and_the_stop_button_ends_it_on_the_node(notebook: Notebook) -> None:
    cell = notebook.start("%%sky_broadcast -a\nimport time\nwhile not os.path.exists('enough'): time.sleep(0.01)")
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


def test_ranks_that_there_are_not_and_a_prompt_without_a_terminal(notebook: Notebook) -> None:
    assert "there is no rank 7" in notebook.fail("%sky_shell --rank 7 ls").text
    assert "one rank at a time" in notebook.fail("%sky_shell --rank 0,1 ls").text
    assert (
        "on this machine in one of yours; here, one command: %sky_shell --rank 1 "
        in notebook.fail("%sky_shell --rank 1").text
    )


def test_a_prompt_in_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    env = {
        **os.environ,
        **own_folders(tmp_path),
        "PYTHONPATH": str(ROOT),
        "SHELL": "/bin/sh",
        "PS1": "there> ",
        "TERM": "dumb",
    }
    command = [
        sys.executable,
        "-m",
        "IPython",
        "--simple-prompt",
        "--no-banner",
        "--colors=NoColor",
        "--HistoryManager.enabled=False",
    ]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=env, start_new_session=True
    )
    os.close(theirs)
    said = ""

    def until(words: str) -> None:
        nonlocal said
        end = time.monotonic() + 60
        while words not in said:
            assert select.select([ours], [], [], max(0.0, end - time.monotonic()))[0], said
            said += os.read(ours, 4096).decode(errors="replace")
        said = said.partition(words)[2]

    def enter(line: str) -> None:
        os.write(ours, line.encode() + b"\n")

    try:
        until("In [1]: ")
        enter("%load_ext skymagic")
        until("In [2]: ")
        enter("_ = %sky_pool --ranks 2")
        until("In [3]: ")
        enter("%sky_shell --rank 1")
        until("there> ")
        # of one process group that has the terminal by then: between two commands Ctrl-C would reach the shell alone
        enter("sh -c 'echo rank-$RANK; exec sleep 600'")
        until("rank-1")
        os.write(ours, b"\x03")
        until("there> ")
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 41, 99, 0, 0))
        enter('until [ "$(stty size)" = "41 99" ]; do sleep 0.1; done; echo size-"$(stty size)"')
        until("size-41 99")
        until("there> ")
        enter("exit 4")
        until("exit code 4]")
        until("In [4]: ")
        enter("%sky_down")
        until("is stopped")
        until("In [5]: ")
        enter("exit")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
