"""What may help with an error that ranks have raised, where the pool itself can be the reason; pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from skymagic.run.results import Failure

NO_GROUP = ("Default process group has not been initialized", "is not compatible with an interactive environment")
"""How torch says it, in ``DDP(…)`` as in ``dist.all_reduce(…)``; and Lightning, in ``Trainer(strategy="ddp")``."""


def hints(failures: Sequence[Failure], plugins: Collection[str]) -> list[str]:
    """Lines to show below an error.

    Args:
        plugins: names of those that the pool has.
    """
    if "torch" not in plugins and any(words in one.evalue for one in failures for words in NO_GROUP):
        return ["this pool was made without a process group: end it (%sky_down), and make it with --plugin torch"]
    return []
