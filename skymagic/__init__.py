"""Distributed training without leaving the notebook: skymagic's magics and Python API.

``%load_ext skymagic`` registers the magics; ``import skymagic as sky`` provides the same as
functions and classes. Each name is imported when it is first used, because importing this package
must be cheap: it also happens on every rank.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# Nothing is shown in a notebook, even after `logging.basicConfig(level=logging.DEBUG)` in a cell:
# that is meant for the user's own messages. `wire.debug_log` writes ours to files on request.
_logger = logging.getLogger(__name__)
_logger.addHandler(logging.NullHandler())
_logger.propagate = False
_logger.setLevel(logging.WARNING)

# name -> location: "module" for the module itself, "module:attribute" for something in it
_EXPORTS = {
    "AWS": "providers:AWS",
    "Compute": "api.compute:Compute",
    "ComputePool": "api.compute:ComputePool",
    "Image": "plan.image:Image",
    "InstanceInfo": "runtime.info:InstanceInfo",
    "Local": "providers:Local",
    "PipIndex": "plan.image:PipIndex",
    "SSH": "providers:SSH",
    "Ray": "providers:Ray",
    "Slurm": "providers:Slurm",
    "Kubernetes": "providers:Kubernetes",
    "accelerators": "plan.accelerators",
    "attach": "api.compute:attach",
    "compute": "api.compute:compute",
    "errors": "errors",
    "find": "api.compute:find",
    "function": "api.compute:function",
    "gather": "api.compute:gather",
    "instance_info": "runtime.info:instance_info",
    "integrations": "plugins.integrations",
    "on_interruption": "runtime.interruption:on_interruption",
    "plugins": "plugins",
    "pools": "api.compute:pools",
    "report": "runtime.reporting:report",
    "shard": "runtime.sharding:shard",
    "silent": "runtime.info:silent",
    "stderr": "runtime.info:stderr",
    "stdout": "runtime.info:stdout",
}

_SKYWARD_NAMES = {"ComputePool", "compute"}
"""Names that the library Skyward has for `Compute` and `function`.

They work, but completion does not offer them.
"""
__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _EXPORTS:
        module, _, attribute = _EXPORTS[name].partition(":")
        value = import_module(f"{__name__}.{module}")
        if attribute:
            value = getattr(value, attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__} - _SKYWARD_NAMES)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:  # run from a source folder that is not installed
        return "0+unknown"


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics. Called by ``%load_ext skymagic``; safe to call twice."""
    import_module(f"{__name__}.magics.magics").load_ipython_extension(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Unregister the magics. Called by ``%unload_ext skymagic``; safe to call twice."""
    import_module(f"{__name__}.magics.magics").unload_ipython_extension(shell)
