"""Training by DistributedDataParallel: batches by rank, a line per rank, snapshots of rank 0 that all resume from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from config import Config
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Batches: TypeAlias = Dataset[tuple[Tensor, Tensor]]


class Trainer:
    """One rank's part of a training.

    Args:
        model: on `device` already.
        train, test: items are (block, the block one character later).
    """

    def __init__(
        self, config: Config, model: nn.Module, device: torch.device, train: Batches, test: Batches
    ) -> None:
        self.config = config.trainer
        self.device, self.rank = device, dist.get_rank()
        self.model = model
        self.parallel = DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.optimizer.learning_rate,
            weight_decay=config.optimizer.weight_decay,
        )
        self.sampler: DistributedSampler[Any] = DistributedSampler(train, seed=self.config.seed)
        self.train_batches = DataLoader(train, self.config.batch_size, sampler=self.sampler)
        self.test_batches = DataLoader(
            test, self.config.batch_size, sampler=DistributedSampler(test, shuffle=False)
        )
        self.path = Path(self.config.snapshot) if self.config.snapshot else None
        self.epoch = 0
        """Epochs that are done."""

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Take up the newest snapshot that a rank finds; the others get it from there.

        They may be on other machines, and where nodes find their numbers by themselves, rank 0 need not be where it was.
        """
        mine: Any = None
        if self.path is not None and self.path.exists():
            mine = torch.load(self.path, map_location="cpu", weights_only=True)
        epochs: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(epochs, mine["epoch"] if mine is not None else 0)
        source = epochs.index(max(epochs))
        found = [mine if self.rank == source else None]
        dist.broadcast_object_list(found, src=source, device=self.device)
        if found[0] is not None:
            self.model.load_state_dict(found[0]["model"])
            self.optimizer.load_state_dict(found[0]["optimizer"])
            self.epoch = found[0]["epoch"]
            self.say(f"resumed from {self.path} after epoch {self.epoch}")

    def save(self) -> None:
        """Write the snapshot on rank 0, whole or not at all."""
        if self.rank != 0 or self.path is None:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
        }
        unfinished = self.path.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.replace(self.path)
        self.say(f"epoch {self.epoch} | snapshot saved to {self.path}")

    # -- epochs ------------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train until `epochs` are done; a snapshot's count."""
        while self.epoch < self.config.epochs:
            self.sampler.set_epoch(self.epoch)
            self.parallel.train()
            for step, batch in enumerate(self.train_batches):
                loss = self.loss(*batch)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
                self.optimizer.step()
                if step % self.config.log_every == 0:
                    self.say(f"epoch {self.epoch + 1} | step {step} | train loss {loss.item():.4f}")
            self.epoch += 1
            self.say(f"epoch {self.epoch} | test loss {self.test():.4f}")
            if self.epoch % self.config.save_every == 0 or self.epoch == self.config.epochs:
                self.save()

    def loss(self, block: Tensor, following: Tensor) -> Tensor:
        """Mean cross-entropy of the next characters, in nats."""
        logits = self.parallel(block.to(self.device))
        return functional.cross_entropy(logits.flatten(0, 1), following.to(self.device).flatten())

    @torch.no_grad()
    def test(self) -> float:
        """The test loss, averaged over all ranks."""
        self.parallel.eval()
        total = torch.zeros(2, device=self.device)
        for block, following in self.test_batches:
            total += torch.tensor(
                [self.loss(block, following).item() * len(block), len(block)], device=self.device
            )
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def say(self, text: str) -> None:
        """A line of this rank."""
        line = f"[rank {self.rank} on node {os.environ['GROUP_RANK']}] {text}\n"
        os.write(1, line.encode())  # at once, so that it does not mix with another rank's
