"""Processes that each rank forks, with one fixed port for all: on one machine, only one rank's can have it."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

port = int(os.environ["ONE_PORT"])
over = mp.get_context("fork").Event()


def work(rank, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    over.wait(60)  # meanwhile the port is taken


dist.barrier()
try:
    mp.start_processes(work, args=(port,), nprocs=2, start_method="fork")
finally:
    over.set()
