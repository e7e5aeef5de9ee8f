"""Pools as tools of a coding agent: `skymagic mcp`, spoken to by the protocol's own client over standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from skymagic.api import logs
from skymagic.wire import queries
from tests.lab.desk import COMMAND, Desk, nothing_left
from tests.lab.notebook import ROOT, opened

mcp = pytest.importorskip("mcp")

SECRET = "sesame-opens-nothing"
"""A pool's secret, which only its ranks and its notebook know."""
HELD = "%sky_pool held --ranks 2 --detach"
HANGS = "%%sky_broadcast\nimport time\ndef wait():\n    print('begun', flush=True)\n    time.sleep(600)\nwait()"


class Agent:
    """A client of a server process, with its answers.

    Args:
        env: environment of the server.
        folder: its working folder.
    """

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        words = [*COMMAND[1:], "mcp"]
        self._server = mcp.StdioServerParameters(
            command=sys.executable,
            args=words,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            cwd=str(folder),
        )

    def call(self, tool: str, /, **arguments: object) -> dict[str, Any]:
        """Call a tool that succeeds; its result."""
        answer = self._asked(tool, arguments)
        assert not answer.is_error, answer.content[0].text
        result: dict[str, Any] = json.loads(answer.content[0].text)
        return result

    def fail(self, tool: str, /, **arguments: object) -> str:
        """Call a tool that fails; what it says."""
        answer = self._asked(tool, arguments)
        assert answer.is_error, answer.content[0].text
        return str(answer.content[0].text)

    def tools(self) -> dict[str, Any]:
        """The tools that the server lists, by name."""

        async def listed() -> Any:
            async with mcp.Client(self._server) as client:
                return await client.list_tools()

        return {tool.name: tool for tool in asyncio.run(listed()).tools}

    def _asked(self, name: str, arguments: dict[str, object]) -> Any:
        async def asked() -> Any:
            async with mcp.Client(self._server, read_timeout_seconds=90) as client:
                return await client.call_tool(name, arguments)

        return asyncio.run(asked())


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A pool of two ranks whose notebook is gone, made with a secret."""
    folder = tmp_path_factory.mktemp("agent")
    name = f"lab{os.urandom(4).hex()}"
    env = {"XDG_STATE_HOME": str(folder / "state"), "IPYTHONDIR": str(folder / ".ipython")}
    made = f"%sky_pool {name} --ranks 2 --detach --secret LAB_PHRASE"
    with nothing_left(env):
        (folder / "first").mkdir()
        with opened(folder / "first", made, env={**env, "LAB_PHRASE": SECRET}):
            pass
        desk = Desk(folder, made, env)
        yield desk
        desk.ran("down", name)


@pytest.fixture(scope="module")
def agent(desk: Desk) -> Agent:
    return Agent(desk.env, desk.folder)


def test_tools_say_what_they_change(agent: Agent) -> None:
    tools = agent.tools()
    assert set(tools) == {"pools", "status", "logs", "stacks", "run_cell", "put", "get", "down"}
    reading = {name for name, tool in tools.items() if tool.annotations.read_only_hint}
    assert reading == {"pools", "status", "logs", "stacks"}
    assert all(tool.description for tool in tools.values())
    assert all("confirm" in tools[name].input_schema["properties"] for name in set(tools) - reading)


def test_a_cell_returns_output_and_values(agent: Agent, desk: Desk) -> None:
    source = "import os\nrank = int(os.environ['RANK'])\nprint('hello from', rank)\nrank * 10"
    answer = agent.call("run_cell", pool=desk.pool, source=source, show="all")
    assert sorted(answer["output"].splitlines()) == ["[0] hello from 0", "[1] hello from 1"]
    assert answer["values"] == {"0": "0", "1": "10"}
    again = agent.call("run_cell", pool=desk.pool, source="rank + 1", ranks="1")
    assert again["values"] == {"1": "2"}, "variables stay on the ranks"
    (listed,) = agent.call("pools")["pools"]
    assert listed["left"], "the pool is free for the next notebook"


def test_a_failed_cell_has_the_ranks_traceback(agent: Agent, desk: Desk) -> None:
    source = "print('before')\nif rank == 1:\n    raise ValueError('planted')"
    said = agent.fail("run_cell", pool=desk.pool, source=source)
    assert "[rank-raised]" in said
    assert "ValueError: planted" in said
    assert "----> 3" in said or "raise ValueError('planted')" in said
    assert "before" in said


def test_a_cell_that_takes_too_long_is_stopped(agent: Agent, desk: Desk) -> None:
    said = agent.fail("run_cell", pool=desk.pool, source="import time\ntime.sleep(600)", timeout=1)
    assert "RunTimeout" in said


def test_logs_and_status_are_those_of_json(agent: Agent, desk: Desk) -> None:
    agent.call("run_cell", pool=desk.pool, source="print('logged', rank)", show="all")
    code, out, _ = desk.ran("logs", desk.pool, "--grep", "logged", "--json")
    assert code == 0
    assert agent.call("logs", pool=desk.pool, grep="logged") == json.loads(out)
    (pool,) = agent.call("status", name=desk.pool)["pools"]
    assert pool["name"] == desk.pool


def test_no_answer_has_a_secret(agent: Agent, desk: Desk) -> None:
    source = "import os\nprint(os.environ['LAB_PHRASE'])\nos.environ['LAB_PHRASE']"
    answer = agent.call("run_cell", pool=desk.pool, source=source)
    assert SECRET not in json.dumps(answer)
    assert "****" in answer["output"]
    said = agent.fail(
        "run_cell", pool=desk.pool, source="raise ValueError(os.environ['LAB_PHRASE'])"
    )
    assert SECRET not in said


def test_files_go_there_and_back(agent: Agent, desk: Desk) -> None:
    (desk.folder / "data.txt").write_text("rows")
    assert "confirm" in agent.fail("put", pool=desk.pool, source="data.txt", target="sent.txt")
    assert not (desk.folder / "sent.txt").exists()
    agent.call("put", pool=desk.pool, source="data.txt", target="sent.txt", confirm=desk.pool)
    agent.call("get", pool=desk.pool, source="sent.txt", target="back.txt")
    assert (desk.folder / "back.txt").read_text() == "rows"
    (desk.folder / "back.txt").write_text("mine")
    said = agent.fail("get", pool=desk.pool, source="sent.txt", target="back.txt")
    assert "replaces back.txt" in said
    assert (desk.folder / "back.txt").read_text() == "mine"


def test_stacks_of_a_pool_that_a_notebook_uses(agent: Agent, desk: Desk) -> None:
    (desk.folder / "second").mkdir()
    with opened(desk.folder / "second", HELD, env=desk.env) as notebook:
        cell = notebook.start(HANGS)
        notebook.watch(cell, lambda shown: "begun" in shown.stdout)
        answer = agent.call("stacks", pool="held")
        assert {rank["state"] for rank in answer["ranks"].values()} == {"running"}
        assert answer["ranks"]["0"]["frames"][-1]["function"] == "wait"
        assert "in wait, line" in answer["text"]
        code, out, _ = desk.ran("stacks", "held", "-t", "1", "--json")
        assert (code, list(json.loads(out)["ranks"])) == (0, ["1"])
        said = agent.fail("run_cell", pool="held", source="1")
        assert "[pool-held]" in said
        said = agent.fail("run_cell", pool="held", source="1", take_over=True)
        assert "confirm" in said
        notebook.interrupt()
        notebook.finish(cell)
        assert agent.call("stacks", pool="held")["ranks"]["0"]["state"] == "idle"
        notebook.run("%sky_down held")


def test_a_reader_can_ask_for_stacks_and_nothing_else(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", desk.env["XDG_STATE_HOME"])
    refused: tuple[queries.Query[Any], ...] = (
        queries.INTERRUPT,
        queries.RELEASE,
        queries.RESCAN,
        queries.VARIABLES,
    )
    with closing(logs.open_reader(desk.pool)) as reader:
        for changing in refused:
            assert reader.agents.ask([0, 1], changing, timeout=0.5) == {}
        assert set(reader.agents.ask([0, 1], queries.STACK, timeout=30)) == {0, 1}


def test_down_wants_the_name_twice(agent: Agent, desk: Desk) -> None:
    assert f"confirm='{desk.pool}'" in agent.fail("down", name=desk.pool)
    assert "confirm" in agent.fail("down", name=desk.pool, confirm="yes")
    assert len(agent.call("pools")["pools"]) == 1
    agent.call("down", name=desk.pool, confirm=desk.pool)
    assert agent.call("pools") == {"pools": []}


def test_without_the_package_the_command_says_what_to_install(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "mcp.py").write_text("raise ImportError('planted')")
    process = desk.program("mcp", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert "pip install 'skymagic[mcp]'" in err
