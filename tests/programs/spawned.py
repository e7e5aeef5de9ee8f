"""PyTorch's tutorials in shape: the program starts its own processes."""

import torch.multiprocessing as mp


def work(index):
    print("worked as", index)


mp.spawn(fn=work, args=(), nprocs=2, join=True)
