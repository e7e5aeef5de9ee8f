"""One environment for several hosts of a kind: the first host makes it, and it goes on from host to host.

::

    package index, or notebook → host 0      install.sh, as for a single host
    host 0 → host 1 → host 2 → …             its environment, and skymagic's code (`bootstrap.copying`)
    host 1, host 2, …                        install.sh, which finds both in its folder of uploads

A host that does not get them is set up as a single host. So the notebook's connection and the hosts' package index carry each wheel
once, and two hosts of a kind have the same builds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from shlex import quote
from typing import cast

from skymagic.bootstrap import copying
from skymagic.bootstrap.builds import choose, download_bytes, shortage_of
from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.provision import Supply
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import NoWheels, Wanted, fetch, kind
from skymagic.display.panel import StartStep
from skymagic.errors import HostError
from skymagic.ssh.host import HostConnection
from skymagic.ssh.process import Process
from skymagic.wire import tls
from skymagic.wire.threads import run_all

WORTH_BYTES = (
    50_000_000  # bytes of wheels from which on passing them on is faster than one download per host
)
_END_SECONDS = 15.0


@dataclass(frozen=True)
class Target:
    """A host that gets an environment.

    Attributes:
        name: as users call it. facts: what it is. python: an interpreter there that can make environments; "" for none.
    """

    name: str
    host: HostConnection
    facts: Facts
    python: str


# -- who passes on -------------------------------------------------------------------------------------------------------


def groups(
    targets: Sequence[Target], requirements: Requirements, *, alone: bool = False
) -> list[list[Target]]:
    """Hosts of one kind, the first of which makes an environment for all; pure. A host that shares with none is a group of one.

    Args:
        alone: whether each host that reaches an index downloads for itself.
    """
    kinds: dict[object, list[Target]] = {}
    for each in targets:
        known = (
            kind(each.facts),
            choose(requirements, each.facts),
            each.facts.env,
            each.facts.without_index,
        )
        shares = _shares(each, requirements) and (each.facts.without_index or not alone)
        kinds.setdefault(known if shares else each.name, []).append(each)
    found = []
    for group in kinds.values():
        found += (
            [group]
            if len(group) > 1 and meeting([each.facts for each in group])
            else [[each] for each in group]
        )
    return found


def _shares(target: Target, requirements: Requirements) -> bool:
    """Whether a host's environment can be another one's, and is worth the way."""
    facts = target.facts
    if requirements.prepared or facts.ready or not target.python:
        return False
    if facts.without_index:
        return True
    nbytes = download_bytes(
        requirements, facts
    )  # commands of plugins may not run twice in an environment
    return not requirements.commands and nbytes >= WORTH_BYTES and not shortage_of(nbytes, facts)


def meeting(hosts: Sequence[Facts]) -> list[str] | None:
    """Addresses by which hosts reach each other, as far as their interfaces tell; None where none looks like it. Pure.

    A wrong guess costs a few seconds: a host that cannot follow another is set up as a single host.
    """
    if len({(each.boot, each.addresses) for each in hosts}) == 1 and hosts[0].boot:
        return ["127.0.0.1"] * len(
            hosts
        )  # accounts of one machine; containers on one have addresses of their own
    found = [_private(each) for each in hosts]
    for length in (24, 16, 8):
        for network in dict.fromkeys(
            ipaddress.ip_network(f"{each}/{length}", strict=False) for each in found[0]
        ):
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


# -- what they get -----------------------------------------------------------------------------------------------------


def from_here(
    group: Sequence[Target], requirements: Requirements, say: Callable[[str], None]
) -> Supply:
    """Wheels that the notebook fetches for hosts of one kind that reach no index.

    Raises:
        HostError: there is no such wheel, or a host has no room for them.
    """
    facts, names = group[0].facts, ", ".join(each.name for each in group)
    how = f"no package index can be reached from there; the packages are fetched here, for {facts.system} {facts.machine}, and sent"
    say(_step(f"{names}: {how}", group))
    wanted = Wanted(
        (*requirements.packages, *(() if facts.uv else ("uv",))),
        requirements.minor,
        requirements.preferences,
        indexes=requirements.every_index,
        paths=tuple(path for path in requirements.uploads if path.endswith(".whl")),
        backend=requirements.backend,
    )
    try:
        house = fetch(wanted, facts, lambda words: None)
    except NoWheels as problem:
        reason = f"it reaches no package index, and its packages could not be fetched here either:\n{problem}"
        raise HostError(
            group[0].name, reason, "Fix what that says, or let the host reach an index."
        ) from None
    for each in group:
        if words := shortage_of(house.nbytes, each.facts):
            raise HostError(each.name, f"it cannot be set up: {words}")
    return Supply(house)


@contextlib.contextmanager
def passed_on(
    group: Sequence[Target], requirements: Requirements, say: Callable[[str], None]
) -> Iterator[Mapping[str, Supply]]:
    """Copy the environment of a group's first host to the others, which install from it while the block runs.

    Yields:
        By name of host, what is there; a host that got nothing is not in it. What nobody installs from is removed at the end.
    """
    first, *others = group
    say(
        _step(
            f"{first.name} passes its environment on to {', '.join(each.name for each in others)}",
            group,
        )
    )
    chain = Chain(group, requirements)
    unused: Sequence[Target] = group
    try:
        supplies = chain.run()
        if left := [each.name for each in others if each.name not in supplies]:
            how = (
                "sending the packages from here"
                if first.facts.without_index
                else "downloading the packages there"
            )
            say(f"{', '.join(left)}: the environment could not be copied from {first.name}; {how}")
        chain.discard(
            [each for each in group if each.name not in supplies or not supplies[each.name].copied]
        )
        unused = [each for each in others if each.name in supplies]
        yield supplies
        unused = ()  # install.sh has removed what it has installed from
    finally:
        if unused:
            chain.discard(unused)


def _step(text: str, targets: Sequence[Target]) -> StartStep:
    return StartStep(text, "environment", [each.name for each in targets], None)


class Chain:
    """Programs on several hosts, each of which passes on what the one before it has.

    Args:
        group: with a Python each; the first has the environment.
    """

    def __init__(self, group: Sequence[Target], requirements: Requirements) -> None:
        self.tokens = {each.name: secrets.token_hex(8) for each in group}
        """By name of host, its folder of uploads: hosts may share a home."""
        self._group, self._requirements = group, requirements
        self._environment = f"env/{group[0].facts.env}"
        self._over = threading.Event()
        self._processes: list[Process] = []

    def run(self) -> dict[str, Supply]:
        """Copy; by name of host, what it can be set up from. A host that has the environment already needs nothing."""
        addresses = meeting([each.facts for each in self._group])
        assert addresses is not None
        listen = partial(self._listen, tls.certificate())
        jobs = [
            _Job(partial(listen, *each), self._over)
            for each in zip(self._group, addresses, strict=True)
        ]
        try:
            answers = dict(zip((each.name for each in self._group), run_all(jobs), strict=True))
            links = [each for each in answers.values() if isinstance(each, _Link)]
            if not links or links[0].target is not self._group[0]:
                return {}
            came = run_all(
                [
                    partial(self._take, *each, links[-1])
                    for each in zip([None, *links], links, strict=False)
                ]
            )
            there = {name: Supply() for name, answer in answers.items() if answer is None}
            return there | {
                link.target.name: Supply(copied=self.tokens[link.target.name])
                for link, well in zip(links[1:], came[1:], strict=True)
                if well is True
            }
        finally:
            self._over.set()
            for each in jobs:  # nothing goes on there any more when this has returned
                each.ended.wait(_END_SECONDS)
            run_all([each.close for each in self._processes], timeout=_END_SECONDS)

    def _listen(self, pem: str, target: Target, address: str) -> _Link | None:
        """Start a host's program; None where the environment is there already, for hosts may share a home."""
        place = f"{target.facts.folder}/incoming/{self.tokens[target.name]}"
        if self._over.is_set():
            raise KeyboardInterrupt
        process = target.host.open(f"exec {quote(target.python)} -I -c {quote(copying.program())}")
        self._processes.append(process)
        ready = f"{target.facts.folder}/{self._environment}/.ready"
        unless = "" if target is self._group[0] else ready
        port = _answer(process, {"pem": pem, "address": address, "unless": unless})
        return None if port is None else _Link(target, (address, cast("int", port)), process, place)

    def _take(self, before: _Link | None, link: _Link, last: _Link) -> object:
        """Let a host send or receive; whether all of it is there."""
        names = [self._environment, f"code/{self._requirements.code}"]
        words = {"folder": link.target.facts.folder, "names": names, "last": link is last}
        if before is not None:
            words |= {
                "upstream": before.address,
                "place": link.place,
                "source": self._group[0].facts.folder,
            }
        return _answer(link.process, words)

    def discard(self, targets: Sequence[Target]) -> None:
        """Remove folders of uploads that nobody will install from, as far as the hosts can be reached."""
        places = [
            (each, f"{each.facts.folder}/incoming/{self.tokens[each.name]}") for each in targets
        ]
        jobs = [
            partial(each.host.run, f"rm -rf {quote(place)}", timeout=20.0) for each, place in places
        ]
        run_all(jobs, timeout=25.0)


@dataclass(frozen=True)
class _Link:
    """A host's program that listens.

    Attributes:
        address: by which the next one reaches it, and its port. place: the host's folder of uploads.
    """

    target: Target
    address: tuple[str, int]
    process: Process
    place: str


class _Job:
    """A call that is not begun once `over` is set; `ended` is set unless it is under way."""

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


def _answer(process: Process, words: Mapping[str, object]) -> object:
    """What a program answers. Raises HostError where it does not."""
    with contextlib.suppress(BrokenPipeError):  # it has ended, and its standard error says why
        process.write(json.dumps(words).encode() + b"\n")
    said = b""
    while not said.endswith(b"\n") and (data := process.read()):
        said += data
    if not said:
        raise HostError(process.host, f"it sent nothing: {process.complaint().splitlines()[-1:]}")
    return json.loads(said)
