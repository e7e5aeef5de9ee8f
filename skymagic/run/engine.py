"""The ipyparallel client: everything of ipyparallel on the notebook's side.

Cells are sent by DirectView, and output arrives in callbacks. The map from ranks to engines is kept
here, because engine IDs come in any order and grow with each replaced rank.
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
from skymagic.run.submission import OutputArrived, RankFinished, Submission
from skymagic.wire import agent as wire
from skymagic.wire.order import Order, encode
from skymagic.wire.outcome import Failure, Outcome
from skymagic.wire.output import OutputComplete
from skymagic.wire.typed import JsonObject, read

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 20
"""Seconds for the controller to answer a new client."""
REGISTRATION_POLL = 0.5
"""Seconds without news between queries to the hub for registered ranks."""
PURGE_AFTER = 100
"""Number of finished requests that the hub may remember.

A purge takes time, and the next cell would wait for it.
"""
PURGE_BYTES = 4 << 20
"""Total size in bytes of sent requests that the hub may remember."""


@contextlib.contextmanager
def without_key_warning() -> Iterator[None]:
    """Silence jupyter_client's warning about sessions without a key inside the block.

    The controller's sockets are files that only the user can open, or are encrypted. IPython would
    show the warning in a terminal, papermill and nbclient.
    """
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
    """ipyparallel's client without its magics; callbacks are registered before anything is sent."""

    hook: Any = None
    """Called with each request's future before the request is sent."""
    changed = threading.Condition()
    """Notified when an engine has registered.

    All clients share it, because `ipp.Client` starts to listen before its subclass could create its
    own.
    """

    connected: Any = None
    """Monitor socket that becomes readable once output of the ranks can arrive.

    Everything that the controller published before is lost, including output of cells sent
    immediately after attaching.
    """

    @observe("_iopub_socket")
    def _watch(self, change: JsonObject) -> None:  # the socket is not connected yet
        self.connected = change["new"].get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def activate(self, *args: Any, **kwargs: Any) -> None:
        """Do not register ipyparallel's magics in the notebook."""

    def send_execute_request(self, socket: Any, code: str, **kwargs: Any) -> Any:
        return super().send_execute_request(socket, code, message_future_hook=self.hook, **kwargs)

    def _register_engine(self, msg: Any) -> None:
        super()._register_engine(msg)
        with self.changed:
            self.changed.notify_all()

    def query_registrations(self) -> None:
        """Ask the hub for its engines.

        Registrations that the hub published before this client's subscription reached it are lost
        (a slow joiner).
        """
        self._send(self._query_socket, "connection_request").add_done_callback(
            self._on_registrations
        )

    def unregister(self, engine: int) -> None:
        """Notify the hub that an engine is gone.

        The hub does not reply, so the client must not track a request.
        """
        send = self.session.send
        content = {"id": engine}
        self._io_loop.add_callback(
            lambda: send(self._query_socket, "unregistration_request", content=content)
        )

    def _on_registrations(self, answer: Any) -> None:
        """Update the engines on the client's thread, where news of engines arrive too."""
        if not answer.cancelled() and answer.exception() is None:
            self._update_engines(dict(answer.result()["content"]["engines"]))
            with self.changed:
                self.changed.notify_all()


class RankEngine:
    """Connection to the controller, and the map from ranks to its engines.

    Args:
        connection: the controller's connection info for clients.
        forward: for a controller on another machine, maps an address and port there to a local port
            on 127.0.0.1 that leads there.

    Raises:
        ProvisionError: the controller does not answer.
    """

    def __init__(
        self, connection: JsonObject, forward: Callable[[str, int], int] | None = None
    ) -> None:
        logging.getLogger("ipyparallel").setLevel(logging.ERROR)
        try:
            local = (
                with_forwarded_ports(connection, forward)
                if forward is not None
                else dict(connection)
            )
            with without_key_warning():
                self._client = _Client(local, timeout=CONNECT_TIMEOUT)
            # output published before the subscription is lost, so wait until it is in place
            if not self._client.connected.poll(1000 * CONNECT_TIMEOUT):
                self.close()
                raise TimeoutError("nothing that ranks show would arrive")
        except (TimeoutError, OSError) as problem:
            raise ProvisionError(
                f"the controller does not answer: {problem}", code="start-timeout"
            ) from problem
        self._engines: dict[int, int] = {}
        self._sending = threading.Lock()  # the client's hook serves one order at a time
        self._purgeable: list[str] = []  # requests of finished runs that the hub still remembers
        self._purgeable_bytes = 0
        self._unanswered: set[Any] = set()  # requests of finished runs to ranks that are gone

    def bind(self, idents: Mapping[int, str], timeout: float) -> None:
        """Find the engine of each of these ranks; a failure keeps those that were found.

        Args:
            timeout: seconds without any new registration after which the wait ends.

        Raises:
            ProvisionError: some ranks have not registered.
        """
        deadline = time.monotonic() + timeout
        client, before = self._client, len(idents)
        with client.changed:
            while True:
                engines = {ident: number for number, ident in list(client._engines.items())}
                missing = [rank for rank, ident in idents.items() if ident not in engines]
                if not missing:
                    break
                if len(missing) < before:  # many ranks on few cores register one after another
                    before, deadline = len(missing), time.monotonic() + timeout
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self._engines.update(
                        {rank: engines[ident] for rank, ident in idents.items() if ident in engines}
                    )
                    raise ProvisionError(
                        f"{rank_words(missing)} did not register with the controller within "
                        f"{timeout:.0f} s: "
                        "%sky_restart starts them again",
                        code="start-timeout",
                    )
                # without news, ask: a broadcast from before the subscription is lost
                if not client.changed.wait(min(remaining, REGISTRATION_POLL)):
                    client.query_registrations()
        self._engines.update({rank: engines[ident] for rank, ident in idents.items()})

    def answers(self, timeout: float) -> bool:
        """Return True if the controller answers within `timeout` seconds."""
        try:
            self._client._send(self._client._query_socket, "connection_request").result(timeout)
        except Exception:
            return False
        return True

    def unbound(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks without an engine: not registered yet, or given up by the hub."""
        present = {*self._client.ids}
        return [rank for rank in ranks if self._engines.get(rank) not in present]

    def submit(self, submission: Submission, order: Order, source: str) -> None:
        """Send an order to the submission's bound ranks, and return at once."""
        unbound = {*self.unbound(submission.ranks)}
        ranks = [rank for rank in submission.ranks if rank not in unbound]
        if not ranks:
            return
        if unbound:
            logger.warning("order not sent: run=%s ranks=%s", submission.number, sorted(unbound))
        code = encode(order, source)
        submission.nbytes = len(code) * len(ranks)
        by_engine = {self._engines[rank]: rank for rank in ranks}
        # DirectView sends to its targets in order, so the futures arrive in that order
        pending = iter(ranks)

        def hook(future: Any) -> None:
            rank = next(pending)
            submission.futures[rank] = future
            future.iopub_callbacks.append(lambda message: _on_iopub(submission, future, message))
            future.add_done_callback(lambda done: _on_reply(submission, rank, done))

        # The hook is called once for each target before its request is sent, so that no reply can
        # arrive before the callbacks are registered.
        with self._sending:
            self._client.hook = hook
            try:
                view = self._client[list(by_engine)]
                view.block = False
                view.execute(code, silent=False)
                logger.debug(
                    "order is sent: kind=%s run=%s ranks=%s bytes=%s",
                    type(order).__name__,
                    submission.number,
                    ranks,
                    len(code),
                )
            finally:
                self._client.hook = None

    def purge(self, submission: Submission) -> None:
        """Let the client forget a finished run and, from time to time, the hub forget earlier runs.

        Requests to dead ranks that were never answered are purged after ipyparallel has given them
        up.
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
            # DictDB keeps the code of each request until it is purged
            self._purgeable_bytes += submission.nbytes
        if not due:
            return
        # This run's requests are purged the next time: the hub may still be handling them, and
        # would then refuse the whole purge.
        with contextlib.suppress(Exception):  # a controller that is gone has nothing to forget
            client._send(client._query_socket, "purge_request", content={"msg_ids": due})

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget engines that are gone, here and at the hub.

        The hub then replies to their pending requests.
        """
        for rank in ranks:
            if (engine := self._engines.pop(rank, None)) is not None:
                # a controller that is gone has nothing to forget
                with contextlib.suppress(Exception):
                    self._client.unregister(engine)

    def close(self) -> None:
        """Close the connections; safe to call twice."""
        with contextlib.suppress(Exception):
            self._client.close(linger=0)
            self._client.connected.close()


def with_forwarded_ports(
    connection: Mapping[str, Any], forward: Callable[[str, int], int]
) -> dict[str, Any]:
    """Return the connection info with its ports forwarded to 127.0.0.1.

    There are seven ports, regardless of the number of ranks.
    """
    address = connection["interface"].partition("://")[2]
    ports = {
        name: forward(address, value) for name, value in connection.items() if type(value) is int
    }
    return {**connection, **ports, "interface": "tcp://127.0.0.1", "location": socket.gethostname()}


def _on_iopub(submission: Submission, future: Any, message: JsonObject) -> None:
    if message["header"]["msg_type"] != "sky_output":
        return
    output = wire.CODEC.from_plain(message["content"]["output"])
    assert isinstance(output, wire.Output)
    submission.put(OutputArrived(output))
    if isinstance(output, OutputComplete) and not future.output.done():
        # all output has arrived: the client may forget the request once it is answered
        future.output.set_result(None)


def _on_reply(submission: Submission, rank: int, future: Any) -> None:
    problem = future.exception()
    # ipyparallel creates this reply itself if the hub has lost an engine, and wraps it as a remote
    # error
    if isinstance(problem, ipp.error.EngineError) or (
        isinstance(problem, ipp.error.RemoteError) and problem.ename == "EngineError"
    ):
        return  # its process or its node is gone, and the agents report that in more detail
    reply = None if problem is not None else future.result()
    content = getattr(reply, "_content", {}).get("sky")
    if content is None:  # the rank did not execute the order, so no outcome will follow
        text = f"{problem or reply}"
        outcome = Outcome(failure=Failure("RankFailed", text, (text,)))
    else:
        try:
            outcome = read(Outcome, content)
        except ValueError as problem:  # the run must not wait for a rank that has replied
            outcome = Outcome(failure=Failure("RankFailed", f"{problem}"))
    submission.put(RankFinished(rank, outcome))
