"""How the nodes of a cluster find out by which addresses they reach each other; the notebook may use others."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Iterable, Mapping

from skymagic.kernels.network import interface_addresses
from skymagic.wire.boot import boot_id

PATIENCE = 2.0
"""Seconds in which a place must answer."""


def machine() -> str:
    """The same text for all processes that reach each other by 127.0.0.1, and for no others."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"
    return f"{boot_id()} {socket.gethostname()}"


def addresses() -> list[str]:
    """This machine's private IPv4 addresses other than loopback; public ones are no place to listen."""
    found = {address for address in [*interface_addresses().values(), *_of_hostname()] if _private(address)}
    return sorted(found, key=ipaddress.IPv4Address)


def _private(address: str) -> bool:
    known = ipaddress.IPv4Address(address)
    shared = known in ipaddress.IPv4Network("100.64.0.0/10")  # carriers' and tailnets'
    return (known.is_private or shared) and not known.is_loopback and not known.is_unspecified


def _of_hostname() -> list[str]:
    with contextlib.suppress(OSError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return []


class Places:
    """Listens on addresses of this machine, and says a word to whoever comes.

    Args:
        word: what is said.
        addresses: where.
    """

    def __init__(self, word: str = "", addresses: Iterable[str] = ()) -> None:
        self._word = word
        self.listeners: list[socket.socket] = []
        for address in addresses:
            with contextlib.suppress(OSError):
                self.listeners.append(socket.create_server((address, 0)))

    @property
    def ports(self) -> dict[str, int]:
        """Address → port."""
        return dict(listener.getsockname()[:2] for listener in self.listeners)

    def answer(self, listener: socket.socket) -> None:
        """Say the word to one who came."""
        with contextlib.suppress(OSError):
            guest, _ = listener.accept()
            with guest:
                guest.sendall(self._word.encode())

    def close(self, but: str = "") -> None:
        """Stop listening, but at this address; twice is safe."""
        kept = [listener for listener in self.listeners if but and listener.getsockname()[0] == but]
        for listener in self.listeners:
            if listener not in kept:
                listener.close()
        self.listeners = kept


def reach(places: Mapping[str, int], word: str) -> dict[str, str]:
    """The addresses at which the word is said, each with the address that this machine has on the way there."""
    ways: dict[str, str] = {}
    threads = [
        threading.Thread(target=_try, args=(address, port, word, ways), daemon=True)
        for address, port in places.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    return dict(ways)


def _try(address: str, port: int, word: str, ways: dict[str, str]) -> None:
    with contextlib.suppress(OSError), socket.create_connection((address, port), PATIENCE) as guest:
        mine = str(guest.getsockname()[0])
        said = b""
        while piece := guest.recv(1024):
            said += piece
        if said == word.encode():
            ways[address] = mine
