"""The torch process group of a rank: formed, freed while a rank is blocked in it, formed anew, and what hangs on it carried over."""

from __future__ import annotations

import contextlib
import gc
import json
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
from skymagic.runtime.info import InstanceInfo, taking_part
from skymagic.runtime.on_import import Patches, wraps

STORE_TIMEOUT = timedelta(seconds=60)
FIRST_USE_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other through the store once the group is formed: NCCL connects a subgroup, or two ranks, when
they first use it."""


class Group:
    """The default process group of this rank, with its lifetime.

    Args:
        backend: ``"gloo"``, ``"nccl"``, ``"cpu:gloo,cuda:nccl"``, …, or None for the one that fits the devices.
        timeout: of its collectives; None for torch's.
        posted: what this rank has, as the others are told.
    """

    def __init__(
        self,
        backend: str | None,
        timeout: timedelta | None = None,
        posted: backends.Posted | None = None,
    ) -> None:
        self.backend = backend
        self.timeout = timeout
        self.posted = posted or backends.Posted("")
        self._connections = Connections()
        self._aborts = unblock.Aborts()
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._on_default: weakref.WeakSet[Any] = (
            weakref.WeakSet()
        )  # wrappers that use the default group
        self._store: Any = None
        self._ours = False
        self._reported: set[tuple[str, int]] = (
            set()
        )  # notes, each with the variable that it is about
        self._size = 0  # number of ranks in the default group
        self._before: list[membership.Subgroup] = []
        self._defaults: list[
            Any
        ] = []  # groups that are gone, while others are formed in their place

    def join(self, info: InstanceInfo) -> None:
        """Form the group at a process's start; a rank that replaces another also takes part in what the others agree on."""
        self.form(info)
        self._size = info.world_size
        if rendezvous.generation() > 0:
            membership.form_again([], alive=False)
            carryover.differing([])

    def form(self, info: InstanceInfo) -> None:
        """Make the group, on a store of its own, at a port that the system gave to rank 0.

        Raises ValueError where these ranks cannot have the backend, or torch is built without it.
        """
        import torch.distributed as dist

        with self._connections.recorded():
            self._store, secret = open_store(info)
            backend = self._agreed(info)
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
            membership.verify(secret, info.rank)
            self._store.set_timeout(FIRST_USE_TIMEOUT)

    def _agreed(self, info: InstanceInfo) -> str:
        """The backend, on which rank 0 decides once all have told what they have: ranks that chose apart would wait for each other."""
        import torch
        import torch.distributed as dist

        store = dist.PrefixStore("backend", self._store)
        store.set(str(info.rank), json.dumps(asdict(self.posted)))
        with rendezvous.waiting():
            if info.rank == 0:
                posted = [
                    backends.Posted(**json.loads(store.get(str(rank))))
                    for rank in range(info.world_size)
                ]
                try:
                    store.set("chosen", f"+{backends.choose(self.backend, posted)}")
                except ValueError as refused:
                    store.set("chosen", f"-{refused}")
            chosen = store.get("chosen").decode()
        if chosen[:1] != "+":
            raise ValueError(chosen[1:])
        for name in dict.fromkeys(backends.legs(chosen[1:]).values()):
            if not dist.is_backend_available(name):
                raise ValueError(
                    f"this PyTorch ({torch.__version__}) is built without the backend {name!r}"
                )
        return str(chosen[1:])

    def leave(self) -> None:
        """Destroy the group, if there is one, also one that was being formed when a rank failed."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        if dist.is_initialized():
            self._ours = True
            try:
                dist.destroy_process_group()
            finally:
                self._ours = False
        c10d._world.group_count = (
            0  # names of groups are made of it, and must be the same on all ranks
        )
        self._connections.forget()

    def free(self) -> int:
        """Let the main thread out of a collective; called on another thread. The number of things shut down."""
        aborted = self._aborts.begin()  # first: it must begin while all communicators are whole
        return aborted + self._connections.shut_down()

    def reform(self, info: InstanceInfo) -> list[str]:
        """New groups with all ranks; models go on with them. Returns what the user must know, in sentences."""
        import torch.distributed as dist

        self.free()  # asynchronous work may be pending without anybody waiting for it
        self._aborts.wait()
        # after an attempt that failed, what variables hold is still of the time before it
        self._before = list(
            {one.key: one for one in (*membership.existing(), *self._before)}.values()
        )
        self._defaults += [dist.group.WORLD]
        self.leave()
        gc.collect()  # errors hold frames, and frames the old groups with their connections and threads
        unblock.empty_cache()
        self.form(info)
        formed = membership.form_again(self._before, alive=True, timeout=self.timeout)
        gone = [*(one.group for one in self._before), *filter(None, self._defaults)]
        carryover.rebind(dist.group.WORLD, gone, formed.made)
        carryover.reset_steps(waits=False)
        resized = info.world_size if info.world_size != self._size else None
        self._size, self._before, self._defaults = info.world_size, [], []
        return self._carry_models(formed.alive, resized)

    def settle(self) -> list[str]:
        """A cell has failed, and the groups are whole: begin the next step of models as after a whole one, on each rank alike."""
        with rendezvous.waiting():
            carryover.reset_steps(waits=True)
        return self._carry_models(range(self._size), None)

    def _carry_models(self, alive: Collection[int], resized: int | None) -> list[str]:
        """Let models go on; what cannot, once for each, and whose parameters differ between ranks. See `sharded.lost`."""
        variables = carryover.variables()
        lost = [
            *self._carry_wrappers(), *carryover.lost_groups(variables), *carryover.lost_shards(variables, alive, resized),
        ]  # fmt: skip
        notes = {note: (note, id(variables.get(note.partition(":")[0]))) for note in lost}
        fresh = [note for note, key in notes.items() if key not in self._reported]
        self._reported.update(notes.values())
        return [*fresh, *carryover.differing(list(self._on_default))]

    def _carry_wrappers(self) -> list[str]:
        """Give DDP wrappers new reducers, on the groups that are there now."""
        import torch.distributed as dist

        kept, lost = list(self._on_default), []
        for wrapper in kept:
            try:
                # A new reducer: a wrapper that comes to a replaced rank begins with the buckets that the model's order gives,
                # and gradients meet in the right places only when all ranks begin so.
                wrapper.process_group = dist.group.WORLD
                state = wrapper.__getstate__()
                # A reducer owns gradient buckets as large as the model. The old one goes first: with both at
                # once, a model that fills half of its GPU runs out of memory here.
                wrapper.reducer = wrapper.logger = None
                unblock.empty_cache()
                wrapper.__setstate__(state)
            except Exception as problem:
                lost.append(
                    f"{carryover.name_of(wrapper)}: wrap it in DistributedDataParallel again ({problem})"
                )
        for wrapper in [one for one in self._wrappers if one not in self._on_default]:
            with contextlib.suppress(Exception):  # its group is gone
                dist.get_process_group_ranks(wrapper.process_group)
                wrapper._update_process_group(wrapper.process_group)
                kept.append(wrapper)
        gone = [carryover.name_of(one) for one in list(self._wrappers) if one not in kept]
        return [*lost, *(f"{name}: its process group is gone; wrap it again" for name in gone)]

    # -- what the kernel asks ----------------------------------------------------------------------------------------

    def is_formed(self) -> bool:
        """Whether this process has a default group (the user may have destroyed it)."""
        # not an import, which would begin anew where a cell has emptied sys.modules
        dist = sys.modules.get("torch.distributed")
        return dist is None or bool(dist.is_initialized())

    def collectives(self) -> int | None:
        """How many collectives this rank has begun on the default group; None without one. Safe on any thread."""
        dist = sys.modules.get("torch.distributed")
        try:
            return begun(dist.group.WORLD) if dist is not None and dist.is_initialized() else None
        except Exception:  # a backend that does not count, or a cell has replaced torch's functions
            return None

    def sequence(self) -> dict[str, int]:
        """By group, how many collectives this rank has begun, under a key that all members share; and how many groups were made."""
        from torch.distributed import distributed_c10d as c10d

        counts = {"groups": c10d._world.group_count}
        for group, ranks in c10d._world.pg_group_ranks.items():
            with contextlib.suppress(Exception):  # a backend that does not count
                key = f"{c10d._world.pg_names[group]} {membership.digest(repr(sorted(ranks))):x}"
                counts[key] = begun(group)
        return counts

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Inside, connections of every group are known, also of groups that the user makes, and so is every DDP wrapper."""
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d
        from torch.nn.parallel import DistributedDataParallel as DDP

        init, destroy = dist.init_process_group, dist.destroy_process_group
        helper, wrap, rebuild = c10d._new_process_group_helper, DDP.__init__, DDP.__setstate__
        rank_pid, patches = os.getpid(), Patches()

        def of_other_process() -> bool:
            """Whether a cell has forked this process: torch's own functions act from here on, and the rank's groups are not its own."""
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
                    f"skymagic has formed the process group already ({dist.get_backend()}, {dist.get_world_size()} ranks); "
                    "this call of init_process_group changes nothing",
                    file=sys.stderr,
                )
                return
            # torch keys what it stores by this number, so that a second group on one store does not meet the first one's
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(
                int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "-1")) + 1
            )
            init(*args, **kwargs)

        @wraps(destroy)
        def destroy_process_group(group: Any = None) -> None:
            if of_other_process():
                destroy(group)
                return
            # In gloo, destroying a group while a DDP model is alive is a race in which a process that lives on may hang: the
            # programs that do so at their end are scripts, whose process ends. The group goes when it is formed anew, or with the rank.
            if not self._ours and dist.is_initialized() and group in (None, dist.group.WORLD):
                print(
                    "skymagic keeps the process group for the next cell; this call of destroy_process_group changes nothing",
                    file=sys.stderr,
                )
                return
            if any(wrapper.process_group is group for wrapper in self._wrappers):
                print(
                    "a DistributedDataParallel model uses this process group, and gloo may hang when it goes first: the group stays; "
                    "delete the model before to destroy it",
                    file=sys.stderr,
                )
                return
            destroy(group)

        @wraps(helper)
        def new_group_helper(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", args[3] if len(args) > 3 else "")
            if str(backend).lower() == "nccl":  # its connections are closed by its abort alone
                return helper(*args, **kwargs)
            with self._connections.recorded():
                return helper(*args, **kwargs)

        @wraps(wrap)
        def ddp_init(
            wrapper: Any, /, *args: Any, **kwargs: Any
        ) -> None:  # DDP(module=…) is an argument of its own
            if count := torch.cuda.device_count():
                args, kwargs = carryover.with_existing_devices(args, kwargs, count)
            wrap(wrapper, *args, **kwargs)
            self._wrappers.add(wrapper)
            if wrapper.process_group is dist.group.WORLD:
                self._on_default.add(wrapper)

        @wraps(rebuild)
        def ddp_setstate(
            wrapper: Any, state: dict[str, Any]
        ) -> None:  # a copy, or one that comes from another rank
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
            patches.enter_context(guard.installed())
            yield


_inherited: list[Any] = []
"""What `abandon_inherited` keeps allocated."""


def abandon_inherited() -> None:
    """In a process that a rank has forked: be in no group, and take part with nobody. Called once or often.

    The rank's groups stay allocated: freeing one waits for its threads, which a forked process does not have.
    """
    from torch.distributed import distributed_c10d as c10d

    if _inherited:
        return
    world = c10d._world
    tables = (
        world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.tags_to_pg, world.pg_to_tag,
    )  # fmt: skip
    everyone = taking_part(None)
    everyone.__enter__()
    _inherited.extend([world.default_pg, everyone, *map(dict.copy, tables)])
    for table in tables:
        table.clear()
    c10d._unregister_all_process_groups()
    world.default_pg, world.group_count = None, 0
    c10d._default_pg_init_method = None


def open_store(info: InstanceInfo) -> tuple[Any, str]:
    """(the store through which ranks meet, a secret of those that meet): rank 0 serves it on the cluster's address, at a free port."""
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


def begun(group: Any) -> int:
    """How many collectives this rank has begun on a group, on all legs of a composite backend: the group itself counts one leg alone."""
    legs: list[Any] = []
    for device in group._device_types:
        leg = group._get_backend(device)
        if not any(leg is other for other in legs):
            legs.append(leg)
    return sum(int(leg._get_sequence_number_for_group()) for leg in legs)
