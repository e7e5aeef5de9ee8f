"""PyTorch: the right wheels, one process group per pool, and DDP wrappers that outlive a failure."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from skymagic.plugins import Cluster, Plugin
from skymagic.runtime import InstanceInfo

if TYPE_CHECKING:
    from skymagic.image import Image

PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch.optim")
WHEELS = "https://download.pytorch.org/whl/"
STORE_TIMEOUT = timedelta(seconds=60)


def torch(
    backend: str | None = None,
    cuda: str = "cu128",
    version: str = "latest",
    vision: str | None = None,
    audio: str | None = None,
) -> Plugin:
    """Install PyTorch and form its process group on every rank before the first cell.

    Args:
        backend: ``"nccl"``, ``"gloo"``, another that torch knows, or None: nccl where CUDA is, else gloo.
        cuda: suffix of the wheel index for pools with CUDA GPUs (``"cu128"``).
        version: ``"latest"``, a version (``"2.3.0"`` means ``==2.3.0``) or a constraint (``">=2.3"``).
        vision: torchvision, likewise; None leaves it out.
        audio: torchaudio, likewise; None leaves it out.
    """
    wanted = {"torch": version, "torchvision": vision, "torchaudio": audio}
    packages = tuple(name + constraint(text) for name, text in wanted.items() if text is not None)
    group = Group(backend)

    def transform(image: Image, cluster: Cluster) -> Image:
        index = WHEELS + (cuda if cluster.cuda else "cpu")
        return image.replace(pip=(*image.pip, *packages), pip_indexes=(*image.pip_indexes, index))

    return Plugin(
        name="torch",
        transform=transform,
        preload=PRELOAD,
        around_app=group.around_app,
        release=group.release,
        rejoin=group.rejoin,
        joined=group.joined,
    )


def constraint(text: str) -> str:
    """A version as pip wants it behind a name: nothing for "latest", ``==`` before a bare version."""
    if text == "latest":
        return ""
    return f"=={text}" if re.match(r"\d", text) else text


class Group:
    """Owns the default process group of this rank.

    Args:
        backend: None for the one that fits the devices.
    """

    def __init__(self, backend: str | None) -> None:
        self.backend = backend
        self._connections: Any = None
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._store: Any = None
        self._ours = False

    @contextlib.contextmanager
    def around_app(self, info: InstanceInfo) -> Iterator[None]:
        """Form the group; leave it when the process is stopped."""
        import torch
        import torch.distributed as dist

        from skymagic.kernels.release import Connections

        self._connections = Connections()
        if torch.cuda.is_available():
            torch.cuda.set_device(info.local_rank % torch.cuda.device_count())
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        with self._watched():
            self._form(info)
            try:
                yield
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

    def _form(self, info: InstanceInfo) -> None:
        """A group on a store of its own, on a port that rank 0 was given by the system."""
        import torch
        import torch.distributed as dist

        from skymagic.kernels import rendezvous

        backend = self.backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if not dist.is_backend_available(backend):
            raise ValueError(f"this PyTorch ({torch.__version__}) is built without the backend {backend!r}")
        with self._connections.recorded():
            self._store = open_store(info)
            prefix = dist.PrefixStore(f"skymagic-{rendezvous.generation()}", self._store)
            self._ours = True
            try:
                dist.init_process_group(backend, store=prefix, rank=info.rank, world_size=info.world_size)
            finally:
                self._ours = False

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, connections of every group are known, also of groups that the user makes, and so is every DDP wrapper."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d
        from torch.nn.parallel import DistributedDataParallel as DDP

        init, helper, wrap = dist.init_process_group, c10d._new_process_group_helper, DDP.__init__

        def init_process_group(*args: Any, **kwargs: Any) -> None:
            if not self._ours and dist.is_initialized():
                print(
                    f"skymagic has formed the process group already ({dist.get_backend()}, {dist.get_world_size()} ranks); "
                    "this call of init_process_group changes nothing",
                    file=sys.stderr,
                )
                return
            # torch keys what it stores by this number, so that a second group on one store does not meet the first one's
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1)
            init(*args, **kwargs)

        def new_group_helper(*args: Any, **kwargs: Any) -> Any:
            with self._connections.recorded():
                return helper(*args, **kwargs)

        def ddp_init(module: Any, *args: Any, **kwargs: Any) -> None:
            wrap(module, *args, **kwargs)
            self._wrappers.add(module)

        dist.init_process_group = c10d.init_process_group = init_process_group
        c10d._new_process_group_helper = new_group_helper
        DDP.__init__ = ddp_init  # type: ignore[method-assign]
        try:
            yield
        finally:
            dist.init_process_group = c10d.init_process_group = init
            c10d._new_process_group_helper = helper
            DDP.__init__ = wrap  # type: ignore[method-assign]

    def joined(self) -> bool:
        """Whether there is a group (the user may have destroyed it)."""
        dist = sys.modules.get("torch.distributed")
        return dist is None or bool(dist.is_initialized())

    def release(self) -> int:
        """Free the main thread from a collective; called on another thread."""
        return (0 if self._connections is None else self._connections.shut_down()) + abort_nccl()

    def rejoin(self, info: InstanceInfo) -> list[str]:
        """Leave what is left of the old groups and form a new one; DDP wrappers go on with it."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._connections.forget()
        self._form(info)
        return self._carry_over()

    def _carry_over(self) -> list[str]:
        import torch.distributed as dist

        lost = []
        for wrapper in list(self._wrappers):
            try:
                wrapper._update_process_group(dist.group.WORLD)
            except Exception as problem:
                lost.append(f"a {type(wrapper.module).__name__} in DistributedDataParallel must be wrapped again ({problem})")
        return lost


def open_store(info: InstanceInfo) -> Any:
    """The store through which ranks meet: rank 0 serves it on the cluster's address, at a port that the system chose."""
    import socket

    import torch.distributed as dist

    from skymagic.kernels import rendezvous

    if info.rank == 0:
        listener = socket.create_server((info.head_addr, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            info.head_addr, port, info.world_size, is_master=True, timeout=STORE_TIMEOUT,
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip
        rendezvous.tell("torch", port)
    else:
        port = rendezvous.hear("torch")
        store = dist.TCPStore(
            info.head_addr, port, info.world_size, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False
        )
    os.environ["MASTER_PORT"] = str(port)
    # env:// rendezvous by the user's own code joins this store instead of binding its port again
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return store


def abort_nccl() -> int:
    """Abort NCCL's communicators, which frees whoever waits in them; the number of groups aborted."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    count = 0
    for group in list(getattr(getattr(c10d, "_world", None), "pg_map", {})):
        with contextlib.suppress(Exception):
            backend = group._get_backend(sys.modules["torch"].device("cuda"))
            backend.abort()
            count += 1
    return count
