"""What ends in a race: a group that is destroyed while a model is alive, and a rank that fails while the others compute."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
wrapped, sharded = (
    DistributedDataParallel(torch.nn.Linear(4, 4)),
    fully_shard(torch.nn.Linear(4, 4)),
)
optimizer = torch.optim.SGD([*wrapped.parameters(), *sharded.parameters()], lr=0.01)


def layers():
    return torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])


def tutorial():
    dist.init_process_group(backend="gloo")
    model = DistributedDataParallel(layers())
    descent = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        descent.zero_grad()
        model(torch.randn(8, 256)).pow(2).mean().backward()
        descent.step()
    dist.destroy_process_group()
    return model.module[0].weight.sum().item()


def accelerated():
    from accelerate import Accelerator

    accelerator = Accelerator()
    net = layers()
    model, descent = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for _ in range(4):
        descent.zero_grad()
        accelerator.backward(model(torch.randn(8, 256)).pow(2).mean())
        descent.step()
    accelerator.end_training()
    return net[0].weight.sum().item()


def step(fails=False):
    optimizer.zero_grad()
    (wrapped(torch.ones(2, 4)) + sharded(torch.ones(2, 4))).pow(2).mean().backward()
    if fails and dist.get_rank() == 1:
        raise ValueError("planted")
    while fails:
        sum(range(1000))
    optimizer.step()
    return [
        round(wrapped.module.weight.sum().item(), 5),
        round(sharded.weight.full_tensor().sum().item(), 5),
    ]
