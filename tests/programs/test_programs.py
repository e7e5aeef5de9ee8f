"""Programs in the shapes of other people's, which know nothing of skymagic: each file here is the text of a cell, unchanged."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.lab.notebook import Notebook, opened, seen

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)
needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is not installed"
)


def program(name: str) -> str:
    return (HERE / f"{name}.py").read_text()


def ran(notebook: Notebook, name: str) -> Any:
    """The values of a program's last expression, by rank."""
    return seen(notebook, program(name))


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("programs"), "%sky_pool --nodes 2 --plugin torch") as one:
        yield one


def test_a_function_that_forms_and_destroys_the_group(notebook: Notebook) -> None:
    for _ in range(2):
        (world, weight), (_, other) = ran(notebook, "tutorial_ddp")
        assert (world, weight) == (2, other)


@needs_accelerate
def test_a_state_that_is_made_before_the_accelerator(notebook: Notebook) -> None:
    first, second = ran(notebook, "accelerate_states")
    assert first["world"] == second["world"] == (2, 2)
    assert (first["mine"], second["mine"]) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert first["weights"] == second["weights"]


@needs_accelerate
def test_launchers_are_refused_with_an_alternative(
    notebook: Notebook,
) -> None:
    failed = notebook.fail(f"%%sky_broadcast\n{program('launched_from_a_cell')}")
    assert re.match(r"notebook_launcher\(\) .* 2 ranks", failed.evalue)
    assert "call train(…) itself" in failed.evalue
    shown = notebook.run("%%sky_broadcast --only all\nnotebook_launcher(train, (0.2,), 1)")
    assert shown.text.count("trained at 0.2") == 2, "one process is the rank itself"


def test_processes_without_the_cells_names_are_refused(notebook: Notebook) -> None:
    failed = notebook.fail(f"%%sky_broadcast\n{program('spawned')}")
    assert "call work() itself" in failed.evalue
    forked = "mp.start_processes(work, nprocs=1, start_method='fork')"
    assert "worked as 0" in notebook.run(f"%%sky_broadcast\n{forked}").text


def test_every_collective_takes_its_arguments_by_keyword(notebook: Notebook) -> None:
    from skymagic.plugins._torch.guard import COLLECTIVES

    first, second = ran(notebook, "by_keyword")
    assert set(COLLECTIVES) <= set(first["called"])
    assert first["left_out"] == second["left_out"] == {}


def test_sharded_model_is_pulled_whole(notebook: Notebook) -> None:
    (part, total), other = ran(notebook, "sharded")
    assert (part, other) == ([4, 4], [[4, 4], total])
    whole = "[[type(one).__name__ for one in (net[0].up.weight, rows)], round(net[0].up.weight.sum().item(), 5), rows.sum().item()]"
    for brings in ("%sky_pull model rows --head", "%%sky_broadcast -g model,rows --head\npass"):
        notebook.run(brings)
        assert notebook.value(f"(lambda net: {whole})(model)") == [
            ["Parameter", "Tensor"],
            total,
            28.0,
        ]
    notebook.run("%%sky_broadcast -o brought --head\n[model, optimizer]")
    assert notebook.value(
        "brought[1].param_groups[0]['params'][0] is next(brought[0].parameters())"
    )


def test_spawned_processes_have_the_cells_functions_and_classes(
    notebook: Notebook,
) -> None:
    notebook.run(f"%%sky_broadcast -t 0 -o made\n{program('spawned_pool')}")
    (made,) = notebook.value("made")
    assert made == {
        "spawn": [10, 20], "forkserver": [10, 20], "executor": [30], "subclass": [50], "loader": [0, 10, 20, 30],
    }  # fmt: skip


def test_remote_calls_meet_at_an_address_of_their_own(notebook: Notebook) -> None:
    assert ran(notebook, "remote_calls") == [1.0, 2.0]


def test_remote_calls_meet_at_an_address_that_the_program_sets(notebook: Notebook) -> None:
    for _ in range(2):  # the server of the first is gone, or is used again
        assert ran(notebook, "remote_calls_by_environment") == [1.0, 2.0]


def test_processes_of_a_cell_form_groups_of_their_own(notebook: Notebook) -> None:
    three = [(rank, rank, 3, 3.0) for rank in range(3)]
    two = [(rank, rank, 2, 1.0) for rank in range(2)]
    shown = notebook.run(f"%%sky_broadcast -o made --only all\n{program('tutorial_processes')}")
    assert notebook.value("made") == [([three, two], 2.0)] * 2
    assert shown.stderr == "", "nothing is said of the ranks' own group"
    notebook.run("%%sky_broadcast -o made -t 0\ntrained_by('spawn', 2)")
    assert notebook.value("made") == [two]


def test_ranks_with_one_port_raise_as_processes_do(notebook: Notebook) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    notebook.run(f"%%sky_broadcast\nimport os\nos.environ['ONE_PORT'] = '{port}'")
    began = time.monotonic()
    failed = notebook.fail(f"%%sky_broadcast --timeout 60\n{program('one_port')}")
    assert failed.ename == "ProcessRaisedException"
    # a process of the rank without the port may have joined the group of the other, which fails too
    assert re.search("EADDRINUSE|closed by peer|reset by peer|Connection refused", failed.text)
    assert time.monotonic() - began < 10, "plain processes take 0.1 s"
    notebook.run("%%sky_broadcast -o sums\ndist.all_reduce(own := torch.ones(1))\nown.item()")
    assert notebook.value("sums") == [2.0, 2.0], "the pool's own store is as it was"


@pytest.mark.parametrize("handler", ["signal.getsignal(number)", "signal.SIG_DFL"])
def test_program_with_own_signal_handlers_can_be_inspected(
    notebook: Notebook, handler: str
) -> None:
    """Lightning restores all handlers after a fit, and those that were set in C are then the system's own: deadly."""
    places = (
        "signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGCHLD}"
    )
    restored = f"for number in {places}:\n    signal.signal(number, {handler} or signal.SIG_DFL)"
    notebook.run("%%sky_broadcast\nimport ctypes, signal\nkept = 7")
    within = held_interpreter(notebook, restored)
    assert "native code" in within
    assert "line 4" not in within
    after = held_interpreter(notebook, "")
    assert "line 4 (native code" in after, "its handler is there again"
    notebook.run("%%sky_broadcast -o values\nkept")
    assert notebook.value("values") == [7, 7]


def held_interpreter(notebook: Notebook, before: str) -> str:
    """What %sky_stacks shows of ranks that wait in native code which keeps the interpreter, and go on afterwards."""
    gate = notebook.folder / "gate"
    os.mkfifo(gate)
    held = f"{before}\nprint('there')\nctypes.PyDLL(None).open({os.fsencode(gate)!r}, 0)"
    cell = notebook.run(f"%%sky_broadcast -a --only all\n{held}\nprint('done')")
    notebook.watch(cell, lambda shown: shown.stdout.count("there") == 2)
    shown = notebook.run("%sky_stacks").stdout
    gate.write_text("go")
    gate.unlink()
    notebook.watch(cell, lambda shown: shown.said.count("done") == 2)
    return shown
