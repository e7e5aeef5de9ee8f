"""`sky.report` outside a rank, and in a process that a rank has forked."""

from __future__ import annotations

import subprocess
import sys

from tests.lab.golden import Golden


def test_outside_a_rank_a_warning_is_issued(golden: Golden) -> None:
    code = "import skymagic as sky\nfor i in range(3):\n    sky.report(step=i, loss=1.0)\nprint('done')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "done\n"
    golden(found.stderr, hide=["^.*: UserWarning: "])


def test_a_process_that_a_rank_has_forked_is_no_rank() -> None:
    code = (
        "import os, warnings\nfrom skymagic.runtime import reporting\nimport skymagic as sky\n"
        "reporting.attach(lambda rows: print('sent', len(rows), flush=True))\nsky.report(loss=1.0)\n"
        "if (child := os.fork()) == 0:\n"
        "    warnings.simplefilter('error')\n"
        "    try: sky.report(loss=2.0)\n"
        "    except UserWarning: print('told', flush=True)\n"
        "    reporting.flush()\n    os._exit(0)\n"
        "os.waitpid(child, 0)\nreporting.flush()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split("\n") == ["told", "sent 1", ""]
