"""What the notebook has changed in its environment since skymagic was loaded: the ranks began with what there was before."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_OF_THE_MACHINE = re.compile(
    r"PATH|HOME|PWD|OLDPWD|TMPDIR|USER|SHELL|TERM|COLUMNS|LINES|LD_\w+|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|SSH_\w+|DISPLAY|PYTEST_\w+"
    r"|(?:JPY|IPYTHON|JUPYTER|SKYMAGIC|SKYPILOT|COMPUTE_POOL|TORCHELASTIC|SLURM|RAY)\w*"
    r"|(?:LOCAL_|GROUP_|ROLE_|NODE_)?(?:RANK|WORLD_SIZE)|MASTER_\w+|CUDA_VISIBLE_DEVICES|\w+_SOCKET_IFNAME"
)
"""Where the notebook runs, and what each rank has of its own."""
_before: dict[str, str] = {}
"""As it was when skymagic was loaded."""


def remember() -> None:
    """What is changed from now on is the notebook's change; later calls do nothing."""
    if not _before:
        _before.update(os.environ)


def changed() -> dict[str, str | None]:
    """What the notebook has changed; nothing where skymagic was not loaded into one."""
    return changes(os.environ, _before) if _before else {}


def changes(now: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that are new, differ, or are gone (None); not those of the machine."""
    names = {*now, *before}
    differ = {name: now.get(name) for name in sorted(names) if now.get(name) != before.get(name)}
    return {name: value for name, value in differ.items() if not _OF_THE_MACHINE.fullmatch(name)}


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is nobody's business."""
    return _SECRET.search(name) is not None
