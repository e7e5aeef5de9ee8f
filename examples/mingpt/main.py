"""Train a character-level GPT on all processes that torchrun starts: ``torchrun … main.py [trainer.epochs=2 …]``."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from config import Config, read
from data import Blocks, Text
from model import GPT
from torch.distributed.elastic.multiprocessing.errors import record
from trainer import Batches, Trainer


def device_of(wanted: str) -> torch.device:
    """This process's device: a GPU of its own, or the CPU.

    Raises:
        SystemExit: the node has fewer GPUs than processes were started on it.
    """
    here, asked = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if wanted == "cpu" or (wanted == "auto" and not here):
        return torch.device("cpu")
    if wanted not in ("auto", "cuda"):
        raise SystemExit(f"trainer.device={wanted}: write auto, cuda or cpu")
    if here < asked:
        fewer = f"start {here} (--nproc_per_node={here}), or " if here else ""
        raise SystemExit(
            f"{asked} processes were started on this node, and it has {here} GPUs: {fewer}train on the CPU (trainer.device=cpu)"
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def datasets(config: Config) -> tuple[Text, Batches, Batches]:
    """(the text, blocks to train on, blocks to test with)."""
    whole = (config.folder / config.data.path).read_text()
    text = Text(whole[: int(len(whole) * config.data.truncate)])
    size, split = config.data.block_size, int(len(text.numbers) * config.data.train_split)
    train, test = Blocks(text.numbers[:split], size), Blocks(text.numbers[split:], size)
    if not len(train) or not len(test):
        raise SystemExit(f"{config.data.path} is too short for blocks of {size} characters")
    return text, train, test


@record
def main() -> None:
    """One process of the training."""
    config = read(Path(__file__).parent / "config.toml", sys.argv[1:])
    device = device_of(config.trainer.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(config.trainer.seed)
    text, train, test = datasets(config)
    model = GPT(config.model, len(text.characters), config.data.block_size).to(device)
    trainer = Trainer(config, model, device, train, test)
    size = sum(weight.numel() for weight in model.parameters())
    trainer.say(f"of {dist.get_world_size()}, on {device}: {len(train)} blocks, {size} parameters")
    trainer.resume()
    trainer.fit()
    if dist.get_rank() == 0:
        print(text.decode(model.continued(text.numbers[:8].to(device), 120).cpu()))
    dist.barrier()  # nobody leaves while another one still has something to say to it
    # DDP keeps the process group alive, and a thread of gloo's that is still at work when Python ends aborts the process
    del trainer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
