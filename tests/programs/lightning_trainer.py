"""Lightning's Trainer with no word of the pool, each argument by keyword: trained, kept as a checkpoint, and trained on from there."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(in_features=4, out_features=1)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.log(name="loss", value=loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(params=self.parameters(), lr=0.1)


torch.manual_seed(0)
inputs = torch.randn(64, 4)
data = DataLoader(
    dataset=TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True
)
torch.manual_seed(
    int(__import__("os").environ["RANK"])
)  # other weights on each rank: the group makes them equal
model = Line()
quiet = {"enable_model_summary": False, "default_root_dir": "checkpoints", "log_every_n_steps": 1}
first = L.Trainer(max_epochs=2, logger=False, **quiet)
first.fit(model=model, train_dataloaders=data)
kept = first.checkpoint_callback.best_model_path
again = L.Trainer(max_epochs=4, strategy="ddp", logger=False, enable_checkpointing=False, **quiet)
again.fit(model=model, train_dataloaders=data, ckpt_path=kept)
{
    "world": [
        (one.world_size, one.global_rank, one.num_devices, one.num_nodes) for one in (first, again)
    ],
    "strategy": type(first.strategy).__name__,
    "steps": [first.global_step, again.global_step],
    "batches": again.num_training_batches,
    "kept": kept,
    "weights": model.net.weight.sum().item(),
    "loss": again.callback_metrics["loss"].item(),
}
