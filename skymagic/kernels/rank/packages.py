"""What can be imported on a rank, told on its control thread: for the notebook, which installs what is missing beside it."""

from __future__ import annotations

import importlib
import site
import sys
from typing import Any


def installed() -> dict[str, Any]:
    """Distributions with their versions, and the names of modules, as `data.capture.installed.present` finds them."""
    from skymagic.data.capture.installed import present  # a rank imports what reads the environment when it is asked

    found = present()
    return {"versions": dict(found.versions), "modules": sorted(found.modules)}


def rescan() -> list[str]:
    """Something was installed into this environment: let imports find it, and run its ``.pth`` files.

    Returns:
        The names of all modules that this rank has imported already, without those in packages.
    """
    before = list(sys.path)
    for folder in site.getsitepackages():
        site.addsitedir(folder)
    added = [folder for folder in sys.path if folder not in before]
    sys.path[:] = [*before, *added]
    importlib.invalidate_caches()
    return sorted(name for name in list(sys.modules) if "." not in name and name not in sys.stdlib_module_names)
