"""Preprocessing as in notebooks of data science: Python's own pools, started afresh, with the notebook's functions and classes."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess

import torch

SCALE = 10


@dataclass
class Example:
    number: int

    def scaled(self):
        return Example(SCALE * self.number)


def prepared(example):
    return example.scaled()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return prepared(Example(index)).number


class Worker(SpawnProcess):
    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def run(self):
        self.answers.put(prepared(Example(5)))


found = {}
for method in ("spawn", "forkserver"):
    context = multiprocessing.get_context(method)
    with context.Pool(processes=1) as pool:
        found[method] = pool.map(prepared, [Example(1), Example(2)])
with ProcessPoolExecutor(
    max_workers=1, mp_context=multiprocessing.get_context("spawn")
) as executor:
    found["executor"] = [executor.submit(prepared, Example(3)).result()]
answers = multiprocessing.get_context("spawn").SimpleQueue()
worker = Worker(answers)
worker.start()
found["subclass"] = [answers.get()]
worker.join()
multiprocessing.set_start_method(
    "spawn", force=True
)  # such a method is the default since Python 3.14
(batch,) = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=1)
multiprocessing.set_start_method(None, force=True)
assert all(isinstance(example, Example) for examples in found.values() for example in examples)
{
    **{name: [example.number for example in examples] for name, examples in found.items()},
    "loader": batch.tolist(),
}
