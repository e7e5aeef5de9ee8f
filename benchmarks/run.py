"""All benchmarks, and one table of them: ``python benchmarks/run.py [start cells report view tasks ddp output failures data ssh remote first remote_pools wan wan64 sh wheels packages rented slurm schedulers away]``.

Each part runs in a process of its own. Ends with 1 when a figure is over its limit or a part fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.figures import Figure, say, table  # noqa: E402  (the path is set above)
from skymagic.kernels.fork import end_with_parent  # noqa: E402

PARTS = (
    "start",
    "cells",
    "report",
    "view",
    "tasks",
    "ddp",
    "output",
    "failures",
    "actors",
    "data",
    "ssh",
    "remote",
    "first",
    "remote_pools",
    "wan",
    "wan64",
    "sh",
    "wheels",
    "packages",
    "rented",
    "slurm",
    "schedulers",
    "away",
)
DEADLINE = 900.0
"""Seconds that one part may take."""
END = 60.0
"""Seconds in which it then ends what it has started."""


def one(part: str) -> None:
    """Measure one part, and print its figures as lines of JSON; all that it prints itself goes to standard error.

    It ends with the process that started it, also when that was killed, and what it has started with it.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    end_with_parent(signal.SIGTERM)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for figure in importlib.import_module(f"benchmarks.{part}").figures():
        print(json.dumps(asdict(figure)), file=lines, flush=True)


def measured(part: str) -> tuple[list[Figure], bool]:
    """One part in a process of its own, with an empty profile of IPython's; its figures, and whether it came to its end."""
    say(f"── {part}")
    with tempfile.TemporaryDirectory(prefix="bench-") as profile:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        env = {**os.environ, "PYTHONPATH": path, "IPYTHONDIR": profile, "PYTHONUNBUFFERED": "1"}
        words = [sys.executable, str(Path(__file__).resolve()), "--part", part]
        process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
        try:
            output, _ = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.terminate()  # not killed: it ends what it has started
            try:
                output, _ = process.communicate(timeout=END)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
    return [Figure(**json.loads(line)) for line in output.splitlines()], process.returncode == 0


def main() -> int:
    """Run the parts that are asked for, and print the table."""
    parser = argparse.ArgumentParser(
        description="skymagic's figures, each beside a peer's of the same run"
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all unless said"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        one(options.part)
        return 0
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    figures: list[Figure] = []
    failed: list[str] = []
    for part in options.parts or PARTS:
        found, ended = measured(part)
        figures += found
        failed += [] if ended else [part]
    print(table(figures))
    over = [figure.name for figure in figures if figure.good is False]
    promised = sum(figure.good is not None for figure in figures)
    print(f"\n{len(over)} of {promised} figures over the limit")
    if failed:
        print(f"did not come to an end: {', '.join(failed)}")
    return 1 if over or failed else 0


if __name__ == "__main__":
    sys.exit(main())
