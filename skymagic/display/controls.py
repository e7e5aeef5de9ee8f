"""The line of a run as widgets: with a button that stops it, one that tells where its ranks are, and a place for the answer.

Buttons appear with the front end's first message, that it shows them: it comes the way on which presses will come. Where there
are no widgets, or nobody handles their messages, there is the line alone, and no button that does nothing.

At the end text and HTML take their place in the notebook. A page that was loaded anew amid the run does not hear of that (it knows
no displays of before), but asks the kernel for its widgets: those of the last runs are kept, each with the line that stays.
"""

from __future__ import annotations

import contextlib
import html
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.display.live import own_kernel, watched, widget_view

RANKS_INTERVAL, RANKS_SECONDS = 1.0, 600.0
"""Seconds between two measurements of what ranks use, and for which they are made: nobody can tell whether the page is still open."""
DEADLINE = 10.0
"""Seconds in which a front end says that it shows them; its first widget takes a while to load."""
LINE_CLASS, LIVE_CLASS = "skymagic-line", "skymagic-live"
"""CSS classes of the widgets of a line, and of those of a run that goes on."""
DISCONNECTED = ".jupyter-widgets-disconnected"
"""CSS class that ipywidgets gives to widgets whose kernel was restarted or has lost its connection: dead, with a broken link as an icon."""
STYLE = f"""<style>
.{LINE_CLASS}{DISCONNECTED}::before, .{LINE_CLASS} {DISCONNECTED}::before {{ content: none !important; }}
.{LINE_CLASS} .jupyter-button{DISCONNECTED} {{ display: none !important; }}
.{LIVE_CLASS}{DISCONNECTED} .widget-html:first-child .widget-html-content > div:first-child::after {{
    content: " · disconnected from the kernel"; white-space: nowrap;
}}
</style>"""
"""Leaves a line of text of a line with buttons that nobody hears any more. The page itself has to: a front end that restarts a kernel takes
nothing more from the old one."""
MAX_ENDED = 16
"""Runs that have ended whose line is kept as a widget."""


@dataclass(frozen=True)
class Actions:
    """What buttons do; called on any thread, at once and more than once.

    Attributes:
        stop: what the notebook's own stop button does.
        where: where the ranks are now, as text; called on a thread of its own. None for no such button.
        ranks: the pool with what each rank uses now, as HTML; likewise, and again and again while somebody looks.
    """

    stop: Callable[[], object]
    where: Callable[[], str] | None = None
    ranks: Callable[[], str] | None = None


class Controls:
    """A line of HTML, and behind it buttons."""

    def __init__(self, line: str, actions: Actions, channel: ShellChannel) -> None:
        import ipywidgets

        self._actions, self._channel = actions, channel
        self._offered = time.monotonic()
        self.answered = False
        """Whether the front end shows them and is heard."""
        self._lock = threading.Lock()
        """Held while an action is taken or the end is near: a press that comes too late must not reach the next cell."""
        self._closed = False
        self._line, self._below = ipywidgets.HTML(line), ipywidgets.HTML(STYLE)
        self._stop = _button("stop", "stop", "interrupts the ranks; a second press kills them")
        pressed = [(self._stop, self._pressed)]
        if actions.where is not None:
            pressed.append(
                (_button("where is it?", "search", "where each rank is now"), self._asked)
            )
        if actions.ranks is not None:
            pressed.append(
                (_button("ranks", "tasks", "what each rank uses, for ten minutes"), self._toggled)
            )
        self._buttons = [button for button, _ in pressed]
        self._row, self._panel = ipywidgets.HBox([self._line]), ipywidgets.HTML()
        self._unseen: threading.Event | None = None
        """Ends the measurements; None while there are none."""
        self._box = ipywidgets.VBox(
            [self._row, self._below], _view_count=0
        )  # None, the default, is not counted
        self._box.add_class(LINE_CLASS)
        self._row.add_class(LIVE_CLASS)
        self._all = [self._box, self._row, self._line, self._below, self._panel, *self._buttons]
        channel.add(self._box.model_id, self._shown)
        for button, call in pressed:
            channel.add(button.model_id, _clicked(call))

    @property
    def ignored(self) -> bool:
        """Whether nobody shows them, by all that is known."""
        return not self.answered and time.monotonic() - self._offered > DEADLINE

    def bundle(self) -> dict[str, Any]:
        """What a display has besides its text."""
        return widget_view(self._box.model_id)

    def say(self, line: str, *, deaf: bool = False) -> None:
        """Show another line; `deaf` while presses cannot be heard."""
        self._line.value = line
        if self.answered:
            self._show([] if deaf and not self._channel.threaded else self._buttons)

    def _show(self, buttons: list[Any]) -> None:
        if not self._closed and list(self._row.children[1:]) != buttons:
            self._row.children = (self._line, *buttons)

    def _shown(self, data: Mapping[str, Any]) -> None:
        """The front end counts where it is shown."""
        if data.get("method") == "update" and data.get("state", {}).get("_view_count"):
            self.answered = True
            self._show(self._buttons)

    def _pressed(self) -> None:
        with self._lock:
            if not self._closed:
                self._actions.stop()
        self._stop.description, self._stop.button_style = "kill", "danger"

    def _asked(self) -> None:
        threading.Thread(target=self._answer, name="skymagic-where", daemon=True).start()

    def _answer(self) -> None:
        if self._actions.where is None:
            return
        try:
            text = self._actions.where()
        except Exception as problem:  # the pool may have ended meanwhile
            text = f"{type(problem).__name__}: {problem}"
        if not self._closed:
            self._below.value = (
                f'{STYLE}<pre style="line-height: 1.3; font-size: 90%">{html.escape(text)}</pre>'
            )

    def _toggled(self) -> None:
        """Show what ranks use, or hide it."""
        with self._lock:
            if self._unseen is not None:
                self._hide()
            elif not self._closed:
                self._unseen = threading.Event()
                self._box.children = (self._row, self._panel, self._below)
                threading.Thread(
                    target=self._measure, args=(self._unseen,), name="skymagic-ranks", daemon=True
                ).start()

    def _measure(self, unseen: threading.Event) -> None:
        end = time.monotonic() + RANKS_SECONDS
        while self._actions.ranks is not None and not unseen.is_set() and time.monotonic() < end:
            with contextlib.suppress(Exception):  # the pool may have ended meanwhile
                measured = self._actions.ranks()
                with self._lock:  # else a measurement that took long would be shown after the end
                    self._panel.value = "" if unseen.is_set() else measured
            unseen.wait(RANKS_INTERVAL)
        with self._lock:
            if not unseen.is_set():
                self._hide()

    def _hide(self) -> None:
        """Measure no more, and take the panel out; the lock is held. Twice is safe."""
        if self._unseen is not None:
            self._unseen.set()
            self._unseen = None
            self._panel.value = ""
            self._box.children = (self._row, self._below)

    def end(self, line: str) -> None:
        """Leave this line alone, for pages that still show it as a widget; of the earliest run that has ended, leave nothing."""
        self._release()
        self._line.value = line + STYLE  # shown again on a page that is loaded anew
        self._row.remove_class(LIVE_CLASS)
        self._row.children, self._box.children = (self._line,), (self._row,)
        kept = [self._box, self._row, self._line]
        _close([widget for widget in self._all if widget not in kept])
        self._all = kept
        _ended.append(self)
        while len(_ended) > MAX_ENDED:
            _ended.popleft().close()

    def close(self) -> None:
        """Close the widgets: presses do nothing from now on; twice is safe."""
        self._release()
        _close(self._all)
        self._all = []

    def _release(self) -> None:
        """Take no messages any more."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(Exception):
                self._hide()
        for widget in self._all:
            self._channel.remove(widget.model_id or "")


_ended: deque[Controls] = deque()
"""The controls of runs that have ended and are kept."""


def _close(widgets: Sequence[Any]) -> None:
    for widget in widgets:
        for part in (getattr(widget, "style", None), getattr(widget, "layout", None), widget):
            with contextlib.suppress(Exception):
                if part is not None:
                    part.close()


def _button(words: str, icon: str, tooltip: str) -> Any:
    import ipywidgets

    # a long line must not squeeze its words
    return ipywidgets.Button(
        description=words, icon=icon, tooltip=tooltip, layout={"width": "auto", "flex": "none"}
    )


def _clicked(call: Callable[[], None]) -> Callable[[Mapping[str, Any]], None]:
    """What takes a button's messages."""

    def take(data: Mapping[str, Any]) -> None:
        if data.get("method") == "custom" and data.get("content", {}).get("event") == "click":
            call()

    return take


def controls(line: str, actions: Actions) -> Controls | None:
    """A line with buttons; None where nobody looks, there is no ipywidgets, or presses would not be heard."""
    if not watched() or (channel := shell_channel()) is None:
        return None
    try:
        return Controls(line, actions, channel)
    except ImportError:
        return None


# -- What a front end sends to widgets while a cell holds the kernel's main thread -------------------------------------
# Messages come on the shell channel, behind the cell, for whose end they would have to wait::
#
#     ipykernel 7   a thread of the kernel reads the channel, and hands what it reads to the main thread or to a subshell
#     ipykernel 6   the main thread reads it between cells; ours reads it in between by `pump`
#
# In both, messages to a comm that was added here are taken out first, and all others go their way in their order. This rests on how
# ipykernel reads (a ZMQStream with a callback), which nothing promises: a button appears only after a first message has come.

Take = Callable[[Mapping[str, Any]], object]
"""Takes the data of a message, as the widgets' protocol has it: ``method`` and ``state`` or ``content``."""


class ShellChannel:
    """The receiving side of a kernel's shell channel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._stream = kernel.shell_stream
        self._receive = self._stream._recv_callback  # private: pyzmq tells it in no other way
        """What ipykernel does with a message."""
        self._takers: dict[str, Take] = {}
        self._pages: dict[str, float] = {}
        """When each page (by the session in its messages' headers) was heard last."""
        thread = getattr(kernel, "shell_channel_thread", None)
        self.threaded = thread is not None
        """Whether messages are taken at any time; else only in `pump`, and between cells."""
        loop = thread.io_loop if thread is not None else kernel.io_loop
        if self.threaded or threading.current_thread() is not threading.main_thread():
            loop.add_callback(self._stream.on_recv, self._received, copy=False)
        else:
            self._stream.on_recv(self._received, copy=False)

    def add(self, comm: str, take: Take) -> None:
        """Have the messages to a comm taken; on a thread of the kernel's, which must not be held up, or in `pump`."""
        self._takers[comm] = take

    def remove(self, comm: str) -> None:
        """Leave them to the kernel; twice is safe."""
        self._takers.pop(comm, None)

    def heard_from_others(self, page: str, since: float) -> bool:
        """Whether a page other than this one has sent something since: JupyterLab has a session of its own for each time it is opened, and
        asks for the kernel's state at once. Heard only while something is taken."""
        return any(when >= since for other, when in [*self._pages.items()] if other != page)

    def pump(self) -> None:
        """Take what has come, on the main thread, where nobody else does."""
        if (
            self._takers
            and not self.threaded
            and threading.current_thread() is threading.main_thread()
        ):
            from zmq import POLLIN

            self._stream.flush(POLLIN)

    def _received(self, frames: list[Any]) -> Any:
        taken = self._takers and self._taken(frames)
        return (
            None if taken else self._receive(frames)
        )  # which may be a coroutine: the stream awaits it

    def _taken(self, frames: list[Any]) -> bool:
        session = self._kernel.session
        try:
            parts = session.feed_identities(frames, copy=False)[1]
            message = session.deserialize(
                parts, content=False, copy=False
            )  # which checks the signature
            self._pages[message["header"]["session"]] = time.monotonic()
            if message["header"]["msg_type"] != "comm_msg":
                return False
            content = session.unpack(message["content"])
            take = self._takers.get(content["comm_id"])
        except Exception:  # the kernel says what is wrong with it
            return False
        if take is None:
            return False
        take(content["data"])
        return True


opened: ShellChannel | None = None
"""The process-wide shell channel, once a run has had buttons."""


def shell_channel() -> ShellChannel | None:
    """The shell channel of this process's kernel; None where it cannot be read."""
    global opened
    kernel = own_kernel()
    if (
        opened is None
        and getattr(getattr(kernel, "shell_stream", None), "_recv_callback", None) is not None
    ):
        opened = ShellChannel(kernel)
    return opened
