"""accelerate with its state made first, as scripts do that print from one process before they have a model."""

import torch
from accelerate import Accelerator, PartialState

state = PartialState()
with state.main_process_first():
    examples = list(range(8))
accelerator = Accelerator()
model, optimizer = accelerator.prepare(
    net := torch.nn.Linear(4, 1), torch.optim.SGD(net.parameters(), lr=0.1)
)
with state.split_between_processes(examples) as mine:
    accelerator.backward(model(torch.randn(len(mine), 4)).pow(2).mean())
optimizer.step()
accelerator.end_training()
{
    "world": (state.num_processes, accelerator.num_processes),
    "mine": mine,
    "weights": net.weight.sum().item(),
}
