"""The torch process group of a rank: form it, free blocked ranks, and form it again.

Models and variables are carried over to the new group.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Collection, Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

from skymagic.plugins._torch import backends, carryover, guard, launched, membership, unblock
from skymagic.plugins._torch.unblock import Connections
from skymagic.runtime import rendezvous
from skymagic.runtime.info import InstanceInfo, participation
from skymagic.runtime.on_import import Patches, wraps

logger = logging.getLogger(__name__)

STORE_TIMEOUT = timedelta(seconds=60)
FIRST_USE_TIMEOUT = timedelta(minutes=30)
"""Time that ranks wait for each other through the store once the group is formed.

NCCL connects a subgroup, or two ranks, when they first use it.
"""


class Group:
    """Default process group of this rank, through its whole lifetime.

    Args:
        backend: ``"gloo"``, ``"nccl"``, ``"cpu:gloo,cuda:nccl"``, …, or None for the one that fits
            the devices.
        timeout: timeout of its collectives; None for torch's default.
        posted: hardware of this rank, as posted for the other ranks.
    """

    def __init__(
        self,
        backend: str | None,
        timeout: timedelta | None = None,
        posted: backends.RankHardware | None = None,
    ) -> None:
        self.backend = backend
        self.timeout = timeout
        self.posted = posted or backends.RankHardware("")
        self._connections = Connections()
        self._aborts = unblock.Aborts()
        # All DDP wrappers of this rank.
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        # Wrappers that use the default group.
        self._on_default: weakref.WeakSet[Any] = weakref.WeakSet()
        self._store: Any = None
        # True while skymagic itself calls init_process_group or destroy_process_group.
        self._ours = False
        # Notes, each with the `id` of the variable's value that it is about.
        self._reported: set[tuple[str, int]] = set()
        self._size = 0  # number of ranks in the default group
        self._before: list[membership.Subgroup] = []
        # Destroyed default groups, while others are formed in their place.
        self._defaults: list[Any] = []

    def join(self, info: InstanceInfo) -> None:
        """Form the group when the process starts.

        A rank that replaces another one also takes part in what the others agree on.
        """
        self.form(info)
        self._size = info.world_size
        if rendezvous.generation() > 0:
            # The same collectives in the same order as the other ranks call in `reform`.
            membership.form_again([], alive=False)
            carryover.differing([])

    def form(self, info: InstanceInfo) -> None:
        """Form the group on a new store, at a port that the system assigns to rank 0.

        Raises:
            ValueError: these ranks cannot have the backend, or torch is built without it.
        """
        import torch.distributed as dist

        with self._connections.record():
            self._store, secret = open_store(info)
            backend = self._agree_on_backend(info)
            prefix = dist.PrefixStore(f"skymagic-{rendezvous.generation()}", self._store)
            self._ours = True
            try:
                with rendezvous.waiting():
                    dist.init_process_group(
                        backend,
                        store=prefix,
                        rank=info.rank,
                        world_size=info.world_size,
                        timeout=self.timeout,
                    )
            finally:
                self._ours = False
            logger.info(
                "process group is formed: backend=%s world_size=%s generation=%s",
                backend,
                info.world_size,
                rendezvous.generation(),
            )
            # First of all: torch's store lets any process that reaches its port register as a rank.
            membership.verify(secret, info.rank)
            self._store.set_timeout(FIRST_USE_TIMEOUT)

    def _agree_on_backend(self, info: InstanceInfo) -> str:
        """Return the backend that rank 0 chooses once all ranks have posted their hardware.

        If ranks chose separately, they would wait for each other.
        """
        import torch
        import torch.distributed as dist

        store = dist.PrefixStore("backend", self._store)
        store.set(str(info.rank), json.dumps(asdict(self.posted)))
        with rendezvous.waiting():
            if info.rank == 0:
                posted = [
                    backends.RankHardware(**json.loads(store.get(str(rank))))
                    for rank in range(info.world_size)
                ]
                try:
                    store.set("chosen", f"+{backends.choose(self.backend, posted)}")
                except ValueError as refused:
                    store.set("chosen", f"-{refused}")
            answer = store.get("chosen").decode()
        if answer[:1] != "+":
            raise ValueError(answer[1:])
        for name in dict.fromkeys(backends.backend_by_device(answer[1:]).values()):
            if not dist.is_backend_available(name):
                raise ValueError(
                    f"this PyTorch ({torch.__version__}) is built without the backend {name!r}"
                )
        return str(answer[1:])

    def leave(self) -> None:
        """Destroy the group if there is one, even if it was being formed when a rank failed."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        if dist.is_initialized():
            self._ours = True
            try:
                dist.destroy_process_group()
            finally:
                self._ours = False
        # Names of groups contain this number, and must be the same on all ranks.
        c10d._world.group_count = 0
        self._connections.forget()

    def free(self) -> int:
        """Free the main thread from a collective. Called on another thread.

        Returns:
            The number of communicators and connections that were shut down.
        """
        # First, because it must start while all communicators are intact.
        aborted = self._aborts.begin()
        return aborted + self._connections.shut_down()

    def reform(self, info: InstanceInfo) -> list[str]:
        """Form new groups with all ranks, and carry models over to them.

        Returns:
            A sentence for each thing that the user must know.
        """
        import torch.distributed as dist

        # Asynchronous work may be pending that nobody waits for.
        self.free()
        self._aborts.wait()
        # After an attempt that failed, variables still hold the groups from before it.
        self._before = list(
            {
                subgroup.key: subgroup
                for subgroup in (*membership.existing_subgroups(), *self._before)
            }.values()
        )
        self._defaults += [dist.group.WORLD]
        self.leave()
        # Errors hold frames, and frames hold the old groups with their connections and threads.
        gc.collect()
        unblock.empty_cache()
        self.form(info)
        formed = membership.form_again(self._before, alive=True, timeout=self.timeout)
        old_groups = [*(subgroup.group for subgroup in self._before), *filter(None, self._defaults)]
        carryover.rebind(dist.group.WORLD, old_groups, formed.groups)
        carryover.reset_steps(waits=False)
        resized = info.world_size if info.world_size != self._size else None
        self._size, self._before, self._defaults = info.world_size, [], []
        return self._carry_models(formed.alive, resized)

    def settle(self) -> list[str]:
        """Clean up after a cell that failed while the groups stayed intact.

        The next step of models starts clean, on all ranks.
        """
        with rendezvous.waiting():
            carryover.reset_steps(waits=True)
        return self._carry_models(range(self._size), None)

    def _carry_models(self, alive: Collection[int], resized: int | None) -> list[str]:
        """Carry models over to the current groups.

        Returns:
            Notes about what was lost, once for each, and about parameters that differ between
                ranks. See `carryover.lost_shards`.
        """
        variables = carryover.variables()
        lost = [
            *self._carry_wrappers(),
            *carryover.lost_groups(variables),
            *carryover.lost_shards(variables, alive, resized),
        ]
        notes = {note: (note, id(variables.get(note.partition(":")[0]))) for note in lost}
        fresh = [note for note, key in notes.items() if key not in self._reported]
        self._reported.update(notes.values())
        return [*fresh, *carryover.differing(list(self._on_default))]

    def _carry_wrappers(self) -> list[str]:
        """Give DDP wrappers new reducers on the current groups."""
        import torch.distributed as dist

        carried, lost = list(self._on_default), []
        for wrapper in carried:
            try:
                # A wrapper that is sent to a replaced rank starts with buckets in the model's
                # order. Gradients only match if all ranks start like that, so each gets a new
                # reducer.
                wrapper.process_group = dist.group.WORLD
                state = wrapper.__getstate__()
                # A reducer owns gradient buckets as large as the model. The old one goes first:
                # with both at once, a model that fills half of its GPU runs out of memory here.
                wrapper.reducer = wrapper.logger = None
                unblock.empty_cache()
                wrapper.__setstate__(state)
            except Exception as problem:
                lost.append(
                    f"{carryover.name_of(wrapper)}: wrap it in DistributedDataParallel again "
                    f"({problem})"
                )
        for wrapper in [wrapper for wrapper in self._wrappers if wrapper not in self._on_default]:
            # An error means that the wrapper's group was destroyed.
            with contextlib.suppress(Exception):
                dist.get_process_group_ranks(wrapper.process_group)
                wrapper._update_process_group(wrapper.process_group)
                carried.append(wrapper)
        lost_names = [
            carryover.name_of(wrapper) for wrapper in list(self._wrappers) if wrapper not in carried
        ]
        return [
            *lost,
            *(f"{name}: its process group is gone; wrap it again" for name in lost_names),
        ]

    # -- queries of the kernel ---------------------------------------------------------------------

    def is_formed(self) -> bool:
        """Return True if this process has a default group. The user may have destroyed it."""
        # Do not import it: that would start afresh if a cell has emptied sys.modules.
        dist = sys.modules.get("torch.distributed")
        return dist is None or bool(dist.is_initialized())

    def collectives(self) -> int | None:
        """Return how many collectives this rank has started on the default group, or None.

        Safe on any thread.
        """
        dist = sys.modules.get("torch.distributed")
        try:
            return (
                collectives_begun(dist.group.WORLD)
                if dist is not None and dist.is_initialized()
                else None
            )
        except Exception:
            # The backend does not count, or a cell has replaced torch's functions.
            return None

    def sequence(self) -> dict[str, int]:
        """Return how many collectives this rank has started on each group.

        The keys are the same on all members of a group. The key ``groups`` has the number of groups
        created.
        """
        from torch.distributed import distributed_c10d as c10d

        counts = {"groups": c10d._world.group_count}
        for group, ranks in c10d._world.pg_group_ranks.items():
            # An error means that the backend does not count.
            with contextlib.suppress(Exception):
                key = f"{c10d._world.pg_names[group]} {membership.digest(repr(sorted(ranks))):x}"
                counts[key] = collectives_begun(group)
        return counts

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Track all DDP wrappers and the connections of all groups, the user's groups too."""
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d
        from torch.nn.parallel import DistributedDataParallel as DDP

        init, destroy = dist.init_process_group, dist.destroy_process_group
        helper, wrap, rebuild = c10d._new_process_group_helper, DDP.__init__, DDP.__setstate__
        rank_pid, patches = os.getpid(), Patches()

        def of_other_process() -> bool:
            """Return True if a cell has forked this process.

            From then on torch's own functions are used, and the rank's groups are abandoned.
            """
            if os.getpid() == rank_pid:
                return False
            patches.close()
            abandon_inherited()
            return True

        @wraps(init)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            if of_other_process():
                init(*args, **kwargs)
                return
            if not self._ours and dist.is_initialized():
                print(
                    f"skymagic has formed the process group already ({dist.get_backend()}, "
                    f"{dist.get_world_size()} ranks); this call of init_process_group changes "
                    "nothing",
                    file=sys.stderr,
                )
                return
            # torch prefixes its keys in the store with this number, so that a second group on one
            # store does not read those of the first.
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(
                int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "-1")) + 1
            )
            init(*args, **kwargs)

        @wraps(destroy)
        def destroy_process_group(group: Any = None) -> None:
            if of_other_process():
                destroy(group)
                return
            # In gloo, destroying a group while a DDP model exists is a race in which a process that
            # lives on may hang. Programs that do so at their end are scripts, whose process ends.
            # Here the group is destroyed when it is formed again, or with the rank.
            if not self._ours and dist.is_initialized() and group in (None, dist.group.WORLD):
                print(
                    "skymagic keeps the process group for the next cell; this call of "
                    "destroy_process_group changes nothing",
                    file=sys.stderr,
                )
                return
            if any(wrapper.process_group is group for wrapper in self._wrappers):
                print(
                    "a DistributedDataParallel model uses this process group, and gloo may hang "
                    "when it goes first: the group stays; delete the model before to destroy it",
                    file=sys.stderr,
                )
                return
            destroy(group)

        @wraps(helper)
        def new_group_helper(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", args[3] if len(args) > 3 else "")
            # Only an abort closes NCCL's connections.
            if str(backend).lower() == "nccl":
                return helper(*args, **kwargs)
            with self._connections.record():
                return helper(*args, **kwargs)

        @wraps(wrap)
        # positional-only, because DDP(module=…) is an argument of torch's own
        def ddp_init(wrapper: Any, /, *args: Any, **kwargs: Any) -> None:
            if count := torch.cuda.device_count():
                args, kwargs = carryover.with_existing_devices(args, kwargs, count)
            wrap(wrapper, *args, **kwargs)
            self._wrappers.add(wrapper)
            if wrapper.process_group is dist.group.WORLD:
                self._on_default.add(wrapper)

        @wraps(rebuild)
        def ddp_setstate(wrapper: Any, state: dict[str, object]) -> None:
            # The wrapper is a copy, or comes from another rank.
            rebuild(wrapper, carryover.on_own_device(state))
            carryover.complete(wrapper)
            self._wrappers.add(wrapper)
            self._on_default.add(wrapper)

        with patches:
            for module in (dist, c10d):
                patches.put(module, "init_process_group", init_process_group)
                patches.put(module, "destroy_process_group", destroy_process_group)
            patches.put(c10d, "_new_process_group_helper", new_group_helper)
            patches.put(DDP, "__init__", ddp_init)
            patches.put(DDP, "__setstate__", ddp_setstate)
            patches.enter_context(guard.collectives_checked())
            yield


_inherited: list[Any] = []
"""Objects that `abandon_inherited` keeps allocated."""


def abandon_inherited() -> None:
    """Leave all groups in a process forked from a rank. Safe to call repeatedly.

    The process takes part in no run. The rank's groups stay allocated, because freeing one waits
    for its threads, which a forked process does not have.
    """
    from torch.distributed import distributed_c10d as c10d

    if _inherited:
        return
    world = c10d._world
    tables = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.tags_to_pg,
        world.pg_to_tag,
    )
    # Never left: this process takes part in no run for the rest of its life.
    everyone = participation(None)
    everyone.__enter__()
    _inherited.extend([world.default_pg, everyone, *map(dict.copy, tables)])
    for table in tables:
        table.clear()
    c10d._unregister_all_process_groups()
    world.default_pg, world.group_count = None, 0
    c10d._default_pg_init_method = None


def open_store(info: InstanceInfo) -> tuple[Any, str]:
    """Return the store through which ranks meet, and a secret that they share.

    Rank 0 serves the store on the cluster's address, at a free port.
    """
    import torch.distributed as dist

    size = info.world_size
    make = partial(
        dist.TCPStore,
        info.head_addr,
        world_size=size,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
    )
    if info.rank == 0:
        # The store gets a listening socket rather than the number of a free port, which another
        # process could take first.
        listener = socket.create_server((info.head_addr, 0))
        port = listener.getsockname()[1]
        store = make(port, is_master=True, master_listen_fd=listener.detach())
        secret = secrets.token_hex(16)
        rendezvous.put("torch", [port, secret])
    else:
        port, secret = rendezvous.get("torch")
        with rendezvous.waiting():
            store = make(port, is_master=False)
    launched.enter(info, port)
    return store, secret


def collectives_begun(group: Any) -> int:
    """Return how many collectives this rank has started on all backends of a group.

    The group itself counts only one backend of a composite one.
    """
    legs: list[Any] = []
    for device in group._device_types:
        leg = group._get_backend(device)
        # A backend that serves several devices counts once.
        if not any(leg is other for other in legs):
            legs.append(leg)
    return sum(int(leg._get_sequence_number_for_group()) for leg in legs)
