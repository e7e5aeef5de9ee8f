"""Wheels on their way to hosts that have no environment yet: over the notebook's connection once, then from host to host.

What carries them is what carries values: a value server on each host, and chain replication between them (`data.remote`). A host
has no environment for it yet, so the server runs in the host's own Python, with skymagic's code and two of the wheels unpacked
beside it::

    notebook → host 0       skymagic, pyzmq, xxhash            unpacked in the folder of uploads
    host 0 → each host      the same                           as `relay` has it
    notebook → host 0       all wheels                         a value server on each
    host 0 → host 1 → …     the same, as they arrive           checked by their hash
    each host               links of the wheels, by name       for install.sh, which removes them
"""

from __future__ import annotations

import contextlib
import ipaddress
import mmap
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypeVar, cast

from skymagic.bootstrap import wheel
from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.install import prepare_script
from skymagic.bootstrap.listing import shortage_of
from skymagic.bootstrap.provision import Sent
from skymagic.bootstrap.quoting import any_shell, any_shell_word
from skymagic.bootstrap.remote import chunks, prepared
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import NoWheels, Wanted, Wheelhouse, fetch, kind
from skymagic.cluster import Node
from skymagic.display.starting import StartStep, environment_step
from skymagic.errors import HostError, SkyError
from skymagic.plan.units import size
from skymagic.providers.relay import fetched, handed_out
from skymagic.ssh.connection import Connection
from skymagic.wire import processes
from skymagic.wire.threads import failures, run_all
from skymagic.wire.transport import Transport

if TYPE_CHECKING:
    from skymagic.data.remote.remote_store import RemoteStore

T = TypeVar("T")
CARRIERS = ("pyzmq", "xxhash")
"""Distributions that a value server needs beside skymagic's code."""
NOTICE_BYTES = 5_000_000
"""Size of a wheel above which it is said that it is sent."""
_SHARE = 0.95
"""The part of a disk's free space that wheels may fill; what is needed for them was looked at before."""
_UNREACHED_SECONDS = 20.0


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


@contextlib.contextmanager
def provided(
    targets: Sequence[Target], requirements: Requirements, say: Callable[[str], None]
) -> Iterator[dict[str, Sent]]:
    """Fetch here what hosts need that reach no package index, and send it: once for each kind of host.

    Yields:
        By name of host, what lies there to be installed from; what nobody has installed from is removed at the end.

    Raises:
        HostError: there is no such wheel, or a host has no room for them.
    """
    kinds: dict[object, list[Target]] = {}
    for each in targets:
        kinds.setdefault(kind(each.facts), []).append(each)
    sent: dict[str, Sent] = {}
    try:
        for group in kinds.values():
            house = _fetched(group, requirements, say)
            incoming = send(group, requirements, house.files, say)
            sent |= {each.name: Sent(incoming, house.pins) for each in group}
        yield sent
    except BaseException:
        discard_sent(targets, sent)
        raise


def _fetched(group: Sequence[Target], requirements: Requirements, say: Callable[[str], None]) -> Wheelhouse:
    """The wheels for hosts of one kind, which have room for them."""
    facts, names = group[0].facts, ", ".join(each.name for each in group)
    how = f"no package index can be reached from there; the packages are fetched here, for {facts.system} {facts.machine}, and sent"
    say(StartStep(f"{names}: {how}", "environment", [each.name for each in group]))
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
        raise HostError(group[0].name, reason, "Mend what that says, or let the host reach an index.") from None
    for each in group:
        if words := shortage_of(house.nbytes, each.facts):
            raise HostError(each.name, f"it cannot be set up: {words}")
    return house


def send(
    targets: Sequence[Target], requirements: Requirements, files: Mapping[str, Path], say: Callable[[str], None]
) -> str:
    """Send files to all targets; the name of their folders of uploads, in which they are in ``wheels/``.

    Raises:
        HostError: a host cannot be reached, or has no room. Nothing stays there.
    """
    token = secrets.token_hex(8)
    prepare = prepare_script(requirements, token)
    places = all_of([partial(prepared, each.host, prepare) for each in targets])
    total = sum(path.stat().st_size for path in files.values())
    names = [each.name for each in targets]
    say(StartStep(f"sending {len(files)} wheels ({size(total)}) to {', '.join(names)}", "environment", names))
    try:
        addresses = meeting([each.facts for each in targets])
        if len(targets) == 1 or addresses is None or not all(each.python for each in targets):
            on_each(targets, places, lambda each, place: _upload(each, f"{place}/wheels", files, say))
        else:
            _replicate(targets, places, addresses, files, say)
    except BaseException:
        discard(targets, places)
        raise
    return token


def place_of(target: Target, token: str) -> str:
    """The folder of an upload on a host."""
    return f"{target.facts.folder}/incoming/{token}"


def discard_sent(targets: Sequence[Target], sent: Mapping[str, Sent]) -> None:
    """Remove, as `discard` does, what lies on hosts to be installed from; `sent` is by name of host."""
    left = [each for each in targets if each.name in sent]
    discard(left, [place_of(each, sent[each.name].incoming) for each in left])


def discard(targets: Sequence[Target], places: Sequence[str]) -> None:
    """Remove folders of uploads that nobody will install from, as far as the hosts can be reached."""
    jobs = [
        partial(each.host.run, f"rm -rf {quote(place)}", timeout=20.0)
        for each, place in zip(targets, places, strict=True)
    ]
    run_all(jobs, timeout=25.0)


def on_each(targets: Sequence[Target], places: Sequence[str], call: Callable[[Target, str], None]) -> None:
    """Call with each host and its folder of uploads, side by side. Raises what went wrong first."""
    all_of([partial(call, each, place) for each, place in zip(targets, places, strict=True)])


def all_of(jobs: Sequence[Callable[[], T]]) -> list[T]:
    outcomes = run_all(jobs)
    if problems := failures(outcomes):
        raise problems[0]
    return cast("list[T]", outcomes)


def _upload(
    target: Target, folder: str, files: Mapping[str, Path], say: Callable[[str], None] = lambda line: None
) -> None:
    """Over this host's own connection."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    sent = 0
    for name, path in files.items():
        if sizes[name] > NOTICE_BYTES:
            say(environment_step(target.name, f"sending {name} ({size(sizes[name])})", sent / sum(sizes.values())))
        target.host.upload(f"{folder}/{name}", chunks(path), sizes[name])
        sent += sizes[name]


# -------------------------------------------------------------------------------------------- host to host


def _replicate(
    targets: Sequence[Target],
    places: Sequence[str],
    addresses: Sequence[str],
    files: Mapping[str, Path],
    say: Callable[[str], None],
) -> None:
    carriers = {name: path for name, path in files.items() if name.split("-")[0] in CARRIERS}
    try:
        _upload(targets[0], places[0], carriers)
        with stores(targets, places, addresses, {name: name for name in carriers}, lambda: carriers, say) as store:
            names: dict[str, str] = {}
            sizes = {name: path.stat().st_size for name, path in files.items()}
            for name, path in files.items():
                nbytes, sent = sizes[name], sum(sizes[each] for each in names)
                if nbytes > NOTICE_BYTES:
                    hosts, share = [each.name for each in targets], sent / sum(sizes.values())
                    say(StartStep(f"sending {name} ({size(nbytes)})", "environment", hosts, share))
                key = store.put(None, [mapped(path)], nbytes)
                store.pin([key])
                names[name] = store.name(key)
            store.settle()
            on_each(targets, places, lambda each, place: link(each, place, names))
    except OSError as problem:
        raise HostError(targets[0].name, f"the wheels could not be sent: {problem}") from None


@contextlib.contextmanager
def stores(
    targets: Sequence[Target],
    places: Sequence[str],
    addresses: Sequence[str],
    carriers: Mapping[str, str],
    here: Callable[[], Mapping[str, Path]],
    say: Callable[[str], None],
) -> Iterator[RemoteStore]:
    """A value server for each target's folder of uploads, in the host's own Python; its store is ``store/`` there.

    Args:
        carriers: wheels of `CARRIERS`, which that needs, on the first host: name → path in its folder of uploads.
        here: the same on this machine, for hosts that the first one does not reach.
    """
    from skymagic.data.remote.remote_store import RemoteStore

    first = {wheel.running()[1]: wheel.running()[1], **carriers}
    lacking = _hand_out(targets, places, addresses[0], first)
    files = here() if lacking else {}
    for each, place in lacking:
        _upload_code(each, place)
        _upload(each, place, files)
    paths = [first, *({name: name for name in first} for _ in places[1:])]
    on_each(targets, places, lambda each, place: _unpack(each, place, list(paths[places.index(place)].values())))
    nodes = [
        Node(index, each.name, start_agent=_no_agent, run=_no_process, address=address)
        for index, (each, address) in enumerate(zip(targets, addresses, strict=True))
    ]

    def start(node: Node) -> Transport:
        each, place = targets[node.index], places[node.index]
        words = [each.python, "-P", "-m", processes.VALUES, f"{place}/store"]
        settings = f"PYTHONPATH={any_shell_word(f'{place}/lib')}"
        return each.host.open(any_shell(f"export {settings}; exec {' '.join(map(any_shell_word, words))}"))

    store = RemoteStore(nodes, start, say, retry_timeout=_UNREACHED_SECONDS, share=_SHARE)
    try:
        yield store
    finally:
        store.close()


def _hand_out(
    targets: Sequence[Target], places: Sequence[str], address: str, names: Mapping[str, str]
) -> list[tuple[Target, str]]:
    """Bring skymagic's code to the first host, and from there, with these files of its folder, to the others; who lacks them."""
    _upload_code(targets[0], places[0])
    others = list(zip(targets[1:], places[1:], strict=True))
    with handed_out(targets[0].host, targets[0].python, address, places[0], names) as relay:
        come = [] if relay is None else fetched(relay, [(each.host, each.python, place) for each, place in others])
    return [other for other, well in zip_longest(others, come) if not well]


def _upload_code(target: Target, place: str) -> None:
    _, name, data = wheel.running()
    target.host.upload(f"{place}/{name}", chunks(data), len(data))


def _unpack(target: Target, place: str, wheels: Sequence[str]) -> None:
    """Put what a value server needs beside the host's own Python."""
    python = quote(target.python)
    steps = [f"{python} -m zipfile -e {quote(f'{place}/{each}')} {quote(f'{place}/lib')}" for each in wheels]
    done = target.host.run(" && ".join(steps), timeout=60.0)
    if done.status != 0:
        raise HostError(
            target.name, f"it cannot be set up: {target.python} did not unpack wheels:\n{done.err.strip()[-1000:]}"
        )


def link(target: Target, place: str, names: Mapping[str, str]) -> None:
    """Give what has come its names; what did not fit beside the others lies elsewhere."""
    lines = [f"cd {quote(place)} && mkdir -p wheels || exit 1"]
    for name, stored in names.items():
        lines.append(f"named {quote(stored)} {quote(name)} || exit 1")
    named = (
        'named() { for one in "store/$1" "store/.overflow/$1"; do '
        'if [ -f "$one" ]; then ln "$one" "wheels/$2" 2>/dev/null || cp "$one" "wheels/$2"; return; fi; done; return 1; }'
    )
    rest = 'more=$(readlink store/.overflow 2>/dev/null) && rm -rf "$more"\nrm -rf lib\nexit 0\n'
    done = target.host.run("\n".join([named, *lines, rest]), timeout=600.0)
    if done.status != 0:
        raise HostError(target.name, f"wheels that came could not be named: {done.err.strip()[-1000:]}")


def mapped(path: Path) -> memoryview:
    """A file's bytes, which are not read into memory at once."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _no_agent(state: Callable[[str], None]) -> Transport:
    raise SkyError("there is no agent yet")


def _no_process(*args: str) -> Transport:
    raise SkyError("there is no environment yet")


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
