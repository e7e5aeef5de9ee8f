"""PyTorch's DDP tutorial in shape: a function that forms the group, wraps by keyword, and destroys the group while the model lives."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def demo():
    dist.init_process_group(backend="gloo", init_method="env://")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(
        module=torch.nn.Linear(4, 1), device_ids=None, find_unused_parameters=False
    )
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    world = dist.get_world_size()
    dist.destroy_process_group()
    return world, model.module.weight.sum().item()


demo()
