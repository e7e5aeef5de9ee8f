"""HuggingFace's example scripts in shape: arguments of the command line, a Trainer, no word of processes. Nothing is downloaded."""

import gc

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 8) % 16
        return {"input_ids": tokens, "labels": tokens}


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
trainer.train()
wrapped = type(trainer.model_wrapped).__name__
print(
    f"rank {arguments.process_index} local {arguments.local_process_index} of {arguments.world_size}: {wrapped}",
    flush=True,
)

# In gloo a thread may free DDP's last work while Python ends, which aborts the process: torch's own race, also without skymagic.
trainer.accelerator.free_memory()
del trainer, model
gc.collect()
torch.distributed.destroy_process_group()
