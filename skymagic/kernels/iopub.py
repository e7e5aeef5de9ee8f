"""The agent's place on iopub: what ranks print and display goes to the notebook under their names."""

from __future__ import annotations

from typing import Any


class Iopub:
    """The agent's own place on the controller's iopub channel, under the ranks' names.

    The high water mark is off on every hop, so that nothing is dropped.
    """

    def __init__(self, engine: dict[str, Any]) -> None:
        import zmq
        from jupyter_client.session import Session

        self.session = Session(
            key=engine["key"].encode(), signature_scheme=engine["signature_scheme"],
            packer=engine["pack"], unpacker=engine["unpack"],
        )  # fmt: skip
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.sndhwm = 0
        self.socket.linger = 2000
        if engine.get("curve_serverkey"):
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
            self.socket.curve_serverkey = engine["curve_serverkey"].encode()
        self.socket.connect(f"{engine['interface']}:{engine['iopub']}")
        self.subscribed = False

    def send(self, ident: str, parent: dict[str, Any], content: dict[str, Any]) -> None:
        """Put a content on the channel, for the client that sent `parent`."""
        if not self.subscribed:  # before the controller has subscribed, messages would be dropped
            self.subscribed = bool(self.socket.poll(5000)) and bool(self.socket.recv())
        self.session.send(
            self.socket,
            "sky_output",
            content,
            parent=parent,
            ident=ident.encode(),
            metadata={"engine": ident},
        )
