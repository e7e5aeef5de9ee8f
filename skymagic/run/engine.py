"""The ipyparallel client: all of ipyparallel on the notebook's side; cells by DirectView, output by callbacks.

The rank → engine map is kept here: engine ids come in any order and grow with each rank that is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import ipyparallel as ipp
import zmq
from traitlets import observe
from traitlets.log import get_logger

from skymagic.errors import ProvisionError
from skymagic.plan.units import rank_words
from skymagic.run.submission import Submission
from skymagic.wire.order import Order, encode

CONNECT_TIMEOUT = 20
"""Seconds that the controller may take to answer a new client."""
REGISTRATION_POLL = 0.5
"""Seconds without news after which the hub is asked which ranks have registered."""
PURGE_AFTER = 100
"""Requests of runs that are over that the hub may remember: to make it forget takes time that the next cell would wait for."""
PURGE_BYTES = 4 << 20
"""Bytes of sent requests that the hub may remember."""


@contextlib.contextmanager
def unsigned() -> Iterator[None]:
    """Inside, jupyter_client does not warn of sessions without a key: the controller's sockets are files that the user alone can open, or
    are encrypted. The warning would be shown by IPython in a terminal, papermill and nbclient."""
    logger = get_logger()
    logger = logger.logger if isinstance(logger, logging.LoggerAdapter) else logger

    def other(record: logging.LogRecord) -> bool:
        return "Message signing is disabled" not in record.getMessage()

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


class _Client(ipp.Client):  # type: ignore[misc]  # untyped base
    """ipyparallel's client without its magics, with callbacks that are in place before anything is sent."""

    hook: Any = None
    """Called with each request's future before the request is sent."""
    changed = threading.Condition()
    """Notified when an engine has registered; one for all clients, for `ipp.Client` listens before its subclass could make its own."""

    connected: Any = None
    """Can be read once what the ranks show will arrive: what the controller published before is lost, to cells sent at once after attaching, too."""

    @observe("_iopub_socket")
    def _watch(self, change: Mapping[str, Any]) -> None:  # it is not connected yet
        self.connected = change["new"].get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def activate(self, *args: Any, **kwargs: Any) -> None:
        """Leave the notebook's magics alone."""

    def send_execute_request(self, socket: Any, code: str, **kwargs: Any) -> Any:
        return super().send_execute_request(socket, code, message_future_hook=self.hook, **kwargs)

    def _register_engine(self, msg: Any) -> None:
        super()._register_engine(msg)
        with self.changed:
            self.changed.notify_all()

    def query_registrations(self) -> None:
        """Ask the hub for its engines: what it published before this client's subscription had reached it is lost (a slow joiner)."""
        self._send(self._query_socket, "connection_request").add_done_callback(
            self._on_registrations
        )

    def unregister(self, engine: int) -> None:
        """Tell the hub that an engine is gone. It does not answer, so that this is no request of the client's."""
        send = self.session.send
        content = {"id": engine}
        self._io_loop.add_callback(
            lambda: send(self._query_socket, "unregistration_request", content=content)
        )

    def _on_registrations(self, answer: Any) -> None:
        """On the client's own thread, as news of engines come."""
        if not answer.cancelled() and answer.exception() is None:
            self._update_engines(dict(answer.result()["content"]["engines"]))
            with self.changed:
                self.changed.notify_all()


class RankEngine:
    """One connection to the controller; the map from ranks to its engines.

    Args:
        connection: the controller's connection info for clients.
        forward: for a controller on another machine: an address and port there → a port of 127.0.0.1 that leads there.

    Raises:
        ProvisionError: the controller does not answer.
    """

    def __init__(
        self, connection: Mapping[str, Any], forward: Callable[[str, int], int] | None = None
    ) -> None:
        logging.getLogger("ipyparallel").setLevel(logging.ERROR)
        try:
            here = forwarded(connection, forward) if forward is not None else dict(connection)
            with unsigned():
                self._client = _Client(here, timeout=CONNECT_TIMEOUT)
            if not self._client.connected.poll(1000 * CONNECT_TIMEOUT):
                self.close()
                raise TimeoutError("nothing that ranks show would arrive")
        except (TimeoutError, OSError) as problem:
            raise ProvisionError(f"the controller does not answer: {problem}") from problem
        self._engines: dict[int, int] = {}
        self._sending = threading.Lock()  # the client's hook serves one order at a time
        self._purgeable: list[
            str
        ] = []  # requests of runs that are over and that the hub still remembers
        self._purgeable_bytes = 0
        self._unanswered: set[Any] = set()  # requests of runs that are over, to ranks that are gone

    def bind(self, idents: Mapping[int, str], timeout: float) -> None:
        """Learn which engine serves each of these ranks; those that have registered are known also after a failure.

        Args:
            timeout: seconds for which no further engine may register.

        Raises:
            ProvisionError: some have not registered.
        """
        end = time.monotonic() + timeout
        client, before = self._client, len(idents)
        with client.changed:
            while True:
                known = {ident: number for number, ident in list(client._engines.items())}
                missing = [rank for rank, ident in idents.items() if ident not in known]
                if not missing:
                    break
                if len(missing) < before:  # many ranks on few cores register one after another
                    before, end = len(missing), time.monotonic() + timeout
                left = end - time.monotonic()
                if left <= 0:
                    self._engines.update(
                        {rank: known[ident] for rank, ident in idents.items() if ident in known}
                    )
                    raise ProvisionError(
                        f"{rank_words(missing)} did not register with the controller within {timeout:.0f} s: "
                        "%sky_restart starts them again"
                    )
                if not client.changed.wait(min(left, REGISTRATION_POLL)):
                    client.query_registrations()
        self._engines.update({rank: known[ident] for rank, ident in idents.items()})

    def answers(self, timeout: float) -> bool:
        """Return whether the controller answers within `timeout` seconds."""
        try:
            self._client._send(self._client._query_socket, "connection_request").result(timeout)
        except Exception:
            return False
        return True

    def unbound(self, ranks: Iterable[int]) -> list[int]:
        """Return those of these ranks that have no engine: they have not registered, or the hub has given them up."""
        present = {*self._client.ids}
        return [rank for rank in ranks if self._engines.get(rank) not in present]

    def submit(self, submission: Submission, order: Order, source: str) -> None:
        """Send an order to the submission's ranks, but those that are not bound; returns at once."""
        unbound = {*self.unbound(submission.ranks)}
        ranks = [rank for rank in submission.ranks if rank not in unbound]
        if not ranks:
            return
        code = encode(order, source)
        submission.nbytes = len(code) * len(ranks)
        by_engine = {self._engines[rank]: rank for rank in ranks}
        pending = iter(ranks)  # DirectView sends to its targets in their order: futures come in it

        def hook(future: Any) -> None:
            rank = next(pending)
            submission.futures[rank] = future
            future.iopub_callbacks.append(lambda message: _on_iopub(submission, future, message))
            future.add_done_callback(lambda done: _on_reply(submission, rank, done))

        with self._sending:
            self._client.hook = hook
            try:
                view = self._client[list(by_engine)]
                view.block = False
                view.execute(code, silent=False)
            finally:
                self._client.hook = None

    def purge(self, submission: Submission) -> None:
        """Let the client forget a run that is over, and now and then the hub those since the last time.

        What has not been replied to, of ranks that are gone, is forgotten when ipyparallel has given it up.
        """
        client = self._client
        with self._sending:
            for future in submission.futures.values():
                client.history.remove(future.msg_id) if future.msg_id in client.history else None
            due = (
                self._purgeable
                if len(self._purgeable) > PURGE_AFTER or self._purgeable_bytes > PURGE_BYTES
                else []
            )
            if due:
                self._purgeable, self._purgeable_bytes = [], 0
            self._unanswered.update(submission.futures.values())
            answered = {future for future in self._unanswered if future.done()}
            self._unanswered -= answered
            self._purgeable += [future.msg_id for future in answered]
            self._purgeable_bytes += (
                submission.nbytes
            )  # DictDB keeps the code of each request until it is purged
        if not due:
            return
        # This run's own come the next time: the hub may have them still to do, and would refuse them all.
        with contextlib.suppress(Exception):  # a controller that is gone has nothing to forget
            client._send(client._query_socket, "purge_request", content={"msg_ids": due})

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget engines that are gone, here and at the hub, which replies to what they were sent."""
        for rank in ranks:
            if (engine := self._engines.pop(rank, None)) is not None:
                with contextlib.suppress(
                    Exception
                ):  # a controller that is gone has nothing to forget
                    self._client.unregister(engine)

    def close(self) -> None:
        """Close the connections; twice is safe."""
        with contextlib.suppress(Exception):
            self._client.close(linger=0)
            self._client.connected.close()


def forwarded(connection: Mapping[str, Any], forward: Callable[[str, int], int]) -> dict[str, Any]:
    """The connection info with its ports led through to 127.0.0.1: seven, whatever the number of ranks."""
    address = connection["interface"].partition("://")[2]
    ports = {
        name: forward(address, value) for name, value in connection.items() if type(value) is int
    }
    return {**connection, **ports, "interface": "tcp://127.0.0.1", "location": socket.gethostname()}


def _on_iopub(submission: Submission, future: Any, message: Mapping[str, Any]) -> None:
    if message["header"]["msg_type"] != "sky_output":
        return
    content = message["content"]
    submission.put("output", content["rank"], content)
    if content["kind"] == "end" and not future.output.done():
        # all output has come: the client may forget the request, once it is replied to
        future.output.set_result(None)


def _on_reply(submission: Submission, rank: int, future: Any) -> None:
    problem = future.exception()
    # ipyparallel makes this reply itself, when the hub has lost an engine, and wraps the error as a remote one
    if isinstance(problem, ipp.error.EngineError) or (
        isinstance(problem, ipp.error.RemoteError) and problem.ename == "EngineError"
    ):
        return  # its process or its node is gone, of which the agents tell more
    reply = None if problem is not None else future.result()
    outcome = getattr(reply, "_content", {}).get("sky")
    if outcome is None:  # the rank has not carried the order out: nothing more will come
        text = f"{problem or reply}"
        outcome = {"status": "error", "ename": "RankFailed", "evalue": text, "traceback": [text]}
    submission.put("outcome", rank, outcome)
