"""What ends in a race: a group that is destroyed while a model is alive, and a rank that fails while the others compute."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
wrapped, sharded = DistributedDataParallel(torch.nn.Linear(4, 4)), fully_shard(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD([*wrapped.parameters(), *sharded.parameters()], lr=0.01)


def tutorial():
    dist.init_process_group(backend="gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for _ in range(2):
        model(torch.randn(8, 4)).pow(2).mean().backward()
    total = model.module.weight.grad.sum().item()
    dist.destroy_process_group()
    return total


def accelerated():
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    accelerator.backward(model(torch.randn(8, 4)).pow(2).mean())
    total = model.module.weight.grad.sum().item()
    accelerator.end_training()
    return total


def step(fails=False):
    optimizer.zero_grad()
    (wrapped(torch.ones(2, 4)) + sharded(torch.ones(2, 4))).pow(2).mean().backward()
    if fails and dist.get_rank() == 1:
        raise ValueError("planted")
    while fails:
        sum(range(1000))
    optimizer.step()
    return [round(wrapped.module.weight.sum().item(), 5), round(sharded.weight.full_tensor().sum().item(), 5)]
