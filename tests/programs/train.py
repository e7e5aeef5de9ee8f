"""A script for a launcher: forms the group from the environment, and says who took part."""

import os

import torch
import torch.distributed as dist

dist.init_process_group(backend="gloo")
total = torch.ones(1)
dist.all_reduce(total)
dist.barrier()
print(
    f"rank {dist.get_rank()} local {os.environ['LOCAL_RANK']} of {dist.get_world_size()}: {total.item():.0f} took part",
    flush=True,
)
dist.destroy_process_group()
