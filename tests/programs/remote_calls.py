"""torch's RPC, whose processes meet at an address of their own."""

import os

import torch
import torch.distributed.rpc as rpc

import skymagic as sky

rank = int(os.environ["RANK"])
place = f"tcp://{os.environ['MASTER_ADDR']}:{sky.instance_info().head_port}"
options = rpc.TensorPipeRpcBackendOptions(init_method=place)
rpc.init_rpc(
    name=f"worker{rank}",
    rank=rank,
    world_size=int(os.environ["WORLD_SIZE"]),
    rpc_backend_options=options,
)
answer = rpc.rpc_sync(to="worker0", func=torch.add, args=(torch.ones(1), rank)).item()
rpc.shutdown()
answer
