"""PyTorch's tutorial "Writing Distributed Applications" in shape: processes that the program forks form a group of their own."""

import os
import socket
from contextlib import suppress

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, size, answers):
    tensor = torch.full((1,), float(rank))
    dist.all_reduce(tensor)
    answers.put((rank, dist.get_rank(), dist.get_world_size(), tensor.item()))


def init_process(rank, size, port, answers, fn, backend="gloo"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size, answers)
    dist.destroy_process_group()


def free_port():
    """Below those that the system gives by itself: nobody gets it before the group is there."""
    port = 20_000 + os.getpid() * 53 % 12_000
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
        port += 1


def trained_by(method, size):
    context, port = mp.get_context(method), free_port()
    answers = context.Queue()
    processes = [
        context.Process(target=init_process, args=(rank, size, port, answers, run))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    trained = sorted(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    return trained


trained = [trained_by("fork", 3)]
answers, port = mp.get_context("fork").SimpleQueue(), free_port()
mp.start_processes(
    lambda rank: init_process(rank, 2, port, answers, run), nprocs=2, start_method="fork"
)
trained.append(sorted(answers.get() for _ in range(2)))
dist.all_reduce(own := torch.ones(1))
trained, own.item()
