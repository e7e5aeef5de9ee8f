"""A script for accelerate launch."""

import torch
from accelerate import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.ones(1), reduction="sum")
place = f"rank {accelerator.process_index} local {accelerator.local_process_index} of {accelerator.num_processes}"
print(f"{place}: {total.item():.0f} took part", flush=True)
accelerator.end_training()
