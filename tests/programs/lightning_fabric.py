"""A training loop of one's own on Lightning's Fabric, which finds devices and nodes by itself."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

fabric = L.Fabric()
fabric.launch()
net = torch.nn.Linear(4, 1)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8))
for (inputs,) in loader:
    fabric.backward(net(inputs).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
{"world": fabric.world_size, "batches": len(loader), "weights": net.weight.sum().item()}
