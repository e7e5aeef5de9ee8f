"""Imitate launchers: torchrun's variables, accelerate's CPU flag, Lightning's devices and nodes.

Because of these variables, Lightning takes a rank for a worker of torchrun and does not start its
own processes. torchrun leaves ``Trainer(devices=…, num_nodes=…)`` to the program. Here, the pool
provides them.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from skymagic.plugins._torch import devices as devices_of_rank
from skymagic.runtime import info as runtime
from skymagic.runtime.info import InstanceInfo
from skymagic.runtime.on_import import when_imported, wraps

CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
"""Lightning's classes that choose devices, nodes and strategy, by module.

They serve ``Trainer`` and ``Fabric``.
"""
CALLBACKS = (
    "lightning.pytorch.trainer.connectors.callback_connector",
    "pytorch_lightning.trainer.connectors.callback_connector",
)
"""Modules where ``Trainer`` chooses its progress bar."""
INTERACTIVE = ("lightning.fabric.utilities.imports", "lightning_fabric.utilities.imports")
"""Modules where Lightning looks for sys.ps1, which IPython sets on a rank as well."""
AUTO = "auto"
LAUNCHING_STRATEGY = re.compile(
    r"ddp_(?:notebook|spawn|fork|forkserver)(?P<suffix>_find_unused_parameters_\w+)?"
)
"""Matches names of Lightning's strategies that start their own processes."""
LAUNCHING_METHODS = ("spawn", "fork", "forkserver")
"""Start methods of such strategies. Plain DDP uses ``popen``, which starts no processes on a rank.
"""

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that torch sets if another process serves the store."""

_served_port = ""
"""Port of the store that the pool serves now."""


def enter(info: InstanceInfo, port: int) -> None:
    """Set the environment variables of torchrun's workers that describe the launch.

    Those that identify the rank are set already.

    Args:
        info: the rank.
        port: port of the rank's store.
    """
    global _served_port
    _served_port = str(port)
    os.environ |= {
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": info.job_id,
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # With env:// rendezvous, the user's own code joins this store instead of binding its port
        # again.
        AGENT_STORE: "True",
    }


@functools.cache  # once per process: otherwise the wrappers would be wrapped again
def adapt_libraries() -> None:
    """Let programs for torch, accelerate and Lightning train on the pool without changes.

    Each library is adapted when a cell imports it.
    """
    when_imported("torch.distributed.rendezvous", _stores)
    when_imported("accelerate.state", _partial_state)
    for module, name in CONNECTORS.items():
        when_imported(module, functools.partial(_connector, name=name))
    # Lightning cannot start processes in a notebook, but a rank does not have to start any.
    for module in INTERACTIVE:
        when_imported(module, lambda library: setattr(library, "_IS_INTERACTIVE", False))
    # Use tqdm's bar. rich's bar moves a terminal's cursor, so a cell would show each step on a new
    # line.
    for module in CALLBACKS:
        when_imported(module, lambda library: setattr(library, "_RICH_AVAILABLE", False))


def _stores(module: types.ModuleType) -> None:
    """Let rank 0 serve a store at another port than the pool's.

    Programs create one with ``init_rpc(init_method="tcp://…")`` or by setting MASTER_PORT. If
    torchrun's agent serves a store, torch takes each address for that store, and all ranks wait for
    another process to serve it.
    """
    create = module._create_c10d_store

    @wraps(create)
    def create_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if str(port) == _served_port:
            return create(hostname, port, *args, **kwargs)
        # Without an agent's store, torch lets rank 0 serve one at this port. The variable itself
        # has to go: with it, TCPStore's C++ code ignores that the port is taken, and joins the
        # store of whoever serves there, such as processes that another rank has forked.
        value = os.environ.pop(AGENT_STORE, None)
        try:
            return create(hostname, port, *args, **kwargs)
        finally:
            if value is not None:
                os.environ[AGENT_STORE] = value

    module._create_c10d_store = create_store  # type: ignore[attr-defined]


def _partial_state(module: types.ModuleType) -> None:
    """Let ``PartialState()`` obey ACCELERATE_USE_CPU as ``Accelerator()`` does.

    If it is created first, both would otherwise ignore a CPU-only group.
    """
    make = module.PartialState.__init__

    @wraps(make)
    def init(state: Any, cpu: bool = False, **kwargs: Any) -> None:
        make(
            state,
            cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"),
            **kwargs,
        )

    module.PartialState.__init__ = init


def _connector(module: types.ModuleType, name: str) -> None:
    kind = getattr(module, name)
    kind.__init__ = with_pool_devices(kind.__init__)


def with_pool_devices(choose: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of Lightning's connector to supply the pool's devices and nodes.

    Values that the program sets are kept.
    """
    signature = inspect.signature(choose)

    @wraps(choose)
    def init(connector: Any, /, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(connector, *args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        info, is_full_run = runtime.instance_info(), runtime.all_ranks_take_part()
        arguments["strategy"] = without_launcher(arguments["strategy"], info, is_full_run)
        arguments["devices"], arguments["num_nodes"] = lightning_arguments(
            arguments["devices"],
            arguments["num_nodes"],
            arguments["strategy"],
            info,
            is_full_run,
            devices_of_rank.number(),
        )
        choose(*bound.args, **bound.kwargs)
        is_single_device = type(connector.strategy).__name__ == "SingleDeviceStrategy"
        if is_full_run and info.rank == 0 < info.world_size - 1 and is_single_device:
            print(
                f"Lightning trains on each rank alone with devices={arguments['devices']!r}, "
                f"num_nodes={arguments['num_nodes']}: leave both out to train one model on all "
                f"{info.world_size} ranks",
                file=sys.stderr,
            )

    return init


def without_launcher(strategy: Any, info: InstanceInfo, together: bool) -> Any:
    """Replace a strategy that would start processes by one that trains on the pool's ranks.

    Such processes would be forked from a rank that has threads and a process group, and wait for
    each other forever.
    """
    if isinstance(strategy, str):
        match = LAUNCHING_STRATEGY.fullmatch(strategy)
        if match is None:
            return strategy
        name, plain = strategy, f"ddp{match['suffix'] or ''}" if together else AUTO
    else:
        method = getattr(strategy, "_start_method", None)
        if method not in LAUNCHING_METHODS:
            return strategy
        name, plain = f"{type(strategy).__name__}(start_method={method!r})", strategy
        strategy._start_method = "popen"
    if info.rank == 0:
        print(
            f"Lightning's {name} would start processes on each rank, which are the processes "
            f"already: {'ddp trains' if together else 'it trains'} on the pool's ranks instead",
            file=sys.stderr,
        )
    return plain


def lightning_arguments(
    devices: Any, num_nodes: int, strategy: Any, info: InstanceInfo, together: bool, gpu: int | None
) -> tuple[Any, int]:
    """Return Lightning's `devices` and `num_nodes`, where the program left them open.

    Args:
        devices: the program's value; ``"auto"`` is Lightning's default.
        num_nodes: the program's value; 1 is Lightning's default.
        strategy: the program's value; ``"auto"`` is Lightning's default.
        info: the rank.
        together: whether all ranks take part in the run. In a run on some ranks, each trains by
            itself.
        gpu: the rank's GPU, or None.
    """
    has_devices = not (isinstance(devices, str) and devices == AUTO)
    if not together or info.world_size == 1:
        own_device = 1 if gpu is None else [gpu]
        return devices if has_devices else own_device, num_nodes
    has_strategy = not (isinstance(strategy, str) and strategy == AUTO)
    # A strategy for several ranks on a single node cannot be intended.
    if num_nodes == 1 and (has_strategy or not has_devices):
        num_nodes = info.total_nodes
    return devices if has_devices else _on_node(info, gpu), num_nodes


def _on_node(info: InstanceInfo, gpu: int | None) -> int | list[int]:
    """Return the devices for a node.

    Lightning takes the entry at LOCAL_RANK, which must be the rank's GPU.
    """
    local_ranks = range(info.local_world_size)
    gpus = [local_rank * info.accelerators // info.local_world_size for local_rank in local_ranks]
    return (
        gpus
        if gpu is not None and gpus != [*local_ranks] and len({*gpus}) == len(gpus)
        else info.local_world_size
    )
