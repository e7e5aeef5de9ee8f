"""IPython's shell on a rank: displays go to the agent, and errors are returned, not published.

It also repairs standard output and error after a cell has broken them.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import runpy
import sys
import threading
import time
import tokenize
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from ipykernel.compiler import XCachingCompiler
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core import page, ultratb
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult
from traitlets import Type

from skymagic.data.capture.names import OUTPUT_NAMES
from skymagic.data.capture.numbering import number_cells, numbers_by_file
from skymagic.kernels.rank import gpu, ipython7, refusals, tracebacks, widgets
from skymagic.kernels.rank.context import current
from skymagic.runtime import reporting, silence, usage
from skymagic.wire import agent as wire


class ShownResults(dict[int, Any]):
    """``Out`` on a rank: ``Out[10]`` is the notebook's ``_10``, sent by name.

    It keeps no results of the rank.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def __missing__(self, number: int) -> Any:
        if f"_{number}" in self._names:
            return self._names[f"_{number}"]
        raise KeyError(
            f"Out[{number}]: ranks know what the notebook's plain cells have shown, "
            "and their own last results as _, __ and ___"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class RankDisplayHook(DisplayHook):
    """Display hook that publishes a result, and keeps it as the cell's value, even after ``;``."""

    value: Any = None
    bound_outputs: tuple[str, ...] = ()
    """Names bound to values that the cell has shown, including ``_``."""
    cell = ""
    topic = None
    msg = None

    def __call__(self, result: Any = None) -> None:
        self.value = result
        super().__call__(result)

    def update_user_ns(self, result: Any) -> None:
        """Bind ``_`` and the like, unless a cell has bound them itself."""
        ipython7.know_last_shown(self, OUTPUT_NAMES)
        super().update_user_ns(result)
        if self.shell.user_ns.get("_") is result:
            self.bound_outputs = OUTPUT_NAMES

    def bind_shown_values(self, names: Iterable[str]) -> None:
        """Set names such as ``_`` to values that the notebook's plain cells have shown.

        Values shown later on the rank shift them.
        """
        values = {name: self.shell.user_ns[name] for name in names if name in self.shell.user_ns}
        for name, value in values.items():
            setattr(self, name, value)
        # if they counted as the cell's own, they would never change again
        self.shell.push(values, interactive=False)

    def quiet(self) -> bool:
        """Return True if the cell ends in ``;``.

        IPython would check its history, which ranks do not keep.
        """
        return ends_in_semicolon(self.cell)

    def check_for_underscore(self) -> None:
        """Do nothing.

        Builtins stay as they are, and the notebook has its own prompts and shows output at once.
        """

    start_displayhook = write_output_prompt = finish_displayhook = check_for_underscore

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        """Publish all representations of the value."""
        publish("execute_result", {"data": format_dict, "metadata": md_dict or {}})

    def set_parent(self, parent: dict[str, Any]) -> None:
        """Ignore the parent: the agent attributes output to requests."""


def ends_in_semicolon(cell: str) -> bool:
    """Return True if a cell's last token is a semicolon, comments left out.

    IPython has a function for it since 8.0 only.
    """
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    try:
        tokens = [
            token.string
            for token in tokenize.generate_tokens(io.StringIO(cell).readline)
            if token.type not in ignored
        ]
    except (tokenize.TokenError, SyntaxError):  # magics need not be Python
        return False
    return tokens[-1:] == [";"]


class RankDisplayPublisher(DisplayPublisher):
    """Publisher of ``display(…)`` on a rank."""

    topic = None

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        """Publish rich output after the text written so far."""
        kind = "update_display_data" if update else "display_data"
        publish(kind, {"data": data, "metadata": metadata or {}, "transient": transient or {}})

    def clear_output(self, wait: bool = False) -> None:
        """Clear the cell's output in the notebook."""
        publish("clear_output", {"wait": wait})

    def set_parent(self, parent: dict[str, Any]) -> None:
        """Ignore the parent: the agent attributes output to requests."""


class RankCompiler(XCachingCompiler):
    """IPython's compiler, with a callback for compiled code."""

    compiled: Callable[[object], None] | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        code = super().__call__(*args, **options)
        if self.compiled is not None:
            self.compiled(code)
        return code


class RankShell(ZMQInteractiveShell):
    """IPython's shell with a rank's displays; it returns errors instead of publishing them."""

    displayhook_class = Type(RankDisplayHook)
    display_pub_class = Type(RankDisplayPublisher)

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "compiler_class": RankCompiler})  # ipykernel passes its own
        number_cells(self.compile)
        ipython7.adapt(self, numbers_by_file(self.compile))
        self.user_ns["Out"] = self.user_ns["_oh"] = ShownResults(self.user_ns)
        self._running_cells = 0  # greater than one while a cell runs another (%%capture, run_cell)

    # IPython prints the error of nested code and continues the cell. On a rank that would hide
    # which rank failed, and the others would wait for it in their next collective, so the error is
    # raised where the nested code was started.

    def run_cell(self, *args: Any, **kwargs: Any) -> ExecutionResult:
        """Run a cell's code.

        Inside another cell (``%%capture``, ``get_ipython().run_cell``) its error is raised.
        """
        nested = self._running_cells > 0
        shown_before = getattr(self, "_last_traceback", None)
        result = super().run_cell(*args, **kwargs)
        if nested and not result.success:
            # the outer cell shows the error if it does not catch it
            self._last_traceback = shown_before
            result.raise_error()
        return result

    def safe_execfile(
        self, fname: Any, *where: Any, exit_ignore: bool = False, **options: Any
    ) -> None:
        """Run a script (``%run``) and raise its error, after binding the names that it defined."""
        try:
            super().safe_execfile(
                fname, *where, exit_ignore=exit_ignore, **{**options, "raise_exceptions": True}
            )
        except BaseException as problem:
            if exit_ignore and isinstance(problem, SystemExit):
                return
            if where and where[0] is self.user_ns:  # %run -i
                self.user_ns["__name__"] = "__main__"
            elif where:
                self.user_ns.update(
                    {name: value for name, value in where[0].items() if not _is_dunder(name)}
                )
            raise

    def safe_run_module(self, mod_name: str, where: dict[str, Any]) -> None:
        """Run a module as a program (``%run -m``) and raise its error."""
        try:
            where.update(runpy.run_module(str(mod_name), run_name="__main__", alter_sys=True))
        except SystemExit as problem:
            if problem.code:
                raise

    def system(self, cmd: str) -> None:
        """Run a shell command (``!cmd``). An interrupt that ends it ends the cell too."""
        falls = self._interrupt_count()
        super().system(cmd)
        if self._interrupt_count() > falls:
            raise KeyboardInterrupt

    def _interrupt_count(self) -> int:
        return int(self.kernel.interrupts.raised_count)

    async def run_ast_nodes(self, *args: Any, **kwargs: Any) -> bool:
        """Run a cell, and wait for its work on the GPU, whose error is this cell's.

        Returns True if it failed.
        """
        self._running_cells += 1
        try:
            failed = bool(await super().run_ast_nodes(*args, **kwargs))
        finally:
            self._running_cells -= 1
        if failed:
            return True
        try:
            # CUDA reports the error of a kernel on a later call: it must be this cell's
            gpu.synchronize()
        except BaseException as problem:
            if (result := kwargs.get("result")) is not None:
                result.error_in_exec = problem
            self.showtraceback(running_compiled_code=True)
            return True
        return False

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Format an error completely.

        That includes SystemExit, and groups, whose tracebacks IPython would print.
        """
        kind, problem, tb = exc_tuple or sys.exc_info()
        if (
            problem is not None
            and not current().freed
            and (note := gpu.explain_cuda_error(problem, self.user_ns))
            and note not in getattr(problem, "__notes__", ())
        ):
            problem.add_note(note)
        try:
            self._format(kind, problem, tb, *args, **kwargs)
        except Exception:  # a cell has broken the formatting: report its own error all the same
            self._last_traceback = [
                f"{getattr(kind, '__name__', kind)}: {tracebacks.message(problem)}"
            ]

    def _format(
        self, kind: Any, problem: BaseException | None, tb: Any, *args: Any, **kwargs: Any
    ) -> None:
        if problem is None or current().freed or isinstance(problem, KeyboardInterrupt):
            # a consequence of another error; reading all sources may take seconds
            self._last_traceback = traceback.format_exception_only(kind, problem)
        elif kind is UsageError:
            # misuse of a magic is reported in one line, which IPython would print
            self._last_traceback = [f"UsageError: {problem}"]
        elif tracebacks.is_group(problem):
            with tracebacks.own_chain(problem):
                self._last_traceback = tracebacks.group_traceback(
                    problem, self.compile._filename_map
                )
        else:
            # no frame is IPython's own, which IPython 7 would skip by their number
            kwargs.update(exception_only=False, tb_offset=0)
            with tracebacks.interrupts_ignored(), tracebacks.own_chain(problem) as hidden:
                super().showtraceback(
                    (kind, problem, tracebacks.user_frames_and_origin(tb)), *args, **kwargs
                )
            if hidden and self._last_traceback:
                self._last_traceback.insert(-1, tracebacks.hidden_frames_line(hidden))

    def _showtraceback(
        self, etype: type[BaseException], evalue: BaseException, stb: list[str]
    ) -> None:
        self._last_traceback = stb

    def init_traceback_handlers(self, custom_exceptions: Any) -> None:
        """Make cells count as readable sources."""
        super().init_traceback_handlers(custom_exceptions)
        ultratb.get_line_number_of_frame = tracebacks.line_count

    def _update_code_co_name(self, code: Any) -> Any:
        """Leave ``<module>`` as the name of a cell's own code, which IPython 7 replaces."""
        return code

    def _find_with_lazy_load(self, /, type_: str, magic_name: str) -> Any:
        written = {"line": "%", "cell": "%%"}[type_] + magic_name
        return refusals.magic(written, super()._find_with_lazy_load(type_, magic_name))

    def init_hooks(self) -> None:
        """Display help (``name?``), because a rank's reply has no field for the pager's payload."""
        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(page.display_page), 0)

    def ask_exit(self) -> None:
        """End the cell, not the rank, on ``exit``."""
        raise SystemExit


# Libraries detect a notebook by this name: get_ipython().__class__.__name__ ==
# "ZMQInteractiveShell".
RankShell.__name__ = RankShell.__qualname__ = ZMQInteractiveShell.__name__
RankShell.__module__ = ZMQInteractiveShell.__module__


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def publish(kind: str, content: dict[str, Any]) -> None:
    """Send rich output to the agent, which orders it with the text."""
    flush_text()
    if widgets.MIME in content.get("data", ()):
        content = widgets.without_widget(content)
    current().control.request(wire.Publish(current().info.rank, kind, json_safe(content)))


def json_safe(value: Any) -> Any:
    """Convert a value to JSON types; images become base64, as in Jupyter's messages."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def flush_text() -> None:
    """Flush the buffers of Python and the C library into the pipes."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    silence.flush_c("stdout")  # for a pipe, the C library buffers whole pages


class Flusher:
    """Thread that flushes incomplete lines (``print(".", end="")``) and metrics during a cell.

    It is entered for each cell.
    """

    INTERVAL = 0.1
    REPORT_INTERVAL = 0.5

    def __init__(self) -> None:
        self._running = threading.Event()
        threading.Thread(target=self._run, name="skymagic-flush", daemon=True).start()

    def __enter__(self) -> None:
        self._running.set()

    def _run(self) -> None:
        reported = time.monotonic()
        while self._running.wait():
            # not woken at the cell's end: a series of short cells causes no thread switches
            time.sleep(self.INTERVAL)
            if self._running.is_set():
                # the cell may have replaced or closed a stream
                with contextlib.suppress(Exception):
                    flush_text()
                    if (now := time.monotonic()) - reported >= self.REPORT_INTERVAL:
                        reported = now
                        reporting.flush(usage.sample())

    def __exit__(self, *_: object) -> None:
        self._running.clear()


NAMES = {1: "stdout", 2: "stderr"}


def text_stream(fd: int) -> TextIO:
    """Open a line-buffered stream that never raises on a character."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


class Stdio:
    """Keeps the pipes that descriptors 1 and 2 lead to when it is created."""

    def __init__(self) -> None:
        self._pipes = {fd: os.dup(fd) for fd in NAMES}

    def restore(self) -> None:
        """Reopen closed descriptors, and replace unusable streams.

        A ``sys.stdout`` that is None, closed, or cannot be flushed is replaced. A user's own stream
        that works stays, and so does a descriptor that leads elsewhere now.
        """
        for fd, name in NAMES.items():
            try:
                os.fstat(fd)
            except OSError:
                os.dup2(self._pipes[fd], fd)
            try:
                getattr(sys, name).flush()
            except Exception:
                setattr(sys, name, text_stream(fd))
