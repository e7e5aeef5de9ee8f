"""Wheels for hosts that reach no package index: fetched here, and over the notebook's connection once, then from host to host.

Several hosts of a kind have a mirror each (`chain`), and the first gets the wheels over its standard input; they lie in ``wheels/``
of the folder of uploads then, for install.sh, which removes them. What does not get through to a host, or a host that has no Python
of the notebook's minor version, goes there over a connection of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from skymagic.bootstrap.install import prepare_script
from skymagic.bootstrap.listing import shortage_of
from skymagic.bootstrap.provision import Sent
from skymagic.bootstrap.remote import announced, chunks, nbytes_of, sha256_of, upload
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import NoWheels, Wanted, Wheelhouse, fetch, kind
from skymagic.display.starting import StartStep, environment_step
from skymagic.errors import HostError
from skymagic.plan.units import size
from skymagic.providers.chain import Chain, Target, discard, meeting, uploads
from skymagic.wire.threads import failures, run_all

Files = Mapping[str, bytes | Path]
"""Contents by name in a folder of uploads."""


def provided(
    targets: Sequence[Target], requirements: Requirements, say: Callable[[str], None]
) -> Iterator[dict[str, Sent]]:
    """Fetch here what hosts need that reach no package index, and send it: once for each kind of host.

    Yields:
        For each kind, by name of host, what lies there to be installed from.

    Raises:
        HostError: there is no such wheel, or a host has no room for them.
    """
    kinds: dict[object, list[Target]] = {}
    for each in targets:
        kinds.setdefault(kind(each.facts), []).append(each)
    for group in kinds.values():
        house = _fetched(group, requirements, say)
        incoming = send(group, requirements, house.files, say)
        yield {each.name: Sent(incoming, house.pins, frozenset(uploads(requirements))) for each in group}


def _fetched(group: Sequence[Target], requirements: Requirements, say: Callable[[str], None]) -> Wheelhouse:
    """The wheels for hosts of one kind, which have room for them."""
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
    total = sum(map(nbytes_of, files.values()))
    say(_step(f"sending {len(files)} wheels ({size(total)}) to {', '.join(each.name for each in targets)}", targets))
    whole = {**{f"wheels/{name}": path for name, path in files.items()}, **uploads(requirements)}
    try:
        lacking = _passed(targets, prepare, whole, say)
        left = [each for each in targets if lacking.get(each.name, whole)]
        if lacking and left:
            words = "the wheels do not get through from the other hosts; sending them from here"
            say(f"{', '.join(each.name for each in left)}: {words}")
        jobs = [partial(_upload, each, prepare, lacking.get(each.name, whole), say) for each in left]
        # a first host that has no room says so before the others get what it should have passed on
        for some in (jobs[:1], jobs[1:]) if lacking else (jobs,):
            if problems := failures(run_all(some)):
                raise problems[0]
    except BaseException:
        discard([(each, token) for each in targets])
        raise
    return token


def _passed(targets: Sequence[Target], prepare: str, files: Files, say: Callable[[str], None]) -> dict[str, Files]:
    """Send files to one host, which passes them on to the others while they come.

    Returns:
        By name of host, what it lacks still; hosts that took no part are not in it.
    """
    able = [each for each in targets if each.python]
    addresses = meeting([each.facts for each in able]) if len(able) > 1 else None
    if addresses is None:
        return {}
    chain, digests = Chain(able, addresses), dict[str, str]()
    try:
        chain.listen(prepare, lambda over: digests.update({name: sha256_of(each) for name, each in files.items()}))
        sizes = {name: nbytes_of(each) for name, each in files.items()}
        one_by_one = announced(files, lambda step: say(_step(step, able)))
        feed = (data for _, content in one_by_one for data in chunks(content))
        lacking = chain.serve({"sent": sizes}, feed, digests)
    finally:
        chain.close()
    return {host: {name: files[name] for name in lost} for host, lost in lacking.items()}


def _upload(target: Target, prepare: str, files: Files, say: Callable[[str], None]) -> None:
    """Over this host's own connection."""
    upload(target.host, prepare, files, lambda step: say(environment_step(target.name, step)))


def _step(text: str, targets: Sequence[Target]) -> StartStep:
    return StartStep(text, "environment", [each.name for each in targets], getattr(text, "share", None))
