"""One script on many hosts, over connections of its own: what each has said, and why the others could not be asked."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterable
from typing import TypeVar

from skymagic.display.live import asks_secrets
from skymagic.errors import HostError, HostsError
from skymagic.providers.ssh import side_by_side
from skymagic.ssh import connecting
from skymagic.ssh.config import endpoints
from skymagic.ssh.host import HostConnection

T = TypeVar("T")
SCRIPT_TIMEOUT = 120.0
"""Seconds that a script may take on a host."""


def ask(
    hosts: Iterable[str], script: Callable[[str], str], parse: Callable[[str], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Run a script on hosts, side by side.

    Args:
        hosts: as users write them, ranges too; none for this machine, without any connection.
        script: a host's label → POSIX sh.
        parse: reads what the script has said; raises ValueError where it did not come to its end.

    Returns:
        (host → its answer, host → why there is none), in the order of the hosts.

    Raises:
        RequestError: a host's name is none.
    """
    if not (hosts := tuple(hosts)):
        here = socket.gethostname()
        done = subprocess.run(["/bin/sh"], input=script(here), capture_output=True, text=True, timeout=SCRIPT_TIMEOUT)
        return {here: parse(done.stdout)}, {}
    connections, unreached = _connect(hosts)

    def answer(one: HostConnection) -> T | HostError:
        try:
            done = one.run(script(one.label), timeout=SCRIPT_TIMEOUT)
            return parse(done.out)
        except HostError as problem:
            return problem
        except ValueError as problem:
            said = done.err.strip()[-500:]
            return HostError(one.label, f"{problem}" + (f": {said}" if said else ""))

    try:
        answers = side_by_side(answer, connections)
    finally:
        side_by_side(HostConnection.close, connections)
    said: dict[str, T] = {}
    for one, found in zip(connections, answers, strict=True):
        if isinstance(found, HostError):
            unreached[one.label] = found.reason
        else:
            said[one.label] = found
    return said, unreached


def _connect(hosts: Iterable[str]) -> tuple[list[HostConnection], dict[str, str]]:
    """Connections to the hosts that can be reached, and why the others cannot."""
    left = endpoints(hosts)
    unreached: dict[str, str] = {}
    while left:
        try:
            return connecting.connect_all(left, asks_secrets()), unreached
        except (HostError, HostsError) as problem:
            failures = problem.failures if isinstance(problem, HostsError) else [problem]
            unreached |= {one.host: one.reason for one in failures}
            left = [one for one in left if one.label not in unreached]
    return [], unreached
