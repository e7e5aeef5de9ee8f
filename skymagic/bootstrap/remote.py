"""A host as provisioning knows it: what it needs of a connection, uploads, and skymagic as it is installed there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Protocol

from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.progress import InstallStep
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.shell import any_shell, any_shell_word
from skymagic.plan.units import size
from skymagic.ssh.host import ScriptResult

CHUNK_BYTES = 1 << 20
NOTICE_BYTES = 5_000_000
"""Size above which it is reported that a file is sent."""

Carry = Callable[[Path], Sequence[str]]
"""Brings a file of this machine to a host, and says where it may be there."""
CARRIED_BYTES = 1 << 20
"""Bytes of a file from which another way is worth it."""
Report = Callable[[str], None]


class RemoteShell(Protocol):
    """What provisioning needs of a host: scripts and uploads; `ssh.host.HostConnection` has it."""

    @property
    def label(self) -> str:
        """Name of the host as the user calls it."""

    def run(
        self,
        script: str,
        *,
        lines: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> ScriptResult:
        """Run `script` with ``/bin/sh -s``, in a process group of its own; `lines` gets each line of its output.

        Called several times, one after the other. Raises HostError when the host cannot be reached.
        """

    def upload(self, path: str, chunks: Iterable[memoryview], nbytes: int) -> None:
        """Write a file at an absolute path; its folder is made. Once for each path."""


@dataclass(frozen=True)
class Installation:
    """skymagic as it is installed on a host.

    Attributes:
        python: absolute path of the interpreter there.
        facts: the host as it was found.
        code: folder with skymagic's code there.
    """

    python: str
    facts: Facts
    code: str
    requirements: Requirements = field(repr=False)

    def command(self, module: str, *args: str) -> str:
        """A command line that runs a module there, whatever the login shell is; files in the home do not count as modules.

        Args:
            args: any text without NUL; newlines at an argument's end are lost.
        """
        programs, code = Path(self.python).parent, any_shell_word(self.code)
        path = f"PATH={any_shell_word(str(programs))}:$PATH"
        if self.requirements.prepared:
            settings = f"PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}} {path}"
        else:
            settings = (
                f"PYTHONPATH={code} {path} VIRTUAL_ENV={any_shell_word(str(programs.parent))}"
            )
        words = [any_shell_word(text) for text in (self.python, "-P", "-m", module, *args)]
        return any_shell(f"export {settings}; exec {' '.join(words)}")


def upload(
    host: RemoteShell,
    place: str,
    files: Mapping[str, bytes | Path],
    report: Report,
    carry: Carry | None = None,
) -> None:
    """Fill a folder of uploads; what went half is removed.

    Args:
        place: the folder, which is nobody else's.
        carry: brings large files by another way than this host's own connection.
    """
    try:
        left = {
            name: data
            for name, data in files.items()
            if not _carried(host, f"{place}/{name}", data, carry)
        }
        for name, content in announced(left, report):
            host.upload(f"{place}/{name}", chunks(content), nbytes_of(content))
    except BaseException:
        with contextlib.suppress(Exception):  # then the next one to install removes it, after a day
            host.run(f"rm -rf {quote(place)}", timeout=10.0)
        raise


def announced(
    files: Mapping[str, bytes | Path], report: Report
) -> Iterator[tuple[str, bytes | Path]]:
    """Each file, when those before it are sent; a large one is reported."""
    sizes = {name: nbytes_of(content) for name, content in files.items()}
    sent = 0
    for name, nbytes in sizes.items():
        if nbytes > NOTICE_BYTES:
            report(
                InstallStep(
                    f"sending {Path(name).name} ({size(nbytes)})", sent / sum(sizes.values())
                )
            )
        yield name, files[name]
        sent += nbytes


def _carried(host: RemoteShell, target: str, content: bytes | Path, carry: Carry | None) -> bool:
    """Whether a file came the other way: the first that is there is copied, for links do not lead out of shared memory."""
    if carry is None or not isinstance(content, Path) or nbytes_of(content) < CARRIED_BYTES:
        return False
    copies = " || ".join(f"cp {quote(each)} {quote(target)}" for each in carry(content))
    script = f"mkdir -p {quote(str(Path(target).parent))} && {{ {copies}; }} 2>/dev/null"
    return host.run(script, timeout=600.0).status == 0


def chunks(content: bytes | Path) -> Iterator[memoryview]:
    """The content of an upload, or of a file of this machine, as `HostConnection.upload` takes it."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                yield memoryview(data)
    else:
        view = memoryview(content)
        yield from (
            view[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)
        )


def nbytes_of(content: bytes | Path) -> int:
    """Size of an upload."""
    return content.stat().st_size if isinstance(content, Path) else len(content)
