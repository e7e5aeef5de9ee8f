"""What may help with an error that ranks have raised, where the pool itself can be the reason; pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from skymagic.plan.suggest import did_you_mean
from skymagic.run.results import Failure

NO_GROUP = ("Default process group has not been initialized", "is not compatible with an interactive environment")
"""How torch says it, in ``DDP(…)`` as in ``dist.all_reduce(…)``; and Lightning, in ``Trainer(strategy="ddp")``."""
FSDP_ON_CPUS = "The strategy `fsdp` requires a GPU accelerator"
"""Lightning's refusal."""
NO_NAME = re.compile(r"name '(\w+)' is not defined")
NO_MODULE = re.compile(r"No module named '(\w+)")
NO_MAGIC = re.compile(r"(?:Line|Cell) magic(?: function)? `(%+\w+)` not found")


def hints(
    failures: Sequence[Failure],
    plugins: Collection[str],
    names: Collection[str] = (),
    magics: Collection[str] = (),
    *,
    remote: bool = True,
) -> list[str]:
    """Lines to show below an error.

    Args:
        plugins: names of those that the pool has.
        names: that the ranks or the notebook have.
        magics: that the notebook has, with their per cent signs.
        remote: whether its ranks run on other machines, in environments of their own.
    """
    if modules := {match[1] for one in failures if (match := NO_MODULE.match(one.evalue))}:
        packages = " ".join(sorted(modules))
        where = "the machines of this pool" if remote else "this notebook's environment"
        return [
            f"{where} may lack a package: {'%sky_pip' if remote else '%pip'} install {packages}, if that is its name"
        ]
    if mine := {match[1] for one in failures if (match := NO_MAGIC.match(one.evalue)) and match[1] in magics}:
        return [
            f"{', '.join(sorted(mine))} is a magic of the notebook, and magics do not travel: define or %load_ext it in a "
            "%%sky_broadcast cell, or call the function behind it"
        ]
    missing = dict.fromkeys(
        match[1] for one in failures if one.ename == "NameError" and (match := NO_NAME.match(one.evalue))
    )
    # what the notebook has under that very name is told by another line
    if nearest := [words for name in missing if name not in names and (words := did_you_mean(name, names))]:
        return [words.removeprefix("; ") for words in nearest]
    if "torch" not in plugins and any(words in one.evalue for one in failures for words in NO_GROUP):
        return ["this pool was made without a process group: end it (%sky_down), and make it with --plugin torch"]
    if any(FSDP_ON_CPUS in one.evalue for one in failures):
        return [
            "without GPUs, shard with torch's fully_shard in configure_model, and strategy=ModelParallelStrategy(…)"
        ]
    return []
