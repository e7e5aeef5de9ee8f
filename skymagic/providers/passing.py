"""Downloads once per pool: of hosts of one kind one fetches the wheels from its indexes, and they go on from host to host.

::

    host 0              chooses versions        and finds where their wheels are
    each host           a mirror                as `bootstrap.mirror` has it, asked by the host's own uv while install.sh runs
    host 0 → host 1 …   skymagic's code, and each wheel that somebody asks for, while it comes

What a mirror does not bring, its host downloads.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from shlex import quote

from skymagic.bootstrap import mirror, wheel
from skymagic.bootstrap.builds import choose
from skymagic.bootstrap.fetching import SOURCES, can_fetch, fetch_script
from skymagic.bootstrap.install import plan_install, prepare_script
from skymagic.bootstrap.listing import download_bytes, shortage_of
from skymagic.bootstrap.progress import InstallProgress
from skymagic.bootstrap.provision import Sent
from skymagic.bootstrap.remote import prepared, upload
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import kind
from skymagic.display.starting import StartStep
from skymagic.errors import HostError, PoolError
from skymagic.plan.units import size
from skymagic.providers.sending import Target, discard, discard_sent, meeting, place_of
from skymagic.ssh.process import Process
from skymagic.wire import tls
from skymagic.wire.threads import failures, run_all

WORTH_BYTES = 50_000_000
"""Bytes of wheels from which on it is faster to pass them on than to let each host download its own."""
_NEAREST = 3
"""Hosts before it that a mirror asks, beside the first of all."""
_START_SECONDS = 60.0
_END_SECONDS = 15.0


def groups(targets: Sequence[Target], requirements: Requirements) -> list[list[Target]]:
    """Hosts that should have their wheels fetched by the first of them; pure. The others download their own."""
    kinds: dict[object, list[Target]] = {}
    for each in targets:
        nbytes = download_bytes(requirements, each.facts)
        if can_fetch(requirements, each.facts) and nbytes >= WORTH_BYTES and not shortage_of(nbytes, each.facts):
            kinds.setdefault((kind(each.facts), choose(requirements, each.facts)), []).append(each)
    return [group for group in kinds.values() if len(group) > 1 and meeting([each.facts for each in group])]


@contextlib.contextmanager
def passed_on(
    targets: Sequence[Target], requirements: Requirements, say: Callable[[str], None]
) -> Iterator[dict[str, Sent]]:
    """Let one host of each kind fetch what all of them need, where that is worth it, while the block installs.

    Yields:
        By name of host, what it installs from; what nobody has installed from is removed at the end.
    """
    sent: dict[str, Sent] = {}
    mirrors: list[Process] = []
    try:
        for group in groups(targets, requirements):
            sent |= _passed(group, requirements, mirrors, say)
        yield sent
    except BaseException:
        _close(mirrors)
        discard_sent(targets, sent)
        raise
    finally:
        _close(mirrors)


def _close(mirrors: Sequence[Process]) -> None:
    run_all([each.close for each in mirrors], timeout=_END_SECONDS)


def _passed(
    group: Sequence[Target], requirements: Requirements, mirrors: list[Process], say: Callable[[str], None]
) -> dict[str, Sent]:
    token = secrets.token_hex(8)
    nbytes = size(download_bytes(requirements, group[0].facts))
    words = f"{group[0].name} fetches the packages (about {nbytes}), and passes them on to {_names(group[1:])}"
    say(StartStep(words, "environment", [each.name for each in group]))
    sent: dict[str, Sent] = {}
    made: list[Process] = []
    try:
        sent = {each.name: Sent(token) for each in _mirrored(group, token, requirements, made)}
        if left := [each for each in group if each.name not in sent]:
            say(f"{_names(left)}: the packages do not get through from the other hosts; downloading them there")
    except (PoolError, OSError) as problem:
        say(f"{_names(group)}: the packages could not be passed on; each downloads its own ({_short(problem)})")
    finally:
        mirrors += made
        if not sent:
            _close(made)  # they write to what is removed now
        left = [each for each in group if each.name not in sent]
        discard(left, [place_of(each, token) for each in left])
    return sent


def _names(targets: Sequence[Target]) -> str:
    return ", ".join(each.name for each in targets)


def _short(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return "; ".join([*lines[:1], *lines[1:][-1:]])


def _mirrored(
    group: Sequence[Target], token: str, requirements: Requirements, mirrors: list[Process]
) -> Iterator[Target]:
    """Those of a group whose mirrors serve. Raises what is wrong with the first."""
    addresses = meeting([each.facts for each in group])
    assert addresses is not None
    pem, prepare = tls.certificate(), prepare_script(requirements, token)
    over = threading.Event()

    def listening(each: Target, address: str) -> tuple[Process, object]:
        place = prepared(each.host, prepare)
        if over.is_set():
            raise KeyboardInterrupt
        process = each.host.open(f"exec {quote(each.python)} -I -c {quote(mirror.program())}")
        mirrors.append(process)
        known = {"pem": pem, "address": address, "folder": each.facts.folder, "place": place}
        return process, _asked(process, known)

    mirrored = [partial(listening, each, address) for each, address in zip(group, addresses, strict=True)]
    calls: list[Callable[[], object]] = [partial(_choose, group[0], token, requirements, over), *mirrored]
    jobs = [_Job(each, over) for each in calls]
    try:
        none, *made = run_all(jobs)
    finally:
        over.set()
        for each in jobs:  # nothing goes on there any more when this has returned
            each.ended.wait(_END_SECONDS)
    if problems := failures([none, made[0]]):
        raise problems[0]
    names = [wheel.running()[1], *(Path(path).name for path in requirements.uploads)]
    place = place_of(group[0], token)
    serving = [(n, *one) for n, one in enumerate(made) if isinstance(one, tuple)]
    ports = [(addresses[n], port) for n, _, port in serving]
    starts: list[Mapping[str, object]] = [
        {"sources": f"{place}/{SOURCES}", "files": {name: f"{place}/{name}" for name in (mirror.PAGES, *names)}},
        *(
            {"upstream": [*ports[max(i - _NEAREST, 1) : i][::-1], ports[0]], "bring": names}
            for i in range(1, len(ports))
        ),
    ]
    asked = [partial(_asked, process, start) for (_, process, _), start in zip(serving, starts, strict=True)]
    for (n, _, _), lacking in zip(serving, run_all(asked, timeout=_START_SECONDS), strict=True):
        if isinstance(lacking, list) and mirror.PAGES not in lacking:
            yield group[n]


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


def _asked(process: Process, words: Mapping[str, object]) -> object:
    """A mirror's answer. Raises HostError where there is none."""
    process.write(json.dumps(words).encode() + b"\n")
    said = b""
    while not said.endswith(b"\n") and (data := process.read()):
        said += data
    if not said:
        raise HostError(process.host, f"it passes nothing on: {process.complaint().splitlines()[-1:]}")
    return json.loads(said)


def _choose(target: Target, token: str, requirements: Requirements, over: threading.Event) -> None:
    """Let a host choose for all of its kind. Raises HostError with the last lines that it printed."""
    plan = plan_install(requirements, target.facts, token, "")
    _, name, data = wheel.running()
    files: dict[str, bytes | Path] = {name: data, **{Path(path).name: Path(path) for path in requirements.uploads}}
    upload(target.host, prepare_script(requirements, token), files, lambda step: None)
    progress = InstallProgress(lambda step: None, requirements.hidden)

    def feed(line: str) -> None:
        if over.is_set():
            raise KeyboardInterrupt
        progress.feed(line)

    done = target.host.run(fetch_script(plan, target.facts), lines=feed)
    if not progress.done:
        raise HostError(target.name, progress.failure(done.status, done.err, requirements.minor).reason)
