"""The logs of a node's ranks: where they are, which of their runs stand in them, and who follows them."""

from __future__ import annotations

from pathlib import Path

from skymagic.kernels.agent import logs
from skymagic.kernels.agent.children import Sink
from skymagic.wire import agent as wire


class RankLogs:
    """Answers what is asked of the logs.

    Args:
        directory: where they are.
        send: sends an answer.
    """

    def __init__(self, directory: Path, send: Sink) -> None:
        self._directory, self._send = directory, send
        self._spans: dict[int, logs.Spans] = {}
        """By rank: where its runs stand in its log."""
        self._followers: dict[tuple[int, int], wire.ReadLog] = {}
        """By rank and who asks (0: the notebook, else a reader): who follows its log."""

    def path(self, number: int) -> Path:
        """A rank's log."""
        return self._directory / f"rank-{number}.log"

    def spans(self, number: int) -> logs.Spans:
        """Where the runs of a rank stand in it."""
        return self._spans.setdefault(number, logs.Spans())

    def read(self, message: wire.ReadLog, asker: int) -> None:
        """Send the last lines of a rank's log, which runs it has, a piece of what one wrote there, or follow it."""
        path, spans = str(self.path(message.rank)), self.spans(message.rank)
        if message.runs:
            found = spans.listed()
        elif message.run:
            found = logs.of_run(path, spans.find(message.run), message.start)
        elif message.start is None:
            found = logs.last(path, message.lines)
        else:
            self._followers[message.rank, asker] = message
            self.follow(message.rank)
            return
        self._send(wire.RankReply(message.rank, message.number, found))

    def follow(self, number: int) -> None:
        """Send what is new in a log to those who follow it, once there is something."""
        for key in [key for key in self._followers if key[0] == number]:
            request = self._followers[key]
            found = logs.since(str(self.path(number)), request.start or 0)
            if found["text"]:
                del self._followers[key]
                self._send(wire.RankReply(number, request.number, found))

    def forget(self, asker: int) -> None:
        """Who asked is gone; twice is safe."""
        self._followers = {key: request for key, request in self._followers.items() if key[1] != asker}
