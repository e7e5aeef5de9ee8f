"""What programs look for that a launcher would have started: torchrun's variables, accelerate's CPU flag, Lightning's devices and nodes.

Lightning takes a rank for one of torchrun's workers by these variables, and then starts no processes of its own. What torchrun
leaves to the program, ``Trainer(devices=…, num_nodes=…)``, the pool knows.
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
"""Lightning's modules → the class in which ``Trainer`` or ``Fabric`` chooses devices, nodes and strategy."""
CALLBACKS = (
    "lightning.pytorch.trainer.connectors.callback_connector",
    "pytorch_lightning.trainer.connectors.callback_connector",
)
"""Where ``Trainer`` chooses its progress bar."""
INTERACTIVE = ("lightning.fabric.utilities.imports", "lightning_fabric.utilities.imports")
"""Where Lightning looks for sys.ps1, which IPython sets on a rank as well."""
AUTO = "auto"
LAUNCHING_STRATEGY = re.compile(
    r"ddp_(?:notebook|spawn|fork|forkserver)(?P<suffix>_find_unused_parameters_\w+)?"
)
"""Names of Lightning's strategies that start processes of their own."""
LAUNCHING_METHODS = ("spawn", "fork", "forkserver")
"""The start methods of such strategies; that of plain DDP is ``popen``, which starts none on a rank."""


_served_port = ""
"""Where the store is that the pool serves now."""


def enter(info: InstanceInfo, port: int) -> None:
    """Put into the environment what torchrun tells its workers of the launch, for a rank whose store is at `port`; who is who
    stands there already."""
    global _served_port
    _served_port = str(port)
    os.environ |= {
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": info.job_id,
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # env:// rendezvous by the user's own code joins this store instead of binding its port again
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@functools.cache  # once in a process: what wraps would be wrapped again
def adapt_libraries() -> None:
    """Let programs of torch, accelerate and Lightning train on the pool as they are written; each library when a cell imports it."""
    when_imported("torch.distributed.rendezvous", _stores)
    when_imported("accelerate.state", _partial_state)
    for module, name in CONNECTORS.items():
        when_imported(module, functools.partial(_connector, name=name))
    for module in (
        INTERACTIVE
    ):  # a rank starts no processes, which is what Lightning cannot do from a notebook
        when_imported(module, lambda found: setattr(found, "_IS_INTERACTIVE", False))
    # tqdm's bar, not rich's, which moves a terminal's cursor: a cell would show each step below the last
    for module in CALLBACKS:
        when_imported(module, lambda found: setattr(found, "_RICH_AVAILABLE", False))


def _stores(module: types.ModuleType) -> None:
    """A store at another port than the pool's is served by rank 0: ``init_rpc(init_method="tcp://…")``, or MASTER_PORT as a program sets it.

    Where torchrun's agent serves a store, torch takes each address for that store, and all ranks wait for somebody to serve it.
    """
    create, of_agent = module._create_c10d_store, module._torchelastic_use_agent_store

    @wraps(create)
    def create_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if str(port) != _served_port:
            module._torchelastic_use_agent_store = lambda: False  # type: ignore[attr-defined]
        try:
            return create(hostname, port, *args, **kwargs)
        finally:
            module._torchelastic_use_agent_store = of_agent  # type: ignore[attr-defined]

    module._create_c10d_store = create_store  # type: ignore[attr-defined]


def _partial_state(module: types.ModuleType) -> None:
    """``PartialState()`` heeds ACCELERATE_USE_CPU as ``Accelerator()`` does; made first, it would leave a group on CPUs alone for both."""
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
    kind.__init__ = placed(kind.__init__)


def placed(choose: Callable[..., None]) -> Callable[..., None]:
    """The constructor of Lightning's connector, with the pool's devices and nodes where the program names none."""
    signature = inspect.signature(choose)

    @wraps(choose)
    def init(connector: Any, /, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(connector, *args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        info, together = runtime.instance_info(), runtime.everyone()
        asked["strategy"] = without_launcher(asked["strategy"], info, together)
        asked.update(
            place(
                asked["devices"],
                asked["num_nodes"],
                asked["strategy"],
                info,
                together,
                devices_of_rank.number(),
            )
        )
        choose(*given.args, **given.kwargs)
        alone = type(connector.strategy).__name__ == "SingleDeviceStrategy"
        if together and info.rank == 0 < info.world_size - 1 and alone:
            print(
                f"Lightning trains on each rank alone with devices={asked['devices']!r}, num_nodes={asked['num_nodes']}: "
                f"leave both out to train one model on all {info.world_size} ranks",
                file=sys.stderr,
            )

    return init


def without_launcher(strategy: Any, info: InstanceInfo, together: bool) -> Any:
    """Return the strategy that trains on the pool's ranks in the place of one that would start processes on each of them.

    Such processes would be forked from a rank with threads and a process group, and wait for each other for ever.
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
            f"Lightning's {name} would start processes on each rank, which are the processes already: "
            f"{'ddp trains' if together else 'it trains'} on the pool's ranks instead",
            file=sys.stderr,
        )
    return plain


def place(
    devices: Any, num_nodes: int, strategy: Any, info: InstanceInfo, together: bool, gpu: int | None
) -> dict[str, Any]:
    """What a rank passes to Lightning in the place of what the program left open.

    Args:
        devices, num_nodes, strategy: as the program gives them; ``"auto"``, 1 and ``"auto"`` are Lightning's defaults.
        info: the rank's place.
        together: whether all ranks take part in the run; a rank of a run of some trains by itself.
        gpu: the rank's GPU, None without.
    """
    named = not (isinstance(devices, str) and devices == AUTO)
    if not together or info.world_size == 1:
        return {} if named else {"devices": 1 if gpu is None else [gpu]}
    chosen: dict[str, Any] = {} if named else {"devices": _on_node(info, gpu)}
    parallel = not (isinstance(strategy, str) and strategy == AUTO)
    if num_nodes == 1 and (
        parallel or not named
    ):  # a strategy of several ranks on one node alone cannot be meant
        chosen["num_nodes"] = info.total_nodes
    return chosen


def _on_node(info: InstanceInfo, gpu: int | None) -> int | list[int]:
    """Lightning takes the entry at LOCAL_RANK for a rank's device: that must be the one that the rank has."""
    places = range(info.local_world_size)
    first = [place * info.accelerators // info.local_world_size for place in places]
    return (
        first
        if gpu is not None and first != [*places] and len({*first}) == len(first)
        else info.local_world_size
    )
