"""What a notebook that is a job shows, until it has ended and is saved here: in a terminal, for programs, and in another notebook."""

from __future__ import annotations

import contextlib
import sys

from skymagic.api import notebooks, reading
from skymagic.api.reading import JsonScreen
from skymagic.display.screen import print_note
from skymagic.pool import keys, records
from skymagic.pool.keys import NotebookRun
from skymagic.wire import notebook as wire

ENDS = {
    "done": "has finished",
    "failed": "has failed",
    "stopped": "was stopped",
    "lost": "could not continue",
}


def shown(run: NotebookRun, as_json: bool = False) -> str:
    """Show what it has shown and what it shows, until it has ended and is saved; its status. KeyboardInterrupt leaves it as it is.

    Raises:
        PoolError: its head cannot be reached, or keeps nothing of it.
    """
    words = Json(run) if as_json else Text(run)
    try:
        ended = notebooks.follow(run, words.hear)
    except KeyboardInterrupt:
        print(f"\n[{run.notebook.name} keeps running: skymagic attach {run.name}]", file=sys.stderr)
        raise
    words.end(ended)
    return ended.status


def elsewhere(name: str) -> bool:
    """Show in a notebook what runs on a pool of this name, or job id, that another has: a notebook as a job, or the cell of one that is
    alive. False where nobody has it. The stop button leaves it as it is.

    Raises:
        PoolError: there is no such pool, or it cannot be read.
    """
    run = keys.notebook_run(name)
    if run is not None:
        with contextlib.suppress(KeyboardInterrupt):
            shown(run)
        return True
    if reading.held_elsewhere(name):
        holder = records.holder(records.named(name))
        print_note(
            f"{holder} has pool {name!r}; %sky_attach {name} --take-over takes it away from there"
        )
        with contextlib.suppress(KeyboardInterrupt):
            reading.attached(name, as_json=False)
        return True
    return False


class Text:
    """For people."""

    def __init__(self, run: NotebookRun) -> None:
        self._run = run
        self._cells = 0

    def hear(self, message: wire.NotebookMessage) -> None:
        """Show a message."""
        match message:
            case wire.Begun():
                self._cells = message.cells
                ends = f"; {self._run.ends}" if self._run.ends else ""
                print_note(
                    f"[{self._run.notebook.name} is executed on {message.machine}: {message.cells} cells{ends}]"
                )
            case wire.CellBegun():
                first = message.source.strip().partition("\n")[0]
                print_note(f"[cell {message.cell + 1} of {self._cells}] {first[:100]}")
            case wire.CellOutput():
                print(
                    message.text,
                    end="",
                    flush=True,
                    file=sys.stderr if message.name == "stderr" else sys.stdout,
                )
            case wire.CellFailed():
                said = message.traceback or f"{message.ename}: {message.evalue}"
                print(said, file=sys.stderr, flush=True)

    def end(self, ended: wire.NotebookEnded) -> None:
        """Say how it has ended."""
        why = f": {ended.problem}" if ended.problem else ""
        print_note(
            f"[{self._run.notebook.name} {ENDS[ended.status]}{why}; the executed notebook is {self._run.output}]"
        )


class Json(Text):
    """For programs: a line for each message."""

    def __init__(self, run: NotebookRun) -> None:
        super().__init__(run)
        self._screen = JsonScreen(sys.stdout)

    def hear(self, message: wire.NotebookMessage) -> None:
        """Write a message."""
        match message:
            case wire.Begun():
                self._screen.say(
                    "attached",
                    pool=self._run.name,
                    job_id=self._run.job_id,
                    notebook=str(self._run.notebook),
                    cells=message.cells,
                )
            case wire.CellBegun():
                self._screen.say("cell", cell=message.cell, source=message.source)
            case wire.CellOutput():
                self._screen.say(message.name, cell=message.cell, text=message.text)
            case wire.CellFailed():
                self._screen.say(
                    "error", cell=message.cell, ename=message.ename, evalue=message.evalue
                )

    def end(self, ended: wire.NotebookEnded) -> None:
        """Write how it has ended."""
        self._screen.say(
            "end", status=ended.status, problem=ended.problem, output=str(self._run.output)
        )
