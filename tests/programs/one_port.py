"""Processes that each rank forks, with one fixed port for all: on one machine, only one rank's can have it."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

port = int(os.environ["ONE_PORT"])
# not multiprocessing's Event: `set` waits for ever for a process that was killed while it waited
ended, over = os.pipe()


def work(rank, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    os.close(over)
    os.read(ended, 1)  # meanwhile the port is taken


dist.barrier()
try:
    mp.start_processes(work, args=(port,), nprocs=2, start_method="fork")
finally:
    os.close(over)
