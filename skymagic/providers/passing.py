"""Downloads once per pool: of hosts of one kind one fetches the wheels from its indexes, and they go on from host to host.

::

    host 0              chooses versions        and finds where their wheels are
    each host           a mirror                as `bootstrap.mirror` has it, asked by the host's own uv while install.sh runs
    host 0 → host 1 …   skymagic's code, and each wheel that somebody asks for, while it comes

What a mirror does not bring, its host downloads.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from skymagic.bootstrap import wheel
from skymagic.bootstrap.builds import choose
from skymagic.bootstrap.fetching import SOURCES, can_fetch, fetch_script
from skymagic.bootstrap.install import plan_install, prepare_script
from skymagic.bootstrap.listing import download_bytes, shortage_of
from skymagic.bootstrap.mirror import PAGES
from skymagic.bootstrap.progress import InstallProgress
from skymagic.bootstrap.provision import Sent
from skymagic.bootstrap.remote import sha256_of, upload
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import kind
from skymagic.display.starting import StartStep
from skymagic.errors import HostError, PoolError
from skymagic.plan.units import size
from skymagic.providers.chain import Chain, Target, discard, meeting, place_of, uploads
from skymagic.providers.sending import provided
from skymagic.wire.threads import failures, run_all

WORTH_BYTES = 50_000_000
"""Bytes of wheels from which on it is faster to pass them on than to let each host download its own."""
_START_SECONDS = 60.0


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

    Hosts that reach no index have got what they need from the notebook before.

    Yields:
        By name of host, what it installs from; what nobody has installed from is removed at the end.

    Raises:
        HostError: hosts that reach no index cannot be helped from here.
    """
    sent: dict[str, Sent] = {}
    with contextlib.ExitStack() as chains:
        try:
            for more in provided([each for each in targets if each.facts.without_index], requirements, say):
                sent |= more
            for group in groups(targets, requirements):
                sent |= _passed(group, requirements, chains, say)
            yield sent
        except BaseException:
            chains.close()
            discard([(each, sent[each.name].incoming) for each in targets if each.name in sent])
            raise


def _passed(
    group: Sequence[Target], requirements: Requirements, chains: contextlib.ExitStack, say: Callable[[str], None]
) -> dict[str, Sent]:
    token = secrets.token_hex(8)
    nbytes = size(download_bytes(requirements, group[0].facts))
    words = f"{group[0].name} fetches the packages (about {nbytes}), and passes them on to {_names(group[1:])}"
    say(StartStep(words, "environment", [each.name for each in group]))
    addresses = meeting([each.facts for each in group])
    assert addresses is not None
    chains.callback((chain := Chain(group, addresses)).close)
    sent: dict[str, Sent] = {}
    try:
        sent = {each.name: Sent(token, there=there) for each, there in _mirrored(chain, token, requirements)}
        if left := [each for each in group if each.name not in sent]:
            say(f"{_names(left)}: the packages do not get through from the other hosts; downloading them there")
    except (PoolError, OSError) as problem:
        say(f"{_names(group)}: the packages could not be passed on; each downloads its own ({_short(problem)})")
    finally:
        if not sent:
            chain.close()  # its mirrors write to what is removed now
        discard([(each, token) for each in group if each.name not in sent])
    return sent


def _names(targets: Sequence[Target]) -> str:
    return ", ".join(each.name for each in targets)


def _short(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return "; ".join([*lines[:1], *lines[1:][-1:]])


def _mirrored(chain: Chain, token: str, requirements: Requirements) -> Iterator[tuple[Target, frozenset[str]]]:
    """Those of a group whose mirrors serve, and what has come there. Raises what is wrong with the first."""
    first, prepare, files = chain.targets[0], prepare_script(requirements, token), uploads(requirements)
    wheels = dict(files)
    code = {(name := wheel.running()[1]): wheels.pop(name)}

    def choose_there(over: threading.Event) -> None:
        """While skymagic's own code, which no choice depends on, is on its way."""

        def choose_versions() -> None:
            upload(first.host, prepare, wheels, lambda step: None)
            _choose(first, token, requirements, over)

        bring_code = partial(upload, first.host, prepare, code, lambda step: None)
        if problems := failures(run_all([choose_versions, bring_code])):
            raise problems[0]

    if problem := chain.listen(prepare, choose_there):
        raise problem
    bring = {**{name: sha256_of(content) for name, content in files.items()}, PAGES: ""}
    lacking = chain.serve({"sources": f"{place_of(first, token)}/{SOURCES}"}, (), bring, timeout=_START_SECONDS)
    for each in chain.targets:
        if PAGES not in (lost := lacking.get(each.name, [PAGES])):
            yield each, frozenset(files).difference(lost)


def _choose(target: Target, token: str, requirements: Requirements, over: threading.Event) -> None:
    """Let a host choose for all of its kind. Raises HostError with the last lines that it printed."""
    plan = plan_install(requirements, target.facts, token, "")
    progress = InstallProgress(lambda step: None, requirements.hidden)

    def feed(line: str) -> None:
        if over.is_set():
            raise KeyboardInterrupt
        progress.feed(line)

    done = target.host.run(fetch_script(plan, target.facts), lines=feed)
    if not progress.done:
        raise HostError(target.name, progress.failure(done.status, done.err, requirements.minor).reason)
