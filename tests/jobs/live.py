"""The walk of `tests.data.walk` in an IPython shell, on a pool of two ranks: also with what needs IPython there.

python -m tests.jobs.live FOLDER SEED STEPS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.data.walk import walk
from tests.jobs.both_ways import Both


class Live:
    """A shell and its pool, as the walk knows them."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.both = Both(folder)
        self.namespace: dict[str, Any] = self.both.shell.user_ns

    def here(self, source: str) -> None:
        """Run a plain cell."""
        self.both.must(source)

    def there(self, source: str) -> None:
        """Broadcast a cell."""
        self.both.must(f"%%sky_broadcast\n{source}")

    def values(self, expression: str) -> list[Any]:
        """An expression's values by rank; nothing is shipped."""
        self.both.must(f"%%sky_broadcast --no-push -o _sky_values\n{expression}")
        return list(self.namespace["_sky_values"])

    def pull(self, name: str) -> None:
        """Bring a name here, as the first rank has it."""
        self.both.must(f"%sky_pull {name} --head")


def main() -> int:
    """Walk; 1 and a line where a rank differs from the rule."""
    live = Live(sys.argv[1])
    try:
        walk(live, int(sys.argv[2]), int(sys.argv[3]), ipython=True)
    except AssertionError as difference:
        print(f"SEED={sys.argv[2]}: {difference}")
        return 1
    finally:
        live.both.shell.run_line_magic("sky_down", "--all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
