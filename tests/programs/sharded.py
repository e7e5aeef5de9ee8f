"""FSDP2's tutorial in shape: layers and model sharded over the default mesh, trained for two steps; the whole is asked for at the end."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model = nn.Sequential(Block(4), Block(4))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
rows = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
[list(model[0].up.weight.to_local().shape), round(model[0].up.weight.full_tensor().sum().item(), 5)]
