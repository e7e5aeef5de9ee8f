"""The status line of a run as widgets.

The line has a stop button, a button that asks where the ranks are, with a text for the answer, and
a button that shows what the ranks use.

The line is shown first, without buttons. They appear once the front end has reported that it
displays the line: its report arrives on the same channel as clicks will. Without widgets, or if
their messages do not arrive, only the line is shown, because its buttons would do nothing.

When the run ends, text and HTML replace the widgets in the notebook. A page that was reloaded
during the run does not see this, because it does not know earlier displays. It requests the state
of the kernel's widgets instead, so the widgets of the last runs are kept, reduced to the final
line.
"""

from __future__ import annotations

import contextlib
import html
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.display.live import is_watched, own_kernel, widget_view
from skymagic.wire.typed import JsonObject

RANKS_INTERVAL, RANKS_SECONDS = 1.0, 600.0
"""Seconds between two measurements of the ranks' resource use, and seconds in total.

The total is limited because the kernel cannot know if the page is still open.
"""
DEADLINE = 10.0
"""Seconds within which a front end must report that it displays the line.

The first widget of a page takes a while to load.
"""
LINE_CLASS, LIVE_CLASS = "skymagic-line", "skymagic-live"
"""CSS classes of a line's widgets, and of the widgets of a running cell."""
DISCONNECTED = ".jupyter-widgets-disconnected"
"""CSS class of widgets whose kernel was restarted or disconnected.

ipywidgets sets it and marks these dead widgets with a broken link as an icon.
"""
STYLE = f"""<style>
.{LINE_CLASS}{DISCONNECTED}::before,
.{LINE_CLASS} {DISCONNECTED}::before {{ content: none !important; }}
.{LINE_CLASS} .jupyter-button{DISCONNECTED} {{ display: none !important; }}
.{LIVE_CLASS}{DISCONNECTED}
.widget-html:first-child .widget-html-content > div:first-child::after {{
    content: " · disconnected from the kernel"; white-space: nowrap;
}}
</style>"""
"""Reduces a line with dead buttons to its text.

The page itself has to do this: a front end that restarts a kernel accepts nothing more from the old
one.
"""
KEPT_CONTROLS = 16
"""Maximum number of ended runs whose line is kept as a widget."""


@dataclass(frozen=True)
class Actions:
    """Actions of the buttons; called on any thread, possibly concurrently and repeatedly.

    Attributes:
        stop: same as the notebook's own stop button.
        positions: returns the current positions of the ranks as text; called on a separate thread.
            None for no such button.
        ranks: returns the pool with each rank's resource use as HTML; called in the same way,
            repeatedly while it is shown.
    """

    stop: Callable[[], object]
    positions: Callable[[], str] | None = None
    ranks: Callable[[], str] | None = None


class Controls:
    """A line of HTML, followed by buttons."""

    def __init__(self, line: str, actions: Actions, channel: ShellChannel) -> None:
        import ipywidgets

        self._actions, self._channel = actions, channel
        self._offered = time.monotonic()
        self.answered = False
        """True if the front end shows the widgets and its messages arrive."""
        self._lock = threading.Lock()
        """Held while a button's action runs, and while the widgets are being closed.

        A click that comes too late must not reach the next cell.
        """
        self._closed = False
        self._line, self._below = ipywidgets.HTML(line), ipywidgets.HTML(STYLE)
        self._stop = _button("stop", "stop", "interrupts the ranks; a second press kills them")
        handlers = [(self._stop, self._on_stop_click)]
        if actions.positions is not None:
            handlers.append(
                (_button("where is it?", "search", "where each rank is now"), self._on_where_click)
            )
        if actions.ranks is not None:
            tooltip = "what each rank uses, for ten minutes"
            handlers.append((_button("ranks", "tasks", tooltip), self._on_ranks_click))
        self._buttons = [button for button, _ in handlers]
        self._row, self._panel = ipywidgets.HBox([self._line]), ipywidgets.HTML()
        self._stop_measuring: threading.Event | None = None
        """Set to stop measuring the ranks' resource use; None while nothing is measured."""
        # the default None disables counting
        self._box = ipywidgets.VBox([self._row, self._below], _view_count=0)
        self._box.add_class(LINE_CLASS)
        self._row.add_class(LIVE_CLASS)
        self._all = [self._box, self._row, self._line, self._below, self._panel, *self._buttons]
        channel.add(self._box.model_id, self._on_view_count)
        for button, call in handlers:
            channel.add(button.model_id, _click_receiver(call))

    @property
    def ignored(self) -> bool:
        """True if the front end seems not to show the widgets."""
        return not self.answered and time.monotonic() - self._offered > DEADLINE

    def bundle(self) -> JsonObject:
        """Return the MIME data of the widgets, to be displayed besides the text."""
        return widget_view(self._box.model_id)

    def update(self, line: str, *, accepts_clicks: bool = True) -> None:
        """Show another line.

        Args:
            accepts_clicks: False while the main thread cannot receive clicks; then the buttons are
                hidden, unless another thread receives them.
        """
        self._line.value = line
        if self.answered:
            self._show(self._buttons if accepts_clicks or self._channel.threaded else [])

    def _show(self, buttons: list[Any]) -> None:
        if not self._closed and list(self._row.children[1:]) != buttons:
            self._row.children = (self._line, *buttons)

    def _on_view_count(self, data: JsonObject) -> None:
        """Process the front end's count of the widget's views."""
        if data.get("method") == "update" and data.get("state", {}).get("_view_count"):
            self.answered = True
            self._show(self._buttons)

    def _on_stop_click(self) -> None:
        with self._lock:
            if not self._closed:
                self._actions.stop()
        self._stop.description, self._stop.button_style = "kill", "danger"

    def _on_where_click(self) -> None:
        threading.Thread(target=self._show_positions, name="skymagic-where", daemon=True).start()

    def _show_positions(self) -> None:
        if self._actions.positions is None:
            return
        # the answer takes seconds if native code holds a rank's interpreter
        self._show_below("asking the ranks …")
        try:
            text = self._actions.positions()
        except Exception as problem:  # the pool may have ended in the meantime
            text = f"{type(problem).__name__}: {problem}"
        self._show_below(text)

    def _show_below(self, text: str) -> None:
        if not self._closed:
            self._below.value = (
                f'{STYLE}<pre style="line-height: 1.3; font-size: 90%">{html.escape(text)}</pre>'
            )

    def _on_ranks_click(self) -> None:
        """Show or hide the ranks' resource use."""
        with self._lock:
            if self._stop_measuring is not None:
                self._hide()
            elif not self._closed:
                self._stop_measuring = threading.Event()
                self._box.children = (self._row, self._panel, self._below)
                threading.Thread(
                    target=self._measure,
                    args=(self._stop_measuring,),
                    name="skymagic-ranks",
                    daemon=True,
                ).start()

    def _measure(self, stopped: threading.Event) -> None:
        end = time.monotonic() + RANKS_SECONDS
        while self._actions.ranks is not None and not stopped.is_set() and time.monotonic() < end:
            with contextlib.suppress(Exception):  # the pool may have ended in the meantime
                measured = self._actions.ranks()
                with self._lock:  # else a slow measurement would be shown after the end
                    self._panel.value = "" if stopped.is_set() else measured
            stopped.wait(RANKS_INTERVAL)
        with self._lock:
            if not stopped.is_set():
                self._hide()

    def _hide(self) -> None:
        """Stop measuring, and remove the panel. The caller holds the lock. Safe to call twice."""
        if self._stop_measuring is not None:
            self._stop_measuring.set()
            self._stop_measuring = None
            self._panel.value = ""
            self._box.children = (self._row, self._below)

    def end(self, line: str) -> None:
        """Reduce the widgets to this line, for pages that still show them.

        The widgets of the last `KEPT_CONTROLS` runs are kept.
        """
        self._release()
        self._line.value = line + STYLE  # shown again on a page that is reloaded
        self._row.remove_class(LIVE_CLASS)
        self._row.children, self._box.children = (self._line,), (self._row,)
        remaining = [self._box, self._row, self._line]
        _close([widget for widget in self._all if widget not in remaining])
        self._all = remaining
        _ended.append(self)
        while len(_ended) > KEPT_CONTROLS:
            _ended.popleft().close()

    def close(self) -> None:
        """Close the widgets, so that clicks have no effect. Safe to call twice."""
        self._release()
        _close(self._all)
        self._all = []

    def _release(self) -> None:
        """Stop receiving messages."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(Exception):
                self._hide()
        for widget in self._all:
            self._channel.remove(widget.model_id or "")


_ended: deque[Controls] = deque()
"""Controls of ended runs that are kept."""


def _close(widgets: Sequence[Any]) -> None:
    for widget in widgets:
        for part in (getattr(widget, "style", None), getattr(widget, "layout", None), widget):
            with contextlib.suppress(Exception):
                if part is not None:
                    part.close()


def _button(label: str, icon: str, tooltip: str) -> Any:
    import ipywidgets

    # the layout keeps a long line from squeezing the button's text
    return ipywidgets.Button(
        description=label, icon=icon, tooltip=tooltip, layout={"width": "auto", "flex": "none"}
    )


def _click_receiver(call: Callable[[], None]) -> Callable[[JsonObject], None]:
    """Return a receiver of a button's messages that calls `call` on clicks."""

    def take(data: JsonObject) -> None:
        if data.get("method") == "custom" and data.get("content", {}).get("event") == "click":
            call()

    return take


def controls(line: str, actions: Actions) -> Controls | None:
    """Return a line with buttons, or None if they would not work.

    That is the case if the notebook is unattended, ipywidgets is missing, or clicks cannot be
    received.
    """
    if not is_watched() or (channel := shell_channel()) is None:
        return None
    try:
        return Controls(line, actions, channel)
    except ImportError:
        return None


# -- Messages to widgets while a cell occupies the kernel's main thread ----------------------------
# Messages arrive on the shell channel, behind the cell, and would have to wait for its end::
#
#     ipykernel 7   a thread of the kernel reads the channel, and passes messages to the main
#                   thread or to a subshell
#     ipykernel 6   the main thread reads it between cells; during a cell, `pump` reads it
#
# In both, messages to a comm that was added here are taken out first, and all others are passed on
# in their order. This relies on how ipykernel reads (a ZMQStream with a callback), which is not
# guaranteed: a button appears only after a first message has arrived.

Receiver = Callable[[JsonObject], object]
"""Function that receives the data of a message in the widgets' protocol.

The data has ``method`` and ``state`` or ``content``.
"""


class ShellChannel:
    """The receiving side of a kernel's shell channel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._stream = kernel.shell_stream
        self._receive = self._stream._recv_callback  # private: pyzmq has no public way to read it
        """ipykernel's own handler of messages."""
        self._receivers: dict[str, Receiver] = {}
        self._pages: dict[str, float] = {}
        """Time of the last message of each page, by the session in the message headers."""
        thread = getattr(kernel, "shell_channel_thread", None)
        self.threaded = thread is not None
        """True if messages are received at any time; else only in `pump`, and between cells."""
        loop = thread.io_loop if thread is not None else kernel.io_loop
        if self.threaded or threading.current_thread() is not threading.main_thread():
            loop.add_callback(self._stream.on_recv, self._on_message, copy=False)
        else:
            self._stream.on_recv(self._on_message, copy=False)

    def add(self, comm: str, take: Receiver) -> None:
        """Pass messages to a comm to `take`.

        It is called on a thread of the kernel, which it must not block, or in `pump`.
        """
        self._receivers[comm] = take

    def remove(self, comm: str) -> None:
        """Leave the comm's messages to the kernel. Safe to call twice."""
        self._receivers.pop(comm, None)

    def has_other_pages(self, page: str, since: float) -> bool:
        """Return True if another page than `page` has sent a message since the time `since`.

        JupyterLab uses a new session each time it is opened, and requests the kernel's state
        immediately. Messages are only noticed while a comm is registered.
        """
        return any(
            when >= since for other_page, when in [*self._pages.items()] if other_page != page
        )

    def pump(self) -> None:
        """Process pending messages on the main thread, if no other thread does."""
        if (
            self._receivers
            and not self.threaded
            and threading.current_thread() is threading.main_thread()
        ):
            from zmq import POLLIN

            self._stream.flush(POLLIN)

    def _on_message(self, frames: list[Any]) -> Any:
        is_handled = self._receivers and self._pass_to_comm(frames)
        # the result may be a coroutine, which the stream awaits
        return None if is_handled else self._receive(frames)

    def _pass_to_comm(self, frames: list[Any]) -> bool:
        """Pass a message to its comm; return False if it is not for a comm that was added."""
        session = self._kernel.session
        try:
            frame_parts = session.feed_identities(frames, copy=False)[1]
            # deserialize checks the signature
            message = session.deserialize(frame_parts, content=False, copy=False)
            self._pages[message["header"]["session"]] = time.monotonic()
            if message["header"]["msg_type"] != "comm_msg":
                return False
            content = session.unpack(message["content"])
            take = self._receivers.get(content["comm_id"])
        except Exception:  # the kernel reports what is wrong with it
            return False
        if take is None:
            return False
        take(content["data"])
        return True


current_channel: ShellChannel | None = None
"""The process-wide shell channel, once a run has had buttons."""


def shell_channel() -> ShellChannel | None:
    """Return the shell channel of this process's kernel, or None if it is not readable."""
    global current_channel
    kernel = own_kernel()
    if (
        current_channel is None
        and getattr(getattr(kernel, "shell_stream", None), "_recv_callback", None) is not None
    ):
        current_channel = ShellChannel(kernel)
    return current_channel
