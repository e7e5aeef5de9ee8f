"""Random histories of renting at EC2 until so many are done: nothing that was made is left, or it is tagged and ends itself.

    HISTORIES=1000 python benchmarks/rented_leaks.py

Ends with 1 at the first leak, and shows the shortest history that has it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hypothesis import HealthCheck, given, settings

from skymagic.providers.aws.clients import AwsClients
from tests.lab import ec2 as lab
from tests.lab.rented_histories import SETTINGS, History, histories, live


def main() -> int:
    """Live them all."""
    wanted = int(os.environ.get("HISTORIES", "1000"))
    begun, lived = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder, lab.ec2() as cloud:
        os.environ.update({**lab.environment(), "XDG_STATE_HOME": folder})
        shared = AwsClients(endpoint_url=cloud.url, deadline_factor=SETTINGS.deadline_factor)

        @settings(
            max_examples=wanted,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(histories())
        def live_one(history: History) -> None:
            nonlocal lived
            lived += 1
            if lived % 50 == 0:
                cloud.forget()  # moto keeps all that was ever launched
            live(cloud, history, shared)

        try:
            live_one()
        except AssertionError as leak:
            print(f"{lived} histories: {leak}", *getattr(leak, "__notes__", ()), sep="\n")
            return 1
    print(f"{lived} histories in {time.monotonic() - begun:.0f} s: 0 leaks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
