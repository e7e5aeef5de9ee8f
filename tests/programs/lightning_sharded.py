"""FSDP under Lightning on whatever devices there are: its strategy for models that are sharded with torch's fully_shard."""

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Sharded(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )

    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(1)
inputs = torch.randn(32, 4)
data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
model = Sharded()
trainer = L.Trainer(
    max_epochs=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(model, data)
net = model.net
{
    "world": trainer.world_size,
    "part": list(net[0].weight.to_local().shape),
    "weights": round(net[0].weight.full_tensor().sum().item(), 5),
}
