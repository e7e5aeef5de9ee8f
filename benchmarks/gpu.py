"""What only a GPU can show: ``python benchmarks/gpu.py [CHECK …]``, also as ``make gpu``. At most ten minutes, no internet.

A table: check → seen → expected → ok. Each check runs in a process of its own with a deadline of its own, so that one that fails or hangs
does not stop the others. What a machine cannot do (two GPUs, jax) is skipped by name. Ends with 1 when a row is not as expected.

``WHEELS=DIR`` is a folder of wheels (``make gpu-wheels``) for a machine that lacks IPython and the rest: they are installed into a folder
that is thrown away, and torch is the machine's own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.gpu_checks import CHECKS, ON_GPU, Check, Row, gpu_count  # noqa: E402  (the path is set above)

TOTAL = 600.0
"""Seconds for all checks."""
END = 15.0
"""Seconds in which a check that is over its deadline ends what it has started."""
LOGS = ROOT / "build" / "gpu"


def one(name: str) -> None:
    """Run one check; its rows are lines of JSON, and all that it prints itself goes to its log."""
    from skymagic.kernels.fork import end_with_parent

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    end_with_parent(signal.SIGTERM)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for row in next(each for each in CHECKS if each.name == name).run():
        print(json.dumps(asdict(row)), file=lines, flush=True)


def rows_of(check: Check, env: dict[str, str], seconds: float) -> list[Row]:
    """Run a check in a process of its own; a last row where it did not come to its end."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{check.name.replace(' ', '-').replace(',', '')}.log"
    words = [sys.executable, str(Path(__file__).resolve()), "--check", check.name]
    with log.open("w") as errors, tempfile.TemporaryDirectory(prefix="gpu-") as profile:
        own = {**env, "IPYTHONDIR": profile}
        process = subprocess.Popen(
            words,
            env=own,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            cwd=profile,
        )
        late = False
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
            process.terminate()  # not killed: it ends what it has started
            try:
                output, _ = process.communicate(timeout=END)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
    rows = [Row(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
    if late:
        rows.append(
            Row(
                "comes to its end",
                f"not within {seconds:.0f} s, see {os.path.relpath(log)}",
                "",
                False,
            )
        )
    elif process.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        rows.append(
            Row("comes to its end", f"{last[:90]} (all of it: {os.path.relpath(log)})", "", False)
        )
    return rows


def environment(wheels: str, folder: Path) -> dict[str, str]:
    """Of the checks: what the machine lacks is installed from `wheels` into a folder."""
    paths = [str(ROOT)]
    if wheels:
        found = sorted(map(str, Path(wheels).glob("*.whl")))
        if not found:
            sys.exit(f"no wheels in {wheels}: fill it with make gpu-wheels")
        options = [
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), *found],
            check=True,
        )
        paths.append(str(folder))
    before = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*paths, before])),
        "PYTHONUNBUFFERED": "1",
    }


def shown(check: Check, rows: list[Row]) -> None:
    """Print a check's rows, with tabs for those who read with a program."""
    for row in rows:
        good = "ok" if row.good else "NOT OK"
        print(f"{check.name}: {row.what}  →  {row.seen}  →  {row.expected}  →  {good}", flush=True)


def main() -> int:
    """Run the checks that are asked for."""
    parser = argparse.ArgumentParser(description="checks that need a GPU")
    names = [each.name for each in CHECKS]
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", help=f"some of: {', '.join(names)}; all unless said"
    )
    parser.add_argument(
        "--wheels",
        default=os.environ.get("WHEELS", ""),
        help="a folder that make gpu-wheels has filled",
    )
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        one(options.check)
        return 0
    if unknown := set(options.checks) - set(names):
        parser.error(f"no check {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    begun, bad, skipped = time.monotonic(), [], []
    gpus = gpu_count() if ON_GPU else 2
    print(f"{gpus} GPU{'s' * (gpus != 1)}\ncheck  →  seen  →  expected  →  ok", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-wheels-") as folder:
        env = environment(options.wheels, Path(folder))
        for check in (each for each in CHECKS if each.name in (options.checks or names)):
            left = TOTAL - (time.monotonic() - begun)
            if why := check.absent(gpus) or ("" if left > END else f"{TOTAL:.0f} s are over"):
                skipped.append(check.name)
                print(f"{check.name}: skipped, {why}", flush=True)
                continue
            rows = rows_of(check, env, min(check.seconds, left))
            bad += [row for row in rows if not row.good]
            shown(check, rows)
    print(
        f"\n{len(bad)} not as expected; {len(skipped)} of {len(options.checks or names)} checks skipped"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
