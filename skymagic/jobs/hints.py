"""What may help with an error that ranks have raised, where the pool itself can be the reason; pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from skymagic.run.results import Failure

NO_GROUP = ("Default process group has not been initialized", "is not compatible with an interactive environment")
"""How torch says it, in ``DDP(…)`` as in ``dist.all_reduce(…)``; and Lightning, in ``Trainer(strategy="ddp")``."""
FSDP_ON_CPUS = "The strategy `fsdp` requires a GPU accelerator"
"""Lightning's refusal."""
NO_MODULE = re.compile(r"No module named '(\w+)")


def hints(failures: Sequence[Failure], plugins: Collection[str], *, remote: bool = True) -> list[str]:
    """Lines to show below an error.

    Args:
        plugins: names of those that the pool has.
        remote: whether its ranks run on other machines, in environments of their own.
    """
    if modules := {match[1] for one in failures if (match := NO_MODULE.match(one.evalue))}:
        names = " ".join(sorted(modules))
        where = "the machines of this pool" if remote else "this notebook's environment"
        return [f"{where} may lack a package: {'%sky_pip' if remote else '%pip'} install {names}, if that is its name"]
    if "torch" not in plugins and any(words in one.evalue for one in failures for words in NO_GROUP):
        return ["this pool was made without a process group: end it (%sky_down), and make it with --plugin torch"]
    if any(FSDP_ON_CPUS in one.evalue for one in failures):
        return [
            "without GPUs, shard with torch's fully_shard in configure_model, and strategy=ModelParallelStrategy(…)"
        ]
    return []
