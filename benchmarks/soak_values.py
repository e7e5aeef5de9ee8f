"""Variables changed, renamed and deleted on both sides at random, until the time is up: the ranks hold what the rule says.

    MINUTES=10 SEED=7 python benchmarks/soak_values.py

Ends with 1 at the first difference, and names the seed that shows it again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.data.far import Notebook
from tests.data.walk import walk

STEPS = 300


def main() -> int:
    """Walk from seed to seed."""
    end = time.monotonic() + 60 * float(os.environ.get("MINUTES", "5"))
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    count = 0
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            notebook = Notebook(Path(folder), 2)
            try:
                walk(notebook, seed + count, STEPS)
            except AssertionError as difference:
                print(f"SEED={seed + count}: {difference}")
                return 1
            finally:
                notebook.close()
        count += 1
    print(f"{count} walks of {STEPS} steps from seed {seed}: no difference between the rule and the ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
