"""A notebook without a browser: its cells run in a real kernel, and what they show comes back."""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from jupyter_client.session import Session

from tests.durations import CLOCK
from tests.lab import kernels

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 90.0  # seconds without any news from the kernel; then it hangs
DUMP_TIMEOUT = 10.0
"""Seconds that a kernel which hangs has to say where."""
ATTEMPTS = 3
"""Jupyter chooses a kernel's ports before the kernel takes them; meanwhile another process may have one, and the kernel ends at once."""
PATIENCE = 60.0
"""Seconds that a kernel has to end its pools and itself; Jupyter's 5, half of them before a SIGTERM, are few on a busy machine."""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Failed:
    """The error that a cell ended with; `text` is what the user reads of it, without colours."""

    ename: str
    evalue: str
    text: str


@dataclass
class Shown:
    """What one cell shows, as it stands now: Jupyter's outputs, text of one stream in a row joined."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    messages: list[tuple[str, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """(kind, metadata, content) of the messages that they came in."""
    error: Failed | None = None
    done: bool = False
    _clear: bool = False

    def _text(self, *names: str) -> str:
        return "".join(
            o["text"] for o in self.outputs if o["kind"] == "stream" and o["name"] in names
        )

    @property
    def failure(self) -> Failed:
        """Its error; fails where it has none."""
        assert self.error is not None, f"no error, but {self.outputs}"
        return self.error

    @property
    def stdout(self) -> str:
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        return self._text("stderr")

    @property
    def text(self) -> str:
        """Both streams as they follow each other on the screen."""
        return self._text("stdout", "stderr")

    @property
    def said(self) -> str:
        """All that stands on the screen as plain text: what took longer was a display that changed."""
        plain = (
            o["text"] if o["kind"] == "stream" else o.get("data", {}).get("text/plain", "")
            for o in self.outputs
        )
        return "\n".join(filter(None, (text.rstrip("\n") for text in plain)))

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()

    @property
    def rich(self) -> list[dict[str, str]]:
        """The bundles of what was displayed: MIME type -> data."""
        return [o["data"] for o in self.outputs if o["kind"] in ("display_data", "execute_result")]

    @property
    def standstill(self) -> str:
        """The note that nothing changes on the ranks; "" where there is none or it was withdrawn."""
        notes = [data.get("text/plain", "") for data in self.rich]
        return next((note for note in notes if note.startswith("no progress")), "")

    @property
    def kinds(self) -> list[str]:
        """The order of outputs on the screen: stdout, stderr, display_data, execute_result, error."""
        return [o["name"] if o["kind"] == "stream" else o["kind"] for o in self.outputs]

    def add(self, kind: str, content: dict[str, Any]) -> None:
        """Take one message, as a front end does."""
        if kind == "clear_output":
            self._clear = bool(content["wait"])
            self.outputs = self.outputs if self._clear else []
            return
        if self._clear:
            self._clear, self.outputs = False, []
        last = self.outputs[-1] if self.outputs else {}
        if kind == "stream" and (last.get("kind"), last.get("name")) == ("stream", content["name"]):
            last["text"] += content["text"]
        elif kind == "update_display_data":
            for output in self.outputs:
                if (
                    output.get("transient", {}).get("display_id")
                    == content["transient"]["display_id"]
                ):
                    output["data"] = content["data"]
        else:
            self.outputs.append({"kind": kind, **content})


OUTPUTS = {
    "stream",
    "display_data",
    "update_display_data",
    "execute_result",
    "clear_output",
    "error",
}


class ForkedProvisioner(LocalProvisioner):
    """Has kernels forked from a process with their imports done (`kernels`)."""

    NAME = "skymagic-forked"

    async def launch_kernel(self, cmd: list[str], **options: Any) -> KernelConnectionInfo:
        """Fork one, or start an interpreter where it needs its own."""
        kernel = kernels.PARENT.fork(cmd, str(options["cwd"]), options["env"])
        if kernel is None:
            return await super().launch_kernel(cmd, **options)
        self.process = kernel  # type: ignore[assignment]  # what Jupyter uses of a Popen
        self.cwd = options["cwd"]
        self.pid = self.pgid = kernel.pid
        return self.connection_info


def _launched(
    cwd: str, env: dict[str, str], options: list[str], fresh: bool
) -> tuple[KernelManager, BlockingKernelClient]:
    manager = KernelManager(kernel_name="python3", shutdown_wait_time=PATIENCE)
    if not fresh:
        factory = KernelProvisionerFactory.instance(parent=manager.parent)
        name, where = ForkedProvisioner.NAME, f"{__name__}:{ForkedProvisioner.__name__}"
        factory.provisioners[name] = EntryPoint(name, where, factory.GROUP_NAME)
        assert manager.kernel_spec is not None
        manager.kernel_spec.metadata["kernel_provisioner"] = {"provisioner_name": name}
    manager.start_kernel(cwd=cwd, env=env, extra_arguments=options)
    client: BlockingKernelClient = manager.client()
    client.start_channels()
    return manager, client


class Notebook:
    """Owns a kernel, in a folder of its own.

    Args:
        folder: where the notebook lies: the kernel's working directory.
        env: what the kernel's environment has besides this process's own.
        view_after: ``SkyMagic.view_after``: on a busy machine any cell may take the second after which it gets a line.
        watched: whether somebody could be asked something, as in a front end; where nobody is, nothing moves.
        wait: whether its kernel is to be ready; else it starts meanwhile, and `wait_until_ready` is called later.
        fresh: whether its kernel is started as an interpreter that has imported nothing yet; else it is forked.
    """

    def __init__(
        self,
        folder: Path,
        env: dict[str, str] | None = None,
        *,
        view_after: float = 600.0,
        watched: bool = False,
        wait: bool = True,
        fresh: bool = False,
    ) -> None:
        self.folder = folder
        self.watched = watched
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        # the history's journal comes and goes, and would be counted among the descriptors
        options = [
            "--IPKernelApp.log_level=50",
            "--HistoryManager.hist_file=:memory:",
            f"--SkyMagic.view_after={view_after}",
        ]
        own = {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **own_folders(folder), **(env or {})}
        own_interpreter = fresh or bool(kernels.at_birth(env or {}))
        self._launch = partial(
            _launched, str(folder), {**os.environ, **own}, options, own_interpreter
        )
        self._manager, self._client = self._launch()
        self._ended = False
        self._cells: dict[str, Shown] = {}
        self.widgets: dict[str, dict[str, Any]] = {}
        """The state of each widget that there is, by its id."""
        self._replies: dict[str, dict[str, Any]] = {}
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait for its kernel, and take the number of its process."""
        for left in reversed(range(ATTEMPTS)):
            try:
                self._client.wait_for_ready(timeout=DEADLINE)
                break
            except RuntimeError:
                if not left:  # its process may live on: a port of one of its channels had been taken meanwhile
                    raise
            self.close()
            self._manager, self._client = self._launch()
        self.pid = int(self.value("__import__('os').getpid()"))

    # -- cells ---------------------------------------------------------------------------------------------------

    def start(self, source: str, *, answering: bool = False, watched: bool = False) -> Shown:
        """Send a cell; what it shows is filled in by `watch` and `finish`. With `answering` it may ask: see `answer`."""
        assert not self._ended, "its kernel hung in an earlier cell, and was ended"
        shown, watched = Shown(), watched or self.watched
        allow = answering or watched
        content = {
            "code": source, "silent": False, "store_history": True, "user_expressions": {},
            "allow_stdin": allow, "stop_on_error": False,
        }  # fmt: skip
        cell = {"cellId": "a-cell"} if watched else {}
        request = self._client.session.msg("execute_request", content, metadata=cell)
        self._cells[request["header"]["msg_id"]] = shown
        self._client.shell_channel.send(request)
        return shown

    def answer(self, text: str) -> str:
        """Type a line where a cell that is `answering` asks for one; what it has asked."""
        prompt = str(self._client.get_stdin_msg(timeout=DEADLINE)["content"]["prompt"])
        self._client.input(text)
        return prompt

    def watch(self, shown: Shown, until: Callable[[Shown], bool]) -> Shown:
        """Wait until a cell shows what is asked for; fails when it has failed, or nothing new comes for DEADLINE seconds."""
        try:
            while not until(shown):
                assert not (shown.done and self._has_failed(shown)), (
                    f"it has failed:\n{shown.text}\n{shown.error}"
                )
                self._take(self._client.get_iopub_msg(timeout=DEADLINE))
        except Empty:
            if not shown.done:
                self._tell_where()
            over = "it is over, and has not shown that" if shown.done else "nothing more came after"
            raise AssertionError(f"{over}:\n{shown.text}\n{shown.error}") from None
        except pytest.fail.Exception:  # the time of the test is over
            self._tell_where()
            print(f"what the cell has shown: {shown.text}\n{shown.error}", file=sys.stderr)
            raise
        return shown

    def _tell_where(self) -> None:
        """Have a kernel that hangs write the stacks of its threads to standard error, and end."""
        self._ended = True
        with suppress(psutil.Error, AttributeError):
            kernel = psutil.Process(getattr(self._manager.provisioner, "pid", self.pid))
            kernel.send_signal(signal.SIGABRT)
            psutil.wait_procs([kernel], timeout=DUMP_TIMEOUT)

    def rest(self, shown: Shown) -> Shown:
        """What a kernel that was killed has sent before: what it had under way comes at once."""
        with suppress(Empty):
            while True:
                self._take(self._client.get_iopub_msg(timeout=0.5))
        return shown

    def _take(self, message: dict[str, Any]) -> None:
        shown = self._cells.get(message["parent_header"].get("msg_id", ""))
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_open":
            self.widgets[content["comm_id"]] = dict(content["data"]["state"])
        if kind == "comm_msg" and content["comm_id"] in self.widgets:
            self.widgets[content["comm_id"]] |= content["data"].get("state", {})
        if kind == "comm_close":
            self.widgets.pop(content["comm_id"], None)
        if kind == "update_display_data":  # of any cell, as a front end does
            for cell in self._cells.values():
                cell.add(kind, dict(content))
        if shown is None:
            return
        if kind in OUTPUTS - {"update_display_data"}:
            shown.messages.append((kind, dict(message["metadata"]), dict(content)))
            shown.add(kind, dict(content))
        if kind == "error":
            text = ANSI.sub("", "\n".join(content["traceback"]))
            shown.error = Failed(content["ename"], content["evalue"], text)
        if kind == "status" and content["execution_state"] == "idle":
            shown.done = True

    def finish(self, shown: Shown) -> Shown:
        """Wait for the end of a cell, and look whether it failed."""
        self.watch(shown, lambda cell: cell.done)
        reply = self._reply_to(shown)
        if (
            reply["status"] == "error" and shown.error is None
        ):  # misuse is a line of stderr, not a traceback
            shown.error = Failed(reply["ename"], reply["evalue"], shown.stderr)
        assert reply["status"] == ("ok" if shown.error is None else "error")
        return shown

    def _has_failed(self, shown: Shown) -> bool:
        """Whether a cell that is over has failed; misuse is a line of stderr, not a traceback."""
        return self._reply_to(shown)["status"] == "error"

    def _reply_to(self, shown: Shown) -> dict[str, Any]:
        return self._reply(next(number for number, cell in self._cells.items() if cell is shown))

    def _reply(self, number: str) -> dict[str, Any]:
        """The kernel's reply to a request; all are kept."""
        assert not self._ended or number in self._replies, (
            "its kernel hung in an earlier cell, and was ended"
        )
        deadline = time.monotonic() + DEADLINE
        while number not in self._replies:
            try:
                reply = self._client.get_shell_msg(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                self._tell_where()
                raise
            self._replies[reply["parent_header"].get("msg_id", "")] = reply["content"]
        return self._replies[number]

    def run(self, source: str) -> Shown:
        """Run a cell that ends well."""
        shown = self.finish(self.start(source))
        assert shown.error is None, shown.text + shown.error.text
        return shown

    def answering(self, source: str, answer: str) -> tuple[list[str], Shown]:
        """Run a cell that asks, and give this answer: (the questions, what it has shown)."""
        shown, questions = Shown(), list[str]()

        def answered(message: dict[str, Any]) -> None:
            questions.append(message["content"]["prompt"])
            self._client.input(answer)

        def seen_by_user(message: dict[str, Any]) -> None:
            if message["msg_type"] in OUTPUTS:
                shown.add(message["msg_type"], message["content"])

        reply = self._client.execute_interactive(
            source,
            allow_stdin=True,
            stop_on_error=False,
            stdin_hook=answered,
            output_hook=seen_by_user,
            timeout=DEADLINE,
        )
        shown.done = reply["content"]["status"] in ("ok", "error")
        return questions, shown

    def fail(self, source: str, code: str = "") -> Failed:
        """Run a cell that fails, with this code if one is given."""
        failed = self.finish(self.start(source)).failure
        if code:
            assert self.fields()["code"] == code, failed.text
        return failed

    def fields(self) -> dict[str, Any]:
        """The code and the fields of the last error that a cell has shown; a UsageError is not kept."""
        names = ("code", "rank", "node", "host", "names", "hint")
        return self.value(f"{{n: getattr(__import__('sys').last_value, n, None) for n in {names}}}")

    def value(self, expression: str) -> Any:
        """An expression's value in the notebook: plain literals and containers of them."""
        wanted = {"value": f"repr(({expression}))"}
        number = self._client.execute("", silent=True, store_history=False, user_expressions=wanted)
        answer = self._reply(number)["user_expressions"]["value"]
        assert answer["status"] == "ok", f"{expression}: {answer['ename']}: {answer['evalue']}"
        return ast.literal_eval(ast.literal_eval(answer["data"]["text/plain"]))

    def page_opened(self) -> None:
        """What a page sends that is opened while the kernel runs: it has a session of its own."""
        page = Session(key=self._client.session.key)
        self._client.shell_channel.send(page.msg("kernel_info_request", {}))

    def click(self, button: str) -> None:
        """Press a button widget, as a front end does."""
        self.tell(button, {"method": "custom", "content": {"event": "click"}, "buffers": []})

    def display(self, widget: str) -> None:
        """Say that a widget is shown, as a front end does."""
        self.tell(widget, {"method": "update", "state": {"_view_count": 1}, "buffer_paths": []})

    def tell(self, comm: str, data: dict[str, Any]) -> None:
        """Send a widget a message, as a front end does."""
        content = {"comm_id": comm, "data": data}
        self._client.shell_channel.send(self._client.session.msg("comm_msg", content))

    # -- the kernel ----------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the kernel's process is there."""
        return bool(self._manager.is_alive())

    def interrupt(self) -> None:
        """Press the stop button."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        """Restart the kernel, as the menu does."""
        self._manager.restart_kernel()
        self.wait_until_ready()

    def close(self) -> None:
        """Shut the kernel down, as closing a notebook does; twice is safe."""
        self._client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=not self._manager.is_alive())
        self._manager.cleanup_resources()
        self._client.context.destroy()  # jupyter_client 7 has it wait for the garbage collector


def gate(folder: Path) -> Path:
    """A named pipe: a cell that reads it goes on when it is opened."""
    path = folder / f"gate-{os.urandom(4).hex()}"
    os.mkfifo(path)
    return path


def own_folders(folder: Path) -> dict[str, str]:
    """Where a kernel keeps its history and its records of pools: nothing of one test is another's."""
    return {"IPYTHONDIR": str(folder / ".ipython"), "XDG_STATE_HOME": str(folder / ".state")}


@contextmanager
def opened(
    folder: Path, *cells: str, env: dict[str, str] | None = None, **options: Any
) -> Iterator[Notebook]:
    """A notebook with skymagic loaded and these cells run; closed at the end. `options` are those of `Notebook`."""
    with CLOCK.starting():
        notebook = Notebook(folder, env, **options)
    try:
        with CLOCK.starting():
            notebook.run("%load_ext skymagic")
            for cell in cells:
                notebook.run(cell)
        yield notebook
    finally:
        notebook.close()


def buttons(notebook: Notebook, cell: Shown) -> dict[str, str]:
    """Show a cell's line as a front end with widgets does: the ids of its buttons, by what they say."""
    notebook.watch(cell, lambda shown: any(WIDGET_VIEW in data for data in shown.rich))
    bundles: list[dict[str, Any]] = list(cell.rich)
    (box,) = (data[WIDGET_VIEW]["model_id"] for data in bundles if WIDGET_VIEW in data)
    row = notebook.widgets[box]["children"][0].removeprefix("IPY_MODEL_")
    assert len(notebook.widgets[row]["children"]) == 1, "nobody has said that it is shown"
    notebook.display(box)
    notebook.watch(cell, lambda shown: len(notebook.widgets[row]["children"]) > 1)
    ids = [each.removeprefix("IPY_MODEL_") for each in notebook.widgets[row]["children"][1:]]
    return {notebook.widgets[button]["description"]: button for button in ids}


def has_buttons(notebook: Notebook) -> bool:
    """Whether there is any: of a line that has ended its text alone is kept."""
    return any(state["_model_name"] == "ButtonModel" for state in notebook.widgets.values())


def seen(notebook: Notebook, cell: str) -> Any:
    """The values of a broadcast cell's last expression, by rank: plain literals and containers of them."""
    notebook.run(f"%%sky_broadcast -o seen\n{cell}")
    return notebook.value("seen")


def at_work(notebook: Notebook, ranks: int = 2, options: str = "") -> Shown:
    """A cell that does not end by itself, once so many ranks are at it."""
    cell = "import time\nprint('at work', flush=True)\ntime.sleep(600)"
    running = notebook.start(f"%%sky_broadcast --only all {options}\n{cell}")
    return notebook.watch(running, lambda cell: cell.text.count("at work") == ranks)
