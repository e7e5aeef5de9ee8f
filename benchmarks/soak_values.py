"""Variables changed, renamed and deleted on both sides at random, until the time is up: the ranks hold what the rule says.

    python benchmarks/soak_values.py --minutes 10 --seed 7

Each walk of 5,000 steps in the data plane alone is followed by one of 5,000 in a shell with a pool, where cells bind names in
IPython's ways too. Ends with 1 at the first difference, and names the seed that shows it again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.data.far import Notebook
from tests.data.walk import walk

STEPS = 5000
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Read the arguments, and walk from seed to seed."""
    parser = argparse.ArgumentParser(description="Random changes of variables on both sides.")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="no walk begins after so many (5)"
    )
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 1_000_000, help="of the first walk (any)"
    )
    given = parser.parse_args()
    end, seed, count = time.monotonic() + 60 * given.minutes, given.seed, 0
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            notebook = Notebook(Path(folder), 2)
            try:
                walk(notebook, seed + count, STEPS)
            except AssertionError as difference:
                print(f"--seed {seed + count}: {difference}")
                return 1
            finally:
                notebook.close()
            if not live(folder, seed + count):
                return 1
        count += 1
    print(
        f"{count} walks of {STEPS} steps, and as many in a shell, from seed {seed}: no difference between the rule and the ranks"
    )
    return 0


def live(folder: str, seed: int) -> bool:
    """Walk in a shell with a pool; whether nothing differed."""
    command = [sys.executable, "-m", "tests.jobs.live", folder, str(seed), str(STEPS)]
    env = {**os.environ, "IPYTHONDIR": f"{folder}/.ipython"}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
