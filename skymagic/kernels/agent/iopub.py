"""A publisher on ipyparallel's iopub channel: what ranks print and display goes to the notebook under their names."""

from __future__ import annotations

from typing import Any


class Iopub:
    """The agent's own place on the controller's iopub channel, under the ranks' names.

    The high water mark is off on every hop, so that nothing is dropped.

    Args:
        engine: what the controller tells engines.
    """

    def __init__(self, engine: dict[str, Any]) -> None:
        self._engine = engine
        self._socket: Any = None
        self._session: Any = None
        self._subscribed = False

    def open(self) -> None:
        """Connect; twice is safe. It takes an import of a tenth of a second, for which ranks should not have to wait."""
        if self._socket is not None:
            return
        import zmq
        from jupyter_client.session import Session

        engine = self._engine
        scheme, packer, unpacker = (engine[name] for name in ("signature_scheme", "pack", "unpack"))
        self._session = Session(key=engine["key"].encode(), signature_scheme=scheme, packer=packer, unpacker=unpacker)
        socket = zmq.Context().socket(zmq.XPUB)
        socket.sndhwm = 0
        socket.linger = 2000
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = engine["curve_serverkey"].encode()
        socket.connect(f"{engine['interface']}:{engine['iopub']}")
        self._socket = socket

    def send(self, ident: str, parent: dict[str, Any], content: dict[str, Any]) -> None:
        """Put a content on the channel, for the client that sent `parent`."""
        self.open()
        # an XPUB socket sees subscriptions: before the controller has subscribed, messages would be dropped
        if not self._subscribed:
            self._subscribed = bool(self._socket.poll(5000)) and bool(self._socket.recv())
        self._session.send(
            self._socket, "sky_output", content, parent=parent, ident=ident.encode(), metadata={"engine": ident}
        )
