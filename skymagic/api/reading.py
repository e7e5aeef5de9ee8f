"""What runs on a pool of another notebook, followed from here: by ``%sky_attach`` beside a notebook that is alive, and ``skymagic attach``."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from skymagic.display.screen import NotebookScreen, Screen, print_note
from skymagic.plan.units import rank_words
from skymagic.pool import attaching
from skymagic.pool.attaching import PoolReader, RunOutcome, UnfinishedRun, outcome_words
from skymagic.pool.keys import DisplayRecord


class JsonScreen(Screen):
    """A line of JSON for each thing that a run shows: fields ``event``, ``rank``, and ``text`` or ``data``."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def say(self, event: str, **fields: Any) -> None:
        """Write one line."""
        print(json.dumps({"event": event, **fields}, default=str), file=self._file, flush=True)

    def text(self, rank: int, name: str, text: str) -> None:
        """Text of a rank's standard output or error."""
        self.say(name, rank=rank, text=text)

    def rich(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        """A display message; its text alone."""
        self.say("display", rank=rank, text=(content.get("data") or {}).get("text/plain", ""))

    def note(self, text: str) -> None:
        """A line of skymagic's own."""
        self.say("note", text=text.rstrip("\n"))


def attached(name: str, as_json: bool) -> str:
    """Follow what runs on a pool; how it has ended: a status of `RunOutcome`, or "nothing". Raises PoolError."""
    screen = JsonScreen(sys.stdout)
    with contextlib.closing(attaching.opened_reader(name)) as reader:
        shown = DisplayRecord(reader.job_id)
        waiting = [one for one in reader.runs() if not (one.over and shown.delivered(one.run, one.spec.ranks))]
        if as_json:
            screen.say("attached", pool=reader.name, job_id=reader.job_id, runs=[one.run for one in waiting])
        elif not waiting:
            print_note(f"[nothing runs on pool {reader.name!r}]")
        status = "nothing"
        for one in waiting:
            if as_json:
                screen.say("run", run=one.run, cell=one.spec.execution_count, ranks=list(one.spec.ranks), over=one.over)
                end = reader.follow(one, screen)
                screen.say("end", **vars(end))
            else:
                print_note(_begun(one))
                end = _followed(reader, one)
            status = end.status if status in ("nothing", "done") else status
        return status


def _followed(reader: PoolReader, one: UnfinishedRun) -> RunOutcome:
    screen = NotebookScreen(one.spec.visible_ranks)
    try:
        end = reader.follow(one, screen)
    finally:
        screen.finish()
    print_note(outcome_words(end, one.spec.ranks))
    return end


def _begun(one: UnfinishedRun) -> str:
    verb = "had ended" if one.over else "is still running"
    return f"[cell {one.spec.execution_count}, run {one.run}, on {rank_words(one.spec.ranks)} {verb}]"
