"""A kernel and a rank as they were when their pool was new: called in them between tests that share it. Standard library only."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

CACHED = re.compile(r"_+|_i+|_\d+|_i\d+|_[iod]h|_exit_code|In|Out")
"""Names that IPython itself renews with every cell."""
KEPT_FILES = {".ipython", ".state"}

# this module is imported once in each process that is emptied: what it was like then
_begun: dict[str, Any] = {}


def remember(space: dict[str, Any]) -> None:
    """Keep what this process is like: its names, environment, working directory and import path."""
    _begun.update(
        names={name: value for name, value in space.items() if not CACHED.fullmatch(name)},
        environ=dict(os.environ),
        folder=Path.cwd(),
        path=list(sys.path),
        warnings=list(warnings.filters),
        modules=set(sys.modules),
    )


def empty(space: dict[str, Any]) -> int:
    """Make it so again; raises KeyError in a process that remembers nothing, as a rank that was replaced. Its process id."""
    names = _begun["names"]
    for name in [name for name in space if name not in names and not CACHED.fullmatch(name)]:
        del space[name]
    space.update(names)
    for name in os.environ.keys() - _begun["environ"].keys():
        del os.environ[name]
    os.environ.update(
        {name: value for name, value in _begun["environ"].items() if os.environ.get(name) != value}
    )
    os.chdir(_begun["folder"])
    sys.path[:] = _begun["path"]
    warnings.filters[:] = _begun["warnings"]  # type: ignore[index]
    _forget_magics()
    return os.getpid()


def _forget_magics() -> None:
    """Forget the magics that cells have defined; IPython adds its own when they are first used."""
    from IPython.core.getipython import get_ipython

    for functions in get_ipython().magics_manager.magics.values():
        for name, function in list(functions.items()):
            if getattr(function, "__module__", "") == "__main__":
                del functions[name]


def remember_kernel(space: dict[str, Any]) -> None:
    """The same for the notebook's kernel, whose settings are kept too."""
    remember(space)
    settings = _magics().settings
    _begun["settings"] = {name: getattr(settings, name) for name in settings.class_own_traits()}


def check(ranks: int) -> None:
    """Raise an AssertionError where the notebook's pool `main` is not ready, or is at work; without ranks it is to have no pool."""
    from skymagic.pool import registry

    registry.close_all(
        [
            pool
            for pool in (*registry.pools(), *registry.ended_pools())
            if not ranks or pool.name != "main"
        ]
    )
    if not ranks:
        return
    pool = registry.pool_named("main")
    assert (pool.state.name, pool.world_size) == ("READY", ranks), f"the pool is {pool!r}"
    registry.mark_used(pool)


def empty_kernel(space: dict[str, Any]) -> None:
    """Make the notebook what it was: names, settings and files."""
    shell = space["get_ipython"]()
    _magics().auto.switch(False)
    _magics().runs._unwrapped_told = False
    for name, value in _begun["settings"].items():
        setattr(_magics().settings, name, value)
    # not `displayhook.flush`, which collects garbage: 0.2 s
    space["_oh"].clear()
    for name in [name for name in space if re.fullmatch(r"_\d+", name)]:
        del space[name]
    # not as a user's own, which IPython would leave as they are from then on
    shell.push(dict.fromkeys(("_", "__", "___"), ""), interactive=False)
    shell.displayhook._ = shell.displayhook.__ = shell.displayhook.___ = ""
    empty(space)
    folder = _begun["folder"]
    for name in sys.modules.keys() - _begun["modules"]:
        if folder in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name not in KEPT_FILES:
            shutil.rmtree(path)
        elif path.name not in KEPT_FILES:
            path.unlink()


def _magics() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython().magics_manager.registry["SkyMagics"]
