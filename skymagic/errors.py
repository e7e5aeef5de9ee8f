"""Everything that skymagic raises.

::

    SkyError                 what happened, where, and what to do next
    ├── RequestError         bad input, refused before anything starts; holds all mistakes
    ├── CellSyntaxError      a cell that is not Python, refused before anything is sent
    ├── CaptureError         variables that cannot be sent, or cannot be bound on a rank
    ├── PackagesError        packages of a cell are missing on nodes, and cannot be installed
    ├── PoolError            a pool cannot be created, found or used, or was ended during a run
    │   ├── ProvisionError   machines or ranks did not start
    │   │   ├── HostError    a host could not be reached or used: which, why, and what to try
    │   │   ├── HostsError   several hosts at once; holds one HostError for each
    │   │   └── CloudError   a cloud refused or did not answer: permission or quota, and a remedy
    │   └── PoolStateError   the pool is not in a state that allows this
    ├── FilesError           files could not be copied
    └── RunError             a cell failed on the ranks
        ├── RankError        a rank raised; also has the type raised there, and it as ``__cause__``
        ├── RankDied         a rank's process ended: signal or exit status
        ├── ScriptError      a shell script failed on a node
        ├── RunTimeout       the time given with ``--timeout`` is over
        ├── RunInterrupted   the user pressed stop (also a KeyboardInterrupt)
        └── ResultError      a value could not be returned

A RunError renders as the rank's own traceback; every other error renders as its message alone,
without internal frames.

Each error has a `code`, a stable identifier of its cause for programs and tests, and the fields
that are known where it is raised: `rank`, `node`, `host`, `names` and `hint`. Messages may be
reworded at any time; codes and fields stay. `CODES` lists the codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from skymagic.wire.untrusted import sanitized, sanitized_line

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class SkyError(Exception):
    """Base of all errors of skymagic.

    Args:
        message: what happened, and where.
        code: stable identifier of the cause (`CODES`), by default that of the class.
        rank: the rank concerned, if it is one.
        node: the number of the node concerned, if it is one.
        host: the machine concerned, as the user knows it; "" if it is none or several.
        names: what the error is about: variables, packages, pools, hosts, files.
        hint: what to try next; appended to the message as a line of its own.
    """

    code: str = "error"
    rank: int | None = None
    node: int | None = None
    host: str = ""
    names: tuple[str, ...] = ()
    hint: str = ""

    def __init__(
        self,
        message: str = "",
        *,
        code: str = "",
        rank: int | None = None,
        node: int | None = None,
        host: str = "",
        names: Iterable[str] = (),
        hint: str = "",
    ) -> None:
        super().__init__(f"{message}\n  {hint}" if hint else message)
        fields = {
            "code": code,
            "rank": rank,
            "node": node,
            "host": host,
            "names": tuple(names),
            "hint": hint,
        }
        # defaults stay on the class: a pickle holds what this error alone has
        vars(self).update(
            {name: value for name, value in fields.items() if value not in ("", None, ())}
        )

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: only the message, because internal frames are of no
        use to the user.
        """
        return [f"{type(self).__name__}: {self}"]


class _QuotingError(SkyError):
    """Base of errors whose message may quote another machine: a login shell, a scheduler, a host's
    name.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        hint = sanitized(fields.pop("hint", ""))
        host = sanitized_line(fields.pop("host", ""))
        names = [sanitized_line(name) for name in fields.pop("names", ())]
        super().__init__(sanitized(message), hint=hint, host=host, names=names, **fields)


class RequestError(_QuotingError):
    """A request that cannot be met as written.

    Args:
        mistakes: one sentence for each mistake, in the user's words; at least one.
    """

    code = "request"

    def __init__(self, mistakes: Sequence[str] | str, **fields: Any) -> None:
        self.mistakes: tuple[str, ...] = (
            (sanitized(mistakes),) if isinstance(mistakes, str) else tuple(map(sanitized, mistakes))
        )
        super().__init__("; ".join(self.mistakes), **fields)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.mistakes,), vars(self)


@contextmanager
def collect_mistakes(mistakes: list[str], before: str = "") -> Iterator[None]:
    """Add the mistakes of a RequestError in the block to `mistakes`, to be raised together later.

    Args:
        before: prefix for each of them.
    """
    try:
        yield
    except RequestError as wrong:
        mistakes += [before + mistake for mistake in wrong.mistakes]


class CellSyntaxError(SkyError):
    """A cell that is not Python; the message shows the line."""

    code = "cell-syntax"


class CaptureError(SkyError):
    """Variables that cannot be sent to the ranks.

    The message names each with its type and a remedy.
    """

    code = "capture"


class PackagesError(_QuotingError):
    """Packages that are missing on nodes and were not installed.

    The message gives the reason and a remedy.

    Nothing was sent.
    """

    code = "packages"


class PoolError(_QuotingError):
    """A pool cannot be created, found or used, or was ended while something ran on it."""

    code = "pool"


class ProvisionError(PoolError):
    """Machines or ranks did not start; everything started so far has been released."""

    code = "provision"


class HostError(ProvisionError):
    """A host could not be reached or used.

    Args:
        host: as the user named it.
        reason: the problem, without the host's name.
        hint: what to try next; may be empty.
        code: identifier of the cause.
    """

    code = "host"

    def __init__(self, host: str, reason: str, hint: str = "", *, code: str = "") -> None:
        super().__init__(f"{host}: {reason}", code=code, host=host, hint=hint)
        self.reason = sanitized(reason)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.host, self.reason, self.hint), vars(self)


class HostGone(HostError):
    """A host is gone for certain, with everything that ran there; retrying is pointless."""

    code = "host-gone"


class HostsError(ProvisionError):
    """Several hosts could not be reached or used.

    Args:
        failures: one for each host, in the user's order; at least one.
        host_count: total number of hosts.
    """

    code = "hosts"

    def __init__(self, failures: Sequence[HostError], host_count: int) -> None:
        self.failures, self.host_count = tuple(failures), host_count
        lines = [
            f"{len(self.failures)} of {host_count} hosts could not be used",
            *map(str, self.failures),
        ]
        super().__init__("\n".join(lines), names=[failure.host for failure in self.failures])

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.failures, self.host_count)


class CloudError(ProvisionError):
    """A cloud refused a call, or did not answer it.

    Args:
        kind: category: ``capacity``, ``quota``, ``permission``, ``credentials``, ``throttled``, …;
            the error's code is ``cloud-`` and the kind.
        cloud_code: the cloud's own name of the error.
        reason: the problem.
        hint: what to do about it; may be empty.
    """

    code = "cloud"

    def __init__(self, kind: str, cloud_code: str, reason: str, hint: str = "") -> None:
        super().__init__(reason, code=f"cloud-{kind.replace('_', '-')}", hint=hint)
        self.kind, self.cloud_code, self.reason = kind, cloud_code, sanitized(reason)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kind, self.cloud_code, self.reason, self.hint)


class PoolStateError(PoolError):
    """The pool's state does not allow the operation."""

    code = "pool-state"


class FilesError(_QuotingError):
    """Files that could not be copied; the message names each, with its node and the reason."""

    code = "files"


class RunError(SkyError):
    """A cell failed on the ranks.

    Attributes:
        failures: the report of each failed rank, in rank order (``results.Failure``).
    """

    code = "run"
    failures: tuple[object, ...] = ()


@dataclass(frozen=True)
class RankReport:
    """Report on the exception of a rank; its fields are the attributes of `RankError`."""

    rank: int
    hostname: str
    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()
    heading: str = ""
    below: tuple[str, ...] = ()


class RankError(RunError):
    """A rank raised an exception.

    The error raised also has the type of that exception, and its arguments, fields, attributes and
    message, unchanged; the rank and its host are in its notes. The exception's own attributes take
    precedence over those listed here.

    Attributes:
        rank: the first rank that failed.
        hostname: its machine.
        ename: the name of the exception's type, as on the rank.
        evalue: the exception's message.
        traceback: the rank's traceback as coloured lines, with the cell's own line numbers.
        heading: text above the traceback: the ranks that failed.
        below: lines under the traceback: what happened to the other ranks.
    """

    code = "rank-raised"
    rank: int
    hostname: str
    ename: str
    evalue: str
    traceback: tuple[str, ...]
    heading: str
    below: tuple[str, ...]
    _report: RankReport
    """The attributes above, even if the exception has attributes of the same names."""
    _shown_notes: int
    """Number of notes that are not shown under the traceback: the exception's own are in it, and
    skymagic's first is above it.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        hostname: str,
        ename: str,
        traceback: Sequence[str] = (),
        heading: str = "",
        below: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self._set_report(
            RankReport(rank, hostname, ename, message, tuple(traceback), heading, tuple(below))
        )

    def _set_report(self, report: RankReport) -> None:
        """Add the report on the rank to the exception's own attributes and notes."""
        own = vars(self)
        own_notes = own.get("__notes__", [])
        # The exception's own attributes take precedence over those of the report.
        for name, value in vars(report).items():
            own.setdefault(name, value)
        own["_report"] = report
        own["_shown_notes"] = len(own_notes) + bool(report.heading)
        own["__notes__"] = [*own_notes, *filter(None, (report.heading, *report.below))]

    @classmethod
    def _from_report(cls, report: RankReport) -> RankError:
        return cls(
            report.evalue,
            rank=report.rank,
            hostname=report.hostname,
            ename=report.ename,
            traceback=report.traceback,
            heading=report.heading,
            below=report.below,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return RankError._from_report, (self._report,), {"__notes__": self.__notes__}

    def _render_traceback_(self) -> list[str]:
        report = self._report
        line = f"{report.ename}: {report.evalue}" if report.evalue else report.ename
        shown = [*(report.traceback or (line,))]
        # above the message, which should be the last thing the user sees
        if notes := self.__notes__[self._shown_notes :]:
            last = [
                i for i, text in enumerate(shown) if _COLOURS.sub("", text).startswith(report.ename)
            ][1:]
            shown.insert(last[-1] if last else len(shown), "\n".join(notes))
        return [*filter(None, [report.heading]), *shown]


class RankDied(RunError):
    """A rank's process ended while it was needed.

    Attributes:
        rank: the rank.
        hostname: its machine.
        status: its wait status: negative for a signal, else the exit code.
    """

    code = "rank-died"
    rank: int

    def __init__(self, message: str, *, rank: int, hostname: str, status: int | None) -> None:
        super().__init__(message, rank=rank, host=hostname)
        self.hostname = hostname
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return partial(RankDied, rank=self.rank, hostname=self.hostname, status=self.status), (
            str(self),
        )


class ScriptError(RunError):
    """A ``%%sky_sh`` script failed on a node; the message gives the cause, or its last lines.

    Attributes:
        node: the node.
        hostname: its machine.
        status: the script's exit code; negative for a signal; None if it could not be started.
    """

    code = "script"
    node: int

    def __init__(self, message: str, *, node: int, hostname: str, status: int | None) -> None:
        super().__init__(message, node=node, host=hostname)
        self.hostname = hostname
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return partial(ScriptError, node=self.node, hostname=self.hostname, status=self.status), (
            str(self),
        )


class RunTimeout(RunError):
    """The cell took longer than ``--timeout`` allows; the message shows where each rank was."""

    code = "run-timeout"


class RunInterrupted(RunError, KeyboardInterrupt):
    """The user interrupted the cell.

    It is also a KeyboardInterrupt, so that ``except Exception`` in a loop does not swallow it.

    Attributes:
        values: values by rank, if the function had already finished on all ranks when the stop
            button was pressed; else None.
    """

    code = "run-interrupted"
    values: object = None


class ResultError(RunError):
    """Values that could not be returned; the others are in ``values``.

    Attributes:
        values: the returned values: ``values.value`` by rank, and ``values.variables`` by name; a
            missing one is replaced by an object with the reason.
    """

    code = "result"
    values: object = None


# The reference's table of codes is written from this one (docs/generate.py).
CODES = {
    "error": "Any other error of skymagic",
    "request": "Options, names or values of the request are wrong; `mistakes` lists all of them",
    "no-pool": "No pool has this name",
    "no-provider": "No provider has this name",
    "no-plugin": "No plugin has this name",
    "no-node": "The pool has no node with this number",
    "no-rank": "The pool, or the cell, has no such rank",
    "no-name": "The rank has no variable with this name",
    "no-ssh-client": "`--ssh` names a client that does not exist",
    "no-context": "The kubeconfig has no such context",
    "no-cluster": "No Kubernetes cluster is configured here",
    "no-partition": "Slurm has no such partition",
    "pod-template": "The pod template cannot be used",
    "pool-ambiguous": "Several pools match",
    "pool-of-notebook": "The pool belongs to this notebook",
    "plugin-broken": "The plugin failed, or does not return what a plugin returns",
    "plugin-options": "The plugin does not take these options",
    "plugin-order": "Plugins each have to be set up before the other",
    "ssh-config": "The ssh configuration has a value that cannot be used",
    "ssh-config-exposed": "Other users may write the ssh configuration",
    "cluster-unverified": "The connection to the API server is not protected",
    "environment": "An environment variable that describes a rank is damaged",
    "notebook-run": "No notebook runs there, or the pool does not run it",
    "cell-syntax": "The cell is not Python",
    "capture": "A variable cannot be sent",
    "packages": "Packages are missing or could not be installed",
    "packages-missing": "Packages that the cell needs are missing on nodes",
    "packages-unknown": "Nodes did not say which packages they have",
    "no-wheel": "No wheel of the package fits the nodes",
    "notebook-environment": "The ranks use the notebook's own environment",
    "named-interpreter": "The ranks use an interpreter that the user named",
    "pool": "A pool cannot be created, found or used",
    "pool-closed": "The pool was ended while it was used",
    "pool-held": "Another notebook uses the pool",
    "pool-exists": "A pool with this name exists already",
    "not-released": "Machines or processes could not be ended; the message names them",
    "unreached": "Machines could not be reached",
    "lost-contact": "The connection to the pool is lost",
    "attach": "The pool cannot be attached",
    "other-python": "The pool has another version of Python",
    "other-version": "The pool has another version of skymagic",
    "other-machine": "The pool is on another machine",
    "key-missing": "The pool's key is not here",
    "key-damaged": "The pool's key cannot be read",
    "key-exposed": "Other users may read the pool's key",
    "folder-deleted": "The notebook's working folder was deleted",
    "gpu-taken": "Another pool has taken the GPU meanwhile",
    "group-forming": "The process group is being formed",
    "no-log": "The log of the rank is not available",
    "node-unreached": "The node does not answer",
    "value-lost": "A value was lost with a node",
    "value-dropped": "A value is no longer needed",
    "value-changed": "A value changed while it was sent",
    "value-not-sent": "A value could not be sent to a node",
    "ranks-not-back": "Ranks that were replaced have not come back",
    "provision": "Machines or ranks did not start",
    "rank-start": "A rank could not start",
    "start-timeout": "Nodes or ranks did not start in time",
    "network": "The nodes cannot reach each other",
    "machine-broken": "A rented machine does not work and is not replaced",
    "lifetime": "The pool's lifetime is nearly over",
    "package-missing": "A package that the provider needs is not installed here",
    "program-missing": "A program that the provider needs is not on the PATH",
    "kubernetes-job": "The Kubernetes job cannot start",
    "kubernetes-deleted": "The Kubernetes job was deleted",
    "kubernetes-refused": "The API server refused",
    "kubernetes-unreached": "The API server does not answer",
    "ray-refused": "Ray refused",
    "ray-unreached": "The Ray cluster does not answer",
    "ray-lost": "The connection to the Ray cluster is lost",
    "slurm-refused": "Slurm refused the job",
    "slurm-unreached": "Slurm does not answer",
    "slurm-ended": "The Slurm job ended",
    "slurm-runs": "The Slurm job runs, so that it cannot be renewed",
    "host": "A host cannot be used",
    "host-gone": "The host is gone, with everything on it",
    "hosts": "Several hosts cannot be used; `failures` has an error for each",
    "host-name": "The name of the host is not known",
    "host-silent": "The host does not answer",
    "host-refused": "The host refuses the connection",
    "host-no-route": "There is no route to the host",
    "host-unreached": "The host cannot be reached for another reason",
    "host-jump": "The jump host cannot be used",
    "host-proxy": "The ProxyCommand failed",
    "host-no-ssh": "The port does not speak SSH",
    "host-key-unknown": "The host's key is not in known_hosts",
    "host-key-changed": "The host has another key than known_hosts says",
    "host-key-revoked": "The host's key is revoked",
    "host-other-login": "The host wants a password, or more than a key",
    "host-no-key": "The host accepts none of the keys",
    "host-sessions": "sshd allows no more processes on the connection",
    "host-lost": "The connection to the host is lost",
    "host-closed": "The connection to the host is closed",
    "host-timeout": "A step on the host took too long",
    "host-write": "A file on the host could not be written",
    "shell-ended": "The login shell ended before it ran anything",
    "shell-floods": "The login shell prints without end",
    "shell-hangs": "The login shell runs nothing",
    "shell-refused": "The host starts no process",
    "container-engine": "The host has no program that runs containers",
    "container-image": "The host does not have the image, and could not pull it",
    "openssh-missing": "OpenSSH's client cannot be used here",
    "openssh-no-master": "OpenSSH's master connection is not there",
    "openssh-master-hangs": "OpenSSH's master connection does not answer",
    "openssh-login": "OpenSSH's client cannot log in",
    "channel-key": "The node has not got the key of its channel",
    "channel-untrusted": "The node has not proven that it belongs to the pool",
    "channel-unsealed": "The node opens no encrypted session",
    "setup": "The host cannot be set up",
    "setup-python": "The host has no suitable Python",
    "setup-wheel": "A wheel cannot be installed on the host",
    "setup-packages": "Packages cannot be installed on the host",
    "node-lost": "A node is lost",
    "cloud": "A cloud refused a call; `cloud-quota`, `cloud-capacity`, …: with the `kind`",
    "pool-state": "The pool's state does not allow this",
    "pool-move": "The pool cannot change its state in this way",
    "pool-ended": "The pool has ended",
    "pool-not-started": "The pool has not been started",
    "pool-not-ready": "The pool is not ready",
    "pool-busy": "Other cells run on these ranks",
    "world-changed": "The pool has another number of ranks by now",
    "ranks-lost": "Ranks were lost and did not come back",
    "files": "Files could not be copied",
    "run": "A cell failed on the ranks",
    "rank-raised": "A rank raised an exception",
    "rank-died": "A rank's process ended",
    "script": "A script failed on a node",
    "run-timeout": "The cell took longer than `--timeout`",
    "run-interrupted": "The user stopped the cell",
    "kernel-shut-down": "The kernel was shut down; the ranks keep running",
    "result": "A value could not be returned",
}
