"""Hosts that have no environment yet, and files that go from one to the next: a mirror on each (`bootstrap.mirror`), in the host's own Python.

::

    notebook → host 0       a mirror's program, and what it has or gets
    host 0 → host 1 → …     each file that is brought or asked for, while it comes
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import cast

from skymagic.bootstrap import mirror, wheel
from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.remote import prepared
from skymagic.bootstrap.requirements import Requirements
from skymagic.errors import HostError
from skymagic.ssh.connection import Connection
from skymagic.ssh.process import Process
from skymagic.wire import tls
from skymagic.wire.threads import run_all

_Listening = tuple[str, tuple[str, object], Process]
"""A host's name, where its mirror listens, and the mirror."""
_NEAREST = 3
"""Hosts before it that a mirror asks, beside the first of all."""
_END_SECONDS = 15.0


@dataclass(frozen=True)
class Target:
    """A host that gets wheels.

    Attributes:
        name: as users call it. facts: what it is. python: an interpreter there, of the notebook's minor version; "" for none.
    """

    name: str
    host: Connection
    facts: Facts
    python: str


class Chain:
    """Mirrors on several hosts: each asks those before it, and the first has what it is told of.

    Args:
        targets: with a Python each.
        addresses: of each, by which the others reach it.
    """

    def __init__(self, targets: Sequence[Target], addresses: Sequence[str]) -> None:
        self.targets = targets
        self._addresses = addresses
        self._processes: list[Process] = []
        self._listening: list[_Listening] = []

    def listen(self, prepare: str, beside: Callable[[threading.Event], None]) -> BaseException | None:
        """Start a mirror on each host that can.

        Args:
            prepare: the script that makes the folder of uploads.
            beside: called meanwhile, with what is set when nobody waits any more.

        Returns:
            What is wrong with the first. Raises what `beside` does.
        """
        pem, over = tls.certificate(), threading.Event()

        def one(each: Target, address: str) -> _Listening:
            place, _ = prepared(each.host, prepare)
            if over.is_set():
                raise KeyboardInterrupt
            process = each.host.open(f"exec {quote(each.python)} -I -c {quote(mirror.program())}")
            self._processes.append(process)
            known = {"pem": pem, "address": address, "folder": each.facts.folder, "place": place}
            return each.name, (address, asked(process, known)), process

        mirrors = [partial(one, each, address) for each, address in zip(self.targets, self._addresses, strict=True)]
        calls: list[Callable[[], object]] = [partial(beside, over), *mirrors]
        jobs = [_Job(each, over) for each in calls]
        try:
            none, *outcomes = run_all(jobs)
        finally:
            over.set()
            for each in jobs:  # nothing goes on there any more when this has returned
                each.ended.wait(_END_SECONDS)
        if isinstance(none, BaseException):
            raise none
        self._listening = [cast("_Listening", each) for each in outcomes if not isinstance(each, BaseException)]
        return outcomes[0] if isinstance(outcomes[0], BaseException) else None

    def serve(
        self,
        first: Mapping[str, object],
        feed: Iterable[memoryview],
        bring: Mapping[str, str],
        timeout: float = float("inf"),
    ) -> dict[str, Sequence[str]]:
        """Let all that listen bring files, and serve until `close`.

        Args:
            first: what the mirror of the first host is told beside that. feed: content of what is sent to it.
            bring: SHA-256 of the files by name (`mirror.Mirror.start`).

        Returns:
            By name of host, the files that it lacks; a host that takes no part any more is not in it.
        """
        ports = [place for _, place, _ in self._listening]
        jobs = []
        for i, (_, _, process) in enumerate(self._listening):
            source = {"upstream": [*ports[max(i - _NEAREST, 1) : i][::-1], ports[0]]} if i else first
            jobs.append(partial(asked, process, {"bring": bring, **source}, () if i else feed))
        answers = zip(self._listening, run_all(jobs, timeout=timeout), strict=True)
        return {name: lacking for (name, _, _), lacking in answers if isinstance(lacking, list)}

    def close(self) -> None:
        """End all mirrors; twice is safe."""
        run_all([each.close for each in self._processes], timeout=_END_SECONDS)


class _Job:
    """A call that is not begun once `over` is set; `ended` is set unless it goes on."""

    def __init__(self, call: Callable[[], object], over: threading.Event) -> None:
        self._call, self._over, self.ended = call, over, threading.Event()
        self.ended.set()

    def __call__(self) -> object:
        self.ended.clear()
        try:
            if self._over.is_set():
                raise KeyboardInterrupt
            return self._call()
        finally:
            self.ended.set()


def uploads(requirements: Requirements) -> dict[str, bytes | Path]:
    """What every new host gets of the notebook's own, by name in the folder of uploads: skymagic's code, and wheels."""
    _, name, data = wheel.running()
    return {name: data, **{Path(path).name: Path(path) for path in requirements.uploads if path.endswith(".whl")}}


def asked(process: Process, words: Mapping[str, object], feed: Iterable[memoryview] = ()) -> object:
    """A mirror's answer. Raises HostError where there is none."""
    with contextlib.suppress(BrokenPipeError):  # one that cannot keep what it gets says so, and ends
        process.write(json.dumps(words).encode() + b"\n")
        for piece in feed:
            process.write(piece)
    said = b""
    while not said.endswith(b"\n") and (data := process.read()):
        said += data
    if not said:
        raise HostError(process.host, f"it passes nothing on: {process.complaint().splitlines()[-1:]}")
    return json.loads(said)


def place_of(target: Target, token: str) -> str:
    """The folder of an upload on a host."""
    return f"{target.facts.folder}/incoming/{token}"


def discard(uploaded: Sequence[tuple[Target, str]]) -> None:
    """Remove folders of uploads, by host and name, that nobody will install from, as far as the hosts can be reached."""
    jobs = [partial(each.host.run, f"rm -rf {quote(place_of(each, name))}", timeout=20.0) for each, name in uploaded]
    run_all(jobs, timeout=25.0)


def meeting(hosts: Sequence[Facts]) -> list[str] | None:
    """Addresses by which hosts reach each other, as far as their interfaces tell; None where none looks like it. Pure.

    A wrong guess costs a few seconds: a host that cannot follow another gets its wheels from the notebook.
    """
    if len({(each.boot, each.addresses) for each in hosts}) == 1 and hosts[0].boot:
        return ["127.0.0.1"] * len(hosts)  # accounts of one machine; containers on one have addresses of their own
    found = [_private(each) for each in hosts]
    for length in (24, 16, 8):
        for network in dict.fromkeys(ipaddress.ip_network(f"{each}/{length}", strict=False) for each in found[0]):
            among = [[each for each in addresses if each in network] for addresses in found]
            if all(among) and len({each[0] for each in among}) == len(hosts):
                return [str(each[0]) for each in among]
    return None


def _private(facts: Facts) -> list[ipaddress.IPv4Address]:
    """A host's private IPv4 addresses, without those of bridges of its own; nothing listens on a public one."""
    own = ("docker", "virbr", "br-", "veth", "cni", "podman", "lo")
    found = []
    for interface, text in facts.addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        usable = address.is_private and not address.is_loopback and not address.is_link_local
        if isinstance(address, ipaddress.IPv4Address) and usable and not interface.startswith(own):
            found.append(address)
    return found
