"""A Trainer that is given each of its arguments by keyword, as configuration files do."""

import inspect

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

chosen = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0, "logger": False}
chosen |= {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
parameters = inspect.signature(L.Trainer).parameters
trainer = L.Trainer(**{**{name: each.default for name, each in parameters.items()}, **chosen})
model = BoringModel()
trainer.fit(
    model=model,
    train_dataloaders=torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=2),
    val_dataloaders=None,
    datamodule=None,
    ckpt_path=None,
)
fabric = L.Fabric(
    **{name: each.default for name, each in inspect.signature(L.Fabric).parameters.items()}
)
[
    trainer.world_size,
    fabric.world_size,
    len(parameters) > 30,
    round(model.layer.weight.sum().item(), 6),
]
