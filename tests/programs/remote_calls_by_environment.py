"""torch's RPC examples in shape: the program names the address at which its processes meet in the environment."""

import os
import socket

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

rank = int(os.environ["RANK"])
with socket.create_server(("localhost", 0)) as free:
    port = [free.getsockname()[1]]
dist.broadcast_object_list(port)
os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = str(port[0])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
answer = rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), rank)).item()
rpc.shutdown()
answer
