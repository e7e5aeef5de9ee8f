"""Downloads once per pool: of hosts of one kind one fetches the wheels from its indexes, and they go on from host to host.

::

    host 0              resolves, downloads     each wheel goes into its store as soon as it is there
    host 0 → host 1 …   all wheels              as `sending` has it; the notebook's connection carries what carries them
    each host           links of the wheels     for install.sh, as if the notebook had sent them

Whatever goes wrong, a host that has not got them downloads its own.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from shlex import quote

from skymagic.bootstrap.builds import choose
from skymagic.bootstrap.fetching import FetchedWheel, FetchProgress, can_fetch, fetch_script
from skymagic.bootstrap.install import plan_install, prepare_script
from skymagic.bootstrap.listing import download_bytes, packages, shortage_of
from skymagic.bootstrap.provision import Sent
from skymagic.bootstrap.remote import prepared as prepare
from skymagic.bootstrap.remote import upload
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import kind
from skymagic.data.remote.replication import NoSource
from skymagic.display.starting import StartStep
from skymagic.errors import HostError, PoolError
from skymagic.plan.image import project
from skymagic.plan.units import size
from skymagic.providers.sending import (
    CARRIERS,
    NOTICE_BYTES,
    Target,
    all_of,
    discard,
    discard_sent,
    link,
    meeting,
    on_each,
    place_of,
    stores,
)

WORTH_BYTES = 50_000_000
"""Bytes of wheels from which on it is faster to pass them on than to let each host download its own."""


def groups(targets: Sequence[Target], requirements: Requirements) -> list[list[Target]]:
    """Hosts that should have their wheels fetched by the first of them; pure. The others download their own."""
    kinds: dict[object, list[Target]] = {}
    for each in targets:
        nbytes = download_bytes(requirements, each.facts)
        if can_fetch(requirements, each.facts) and nbytes >= WORTH_BYTES and not shortage_of(2 * nbytes, each.facts):
            kinds.setdefault((kind(each.facts), choose(requirements, each.facts)), []).append(each)
    return [group for group in kinds.values() if len(group) > 1 and meeting([each.facts for each in group])]


@contextlib.contextmanager
def passed_on(
    targets: Sequence[Target], requirements: Requirements, say: Callable[[str], None]
) -> Iterator[dict[str, Sent]]:
    """Let one host of each kind fetch what all of them need, where that is worth it.

    Yields:
        By name of host, what lies there to be installed from; what nobody has installed from is removed at the end.
    """
    sent: dict[str, Sent] = {}
    try:
        for group in groups(targets, requirements):
            sent |= _passed(group, requirements, say)
        yield sent
    except BaseException:
        discard_sent(targets, sent)
        raise


def _passed(group: Sequence[Target], requirements: Requirements, say: Callable[[str], None]) -> dict[str, Sent]:
    token = secrets.token_hex(8)
    places = [place_of(each, token) for each in group]
    nbytes = size(download_bytes(requirements, group[0].facts))
    words = f"{group[0].name} fetches the packages (about {nbytes}), and passes them on to {_names(group[1:])}"
    say(StartStep(words, "environment", [each.name for each in group]))
    sent: dict[str, Sent] = {}
    try:
        pins, complete = _fetch_and_pass(group, places, token, requirements, say)
        sent = {group[index].name: Sent(token, pins) for index in complete}
        if left := [each for each in group if each.name not in sent]:
            say(f"{_names(left)}: the packages do not get through from the other hosts; downloading them there")
    except (PoolError, OSError) as problem:
        say(f"{_names(group)}: the packages could not be passed on; each downloads its own ({_short(problem)})")
    finally:
        left = [each for each in group if each.name not in sent]
        discard(left, [place_of(each, token) for each in left])
    return sent


def _names(targets: Sequence[Target]) -> str:
    return ", ".join(each.name for each in targets)


def _short(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return "; ".join([*lines[:1], *lines[1:][-1:]])


def _fetch_and_pass(
    group: Sequence[Target], places: Sequence[str], token: str, requirements: Requirements, say: Callable[[str], None]
) -> tuple[tuple[str, ...], frozenset[int]]:
    """Pins of all wheels, and which hosts have them."""
    addresses = meeting([each.facts for each in group])
    assert addresses is not None
    all_of([partial(prepare, each.host, prepare_script(requirements, token)) for each in group[1:]])
    with _fetched(group[0], token, requirements, say) as (wheels, progress), contextlib.ExitStack() as stack:
        carriers = [next(wheels) for _ in CARRIERS]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skymagic-carriers-")))
        names = {each.file: each.stored for each in carriers}
        first = {file: f"store/{stored}" for file, stored in names.items()}

        def here() -> dict[str, Path]:
            return {each.file: _brought(group[0], places[0], each, folder) for each in carriers}

        store = stack.enter_context(stores(group, places, addresses, first, here, say))
        store.adopt((each.stored, each.nbytes) for each in carriers)
        sizes = {each.name: each.nbytes or 0 for each in packages(requirements, group[0].facts)}
        for one in wheels:
            names[one.file] = one.stored
            store.adopt([(one.stored, one.nbytes)])
            if one.nbytes > NOTICE_BYTES:
                words = f"{group[0].name} has fetched {one.package}"
                come = sum(sizes.get(project(each.partition("-")[0]) or "", 0) for each in names)
                share = come / total if (total := sum(sizes.values())) else None
                say(StartStep(words, "environment", [each.name for each in group], share))
        complete: frozenset[int] | None = None
        while complete is None:
            try:
                store.settle()
                complete = store.complete()
            except NoSource as problem:
                store.lose(problem.node)
            except OSError as problem:
                say(str(problem))
                complete = store.complete()
        there = sorted(complete)
        on_each([group[i] for i in there], [places[i] for i in there], lambda each, place: link(each, place, names))
    return tuple(progress.pins), complete


def _brought(target: Target, place: str, wheel: FetchedWheel, folder: Path) -> Path:
    """A wheel of a host's store, copied here."""
    process = target.host.open(f"exec cat {quote(f'{place}/store/{wheel.stored}')}")
    try:
        process.end_input()
        with (folder / wheel.file).open("wb") as file:
            while data := process.read():
                file.write(data)
    finally:
        process.close()
    if (came := (folder / wheel.file).stat().st_size) != wheel.nbytes:
        raise HostError(target.name, f"{came} of {wheel.nbytes} bytes of {wheel.file} came")
    return folder / wheel.file


@contextlib.contextmanager
def _fetched(
    target: Target, token: str, requirements: Requirements, say: Callable[[str], None]
) -> Iterator[tuple[Iterator[FetchedWheel], FetchProgress]]:
    """Let a host fetch; its wheels as they arrive. At the end of the block nothing fetches there any more.

    Raises:
        HostError: it cannot, with the last lines that it printed; also from the iterator.
    """
    plan = plan_install(requirements, target.facts, token, "")
    upload(
        target.host,
        prepare_script(requirements, token),
        {Path(path).name: Path(path) for path in requirements.uploads},
        say,
    )
    news: SimpleQueue[FetchedWheel | BaseException | None] = SimpleQueue()
    progress, over = FetchProgress(lambda step: None, news.put, requirements.hidden), threading.Event()

    def feed(line: str) -> None:
        if over.is_set():
            raise KeyboardInterrupt
        progress.feed(line)

    def run() -> None:
        try:
            done = target.host.run(fetch_script(plan, target.facts), lines=feed)
            failed = None if progress.done else progress.failure(done.status, done.err, requirements.minor)
            news.put(None if failed is None else HostError(target.name, failed.reason))
        except BaseException as problem:
            news.put(problem)

    def arrived() -> Iterator[FetchedWheel]:
        while (one := news.get()) is not None:
            if isinstance(one, BaseException):
                raise one
            yield one

    thread = threading.Thread(target=run, name="skymagic-fetch", daemon=True)
    thread.start()
    try:
        yield arrived(), progress
    finally:
        over.set()
        thread.join(timeout=15.0)
