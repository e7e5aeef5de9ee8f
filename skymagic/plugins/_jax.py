"""JAX: each rank joins one global device mesh before it uses any backend."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from skymagic.plugins.plugin import Cluster, Plugin
from skymagic.runtime.info import InstanceInfo
from skymagic.runtime.on_import import Patches, wraps

if TYPE_CHECKING:
    from skymagic.plan.image import Image

TIMEOUT = 60
"""Seconds that ranks wait for each other at startup."""


def jax(version: str | None = None) -> Plugin:
    """Install JAX and call ``jax.distributed.initialize`` on every rank before the first cell.

    Then ``jax.devices()`` lists the devices of all ranks. Programs over the whole mesh must run on
    all ranks: in a cell or with ``@``, not with ``>>``. JAX cannot release a rank from a collective
    or let it join again. Therefore all ranks are restarted when a rank fails or is stopped during a
    collective.

    Args:
        version: None for the notebook's version, ``"latest"``, a version (``"0.4.35"`` means
            ``==0.4.35``) or a constraint (``">=0.4"``).
    """
    from skymagic.plugins._torch.plugin import constraint

    def transform(image: Image, cluster: Cluster) -> Image:
        name = "jax[cuda12]" if cluster.cuda else "jax"
        return image.replace(pip=(*image.pip, name + constraint(version)))

    return Plugin(
        name="jax",
        transform=transform,
        preload=("jax", "jax.numpy"),
        around_app=around_app,
        rejoin=None,
        before=("keras",),
    )


def check_build(gpus: Sequence[int]) -> None:
    """Check that JAX can use the rank's GPUs. A CPU build would silently compute on CPUs.

    Raises:
        RuntimeError: there are GPUs, and JAX is installed without CUDA.
    """
    if not gpus:
        return
    from importlib.metadata import distributions

    if not any(
        re.fullmatch(r"jax[-_]cuda\d+[-_]plugin", dist.name or "") for dist in distributions()
    ):
        raise RuntimeError(
            "this JAX is installed without CUDA, and the pool has GPUs: install jax[cuda12] on "
            "the nodes, or take CPUs (--gpu none)"
        )


@contextlib.contextmanager
def around_app(info: InstanceInfo) -> Iterator[None]:
    """Join the ranks into one mesh, and leave it when the process is stopped."""
    import jax

    devices = info.gpus_of_rank()
    check_build(devices)
    # By default a JAX process takes three quarters of a GPU's memory when it starts, which leaves
    # nothing for torch in the same process or for another rank.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Holds the port until the coordinator has bound it too, see `coordinator_address`.
    reserved = socket.socket()
    with reserved:
        coordinator = coordinator_address(info, reserved)
        os.environ.update(
            JAX_COORDINATOR_ADDRESS=coordinator,
            JAX_NUM_PROCESSES=str(info.world_size),
            JAX_PROCESS_ID=str(info.rank),
            JAX_LOCAL_DEVICE_COUNT=str(max(1, len(devices))),
        )
        bind_collectives(os.environ.get("GLOO_SOCKET_IFNAME"))
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=info.world_size,
            process_id=info.rank,
            local_device_ids=list(devices) or None,
            cluster_detection_method="deactivate",
            initialization_timeout=TIMEOUT,
            # By default it binds all addresses of the machine, including public ones.
            coordinator_bind_address=coordinator,
        )
    initialize, shutdown = jax.distributed.initialize, jax.distributed.shutdown
    already = f"skymagic has initialised jax.distributed already ({info.world_size} processes)"
    with Patches() as patches:
        patches.callback(shutdown)
        patches.put(jax.distributed, "initialize", _printing_stand_in(initialize, already))
        patches.put(
            jax.distributed,
            "shutdown",
            _printing_stand_in(shutdown, "skymagic keeps jax.distributed for the next cell"),
        )
        yield


def _printing_stand_in(plain: Callable[..., None], why: str) -> Callable[..., None]:
    """Return a stand-in for a function of JAX that does nothing and prints why."""

    @wraps(plain)
    def refuse(*_: Any, **__: Any) -> None:
        print(f"{why}; this call of {plain.__name__} changes nothing", file=sys.stderr)

    return refuse


def coordinator_address(info: InstanceInfo, reserved: socket.socket) -> str:
    """Return the address of the coordinator that rank 0 is about to serve.

    The system chooses the port, and `reserved` holds it until the coordinator has bound it too.
    This works because the coordinator shares ports (SO_REUSEPORT) like all gRPC servers. If it
    cannot bind, it does not report that but lets all ranks time out.
    """
    from skymagic.runtime import rendezvous

    if info.rank == 0:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((info.head_addr, 0))
        rendezvous.put("jax", reserved.getsockname()[1])
        port = reserved.getsockname()[1]
    else:
        port = rendezvous.get("jax")
    return f"{info.head_addr}:{port}"


def bind_collectives(interface: str | None) -> None:
    """Let CPU collectives use the cluster's network interface.

    By default they use the address that the hostname resolves to, and hang. JAX has no setting for
    it. A version of JAX without this function is left as it is.
    """
    from jax._src import xla_bridge

    make = getattr(xla_bridge._jax, "make_gloo_tcp_collectives", None)
    if make is not None and interface:
        xla_bridge._jax.make_gloo_tcp_collectives = functools.partial(make, interface=interface)
