"""torch.distributed with each argument by its keyword, as generated code and strict style guides have it."""

import inspect
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(
    backend="gloo", init_method="env://", timeout=timedelta(minutes=5), world_size=-1, rank=-1, store=None,
    group_name="", pg_options=None, device_id=None,
)  # fmt: skip
rank, world = dist.get_rank(), dist.get_world_size()
group = dist.new_group(
    ranks=list(range(world)), timeout=timedelta(minutes=5), backend="gloo", pg_options=None,
    use_local_synchronization=False, group_desc="by keyword", device_id=None, sort_ranks=True,
)  # fmt: skip
here = {"group": group, "async_op": False}
total = {"op": dist.ReduceOp.SUM, **here}
first = {"src": 0, "group_src": None}
last = {"dst": world - 1, "group_dst": None}
one, each, flat = torch.ones(1), [torch.ones(1) for _ in range(world)], torch.ones(world)
objects = [rank] * world
at_last = rank == world - 1
calls = {
    "all_gather": {"tensor_list": each, "tensor": one, **here},
    "all_gather_coalesced": {"output_tensor_lists": [[torch.ones(1)] for _ in range(world)], "input_tensor_list": [one], **here},
    "all_gather_into_tensor": {"output_tensor": flat, "input_tensor": one, **here},
    "all_gather_object": {"object_list": objects, "obj": rank, "group": group},
    "all_gather_single": {"output_tensor": flat, "input_tensor": one, **here},
    "all_reduce": {"tensor": one, **total},
    "all_reduce_coalesced": {"tensors": [one], **total},
    "all_to_all": {"output_tensor_list": each, "input_tensor_list": list(torch.ones(world, 1)), **here},
    "all_to_all_single": {
        "output": flat, "input": torch.ones(world), "output_split_sizes": None, "input_split_sizes": None, **here,
    },
    "barrier": {**here, "device_ids": None, "timeout": None},
    "broadcast": {"tensor": one, **first, **here},
    "broadcast_object_list": {"object_list": objects, **first, "group": group, "device": None},
    "gather": {"tensor": one, "gather_list": each if at_last else None, **last, **here},
    "gather_object": {"obj": rank, "object_gather_list": objects if at_last else None, **last, "group": group},
    "monitored_barrier": {"group": group, "timeout": None, "wait_all_ranks": False},
    "reduce": {"tensor": one, **last, **total},
    "reduce_scatter": {"output": one, "input_list": each, **total},
    "reduce_scatter_single": {"output": one, "input": flat, **total},
    "reduce_scatter_tensor": {"output": one, "input": flat, **total},
    "scatter": {"tensor": one, "scatter_list": each if rank == 0 else None, **first, **here},
    "scatter_object_list": {
        "scatter_object_output_list": [None], "scatter_object_input_list": objects if rank == 0 else None, **first,
        "group": group,
    },
}  # fmt: skip
left_out = {}
for name, arguments in calls.items():
    collective = getattr(dist, name)
    left_out[name] = sorted(set(inspect.signature(collective).parameters) - set(arguments))
    collective(**arguments)

parameters = inspect.signature(DistributedDataParallel).parameters.values()
every = {each.name: each.default for each in parameters if each.name != "module"}
model = DistributedDataParallel(module=torch.nn.Linear(2, 1), **{**every, "process_group": group})
model(input=torch.ones(1, 2)).sum().backward()
dist.destroy_process_group(group=group)
dist.destroy_process_group(group=None)
{
    "called": sorted(calls),
    "left_out": {name: names for name, names in left_out.items() if names},
    "one": one.item(),
}
