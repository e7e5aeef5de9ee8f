"""Who owns a name, over a random walk with every form of binding, in a shell with a pool; ``make soak`` walks further."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.jobs.both_ways import ROOT


def test_ranks_hold_the_predicted_values(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.jobs.live", str(tmp_path), "1", "400"],
        cwd=ROOT, text=True, capture_output=True, check=False, timeout=280,  # a busy machine is no defect
        env={**os.environ, "IPYTHONDIR": str(tmp_path / ".ipython")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
