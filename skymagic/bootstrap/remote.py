"""A host as provisioning sees it: its connection, uploads, and skymagic as installed there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Protocol

from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.progress import InstallStep
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.shell import any_shell, any_shell_word
from skymagic.plan.units import size
from skymagic.ssh.host import ScriptResult

CHUNK_BYTES = 1 << 20
NOTICE_BYTES = 5_000_000
"""Size above which an upload is reported."""

SendByStore = Callable[[Path], Sequence[str]]
"""Function that sends a file of this machine through the stores of a pool's nodes.

It sends the file to all nodes of the pool at once, and returns the paths to try on a host.
"""
MIN_STORE_BYTES = 1 << 20
"""Minimum size of a file that is sent through the nodes' stores, not over the host's connection."""
Report = Callable[[str], None]
"""Function that shows a line of text."""


class RemoteShell(Protocol):
    """Connection to a host as provisioning needs it: run scripts and upload files.

    `ssh.host.HostConnection` implements it.
    """

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
        """Run `script` with ``/bin/sh -s`` in its own process group.

        Calls do not overlap.

        Args:
            script: a script for POSIX sh.
            lines: called with each line of the script's output.
            timeout: seconds after which the script is killed; None for no limit.

        Raises:
            HostError: the host cannot be reached.
        """

    def upload(self, path: str, chunks: Iterable[memoryview], nbytes: int) -> None:
        """Write a file at an absolute path and create its folder. Called once for each path."""


@dataclass(frozen=True)
class Installation:
    """skymagic as installed on a host.

    Attributes:
        python: absolute path of the interpreter on the host.
        facts: the host as probed.
        code: folder with skymagic's code on the host.
        requirements: requirements of the environment.
    """

    python: str
    facts: HostFacts
    code: str
    requirements: Requirements = field(repr=False)

    def command(self, module: str, *args: str) -> str:
        """Return a command line that runs a module on the host, for any login shell.

        Files in the home folder are never imported as modules.

        Args:
            module: name of the module.
            args: any text without NUL. Newlines at the end of an argument are lost.
        """
        programs, code = Path(self.python).parent, any_shell_word(self.code)
        path = f"PATH={any_shell_word(str(programs))}:$PATH"
        if self.requirements.prepared:
            settings = f"PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}} {path}"
        else:
            settings = (
                f"PYTHONPATH={code} {path} VIRTUAL_ENV={any_shell_word(str(programs.parent))}"
            )
        command = [any_shell_word(text) for text in (self.python, "-P", "-m", module, *args)]
        return any_shell(f"export {settings}; exec {' '.join(command)}")


def upload(
    host: RemoteShell,
    target: str,
    files: Mapping[str, bytes | Path],
    report: Report,
    send_by_store: SendByStore | None = None,
) -> None:
    """Upload files into a folder, and remove the folder on failure.

    Args:
        host: connection to the host.
        target: the upload folder, used for this upload only.
        files: content or path on this machine, by name.
        report: called when a large file is sent.
        send_by_store: sends large files through the stores of the pool's nodes; None to upload them
            over the host's connection.
    """
    try:
        remaining = {
            name: data
            for name, data in files.items()
            if not _copy_from_store(host, f"{target}/{name}", data, send_by_store)
        }
        for name, content in report_large_files(remaining, report):
            host.upload(f"{target}/{name}", chunks(content), nbytes_of(content))
    except BaseException:
        # If this fails too, a later installation removes the folder after a day.
        with contextlib.suppress(Exception):
            host.run(f"rm -rf {quote(target)}", timeout=10.0)
        raise


def report_large_files(
    files: Mapping[str, bytes | Path], report: Report
) -> Iterator[tuple[str, bytes | Path]]:
    """Yield the files, and report each large one just before it.

    The caller sends each file before it asks for the next one.
    """
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


def _copy_from_store(
    host: RemoteShell, target: str, content: bytes | Path, send_by_store: SendByStore | None
) -> bool:
    """Send a large file through the nodes' stores and copy it on the host; return True on success.

    The file is copied, not linked, because it is removed from the store after the installation.
    """
    if (
        send_by_store is None
        or not isinstance(content, Path)
        or nbytes_of(content) < MIN_STORE_BYTES
    ):
        return False
    copies = " || ".join(f"cp {quote(path)} {quote(target)}" for path in send_by_store(content))
    script = f"mkdir -p {quote(str(Path(target).parent))} && {{ {copies}; }} 2>/dev/null"
    return host.run(script, timeout=600.0).status == 0


def chunks(content: bytes | Path) -> Iterator[memoryview]:
    """Yield the content of an upload, or of a file of this machine, for `RemoteShell.upload`."""
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
    """Return the size of an upload."""
    return content.stat().st_size if isinstance(content, Path) else len(content)
