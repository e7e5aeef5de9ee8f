"""Reads what DeepSpeed's launcher reads when it is started on each node by itself: a hostfile and the options below."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

parser = argparse.ArgumentParser(prog="deepspeed")
parser.add_argument("--hostfile", "-H", type=Path, required=True)
parser.add_argument("--no_ssh", action="store_true", required=True)
parser.add_argument("--node_rank", type=int, required=True)
parser.add_argument("--master_addr", required=True)
parser.add_argument("--master_port", type=int, required=True)
parser.add_argument("script", nargs=argparse.REMAINDER)
asked = parser.parse_args()
slots = {}
for line in asked.hostfile.read_text().splitlines():
    ((name, count),) = re.findall(r"^(\S+)\s+slots=(\d+)$", line)
    assert name not in slots, f"{name} stands there twice"
    slots[name] = int(count)
counts = list(slots.values())
workers = []
for local in range(counts[asked.node_rank]):
    place = {
        "RANK": sum(counts[: asked.node_rank]) + local,
        "LOCAL_RANK": local,
        "WORLD_SIZE": sum(counts),
    }
    place |= {"MASTER_ADDR": asked.master_addr, "MASTER_PORT": asked.master_port}
    env = {**os.environ, **{key: str(value) for key, value in place.items()}}
    script, *arguments = asked.script
    workers.append(
        subprocess.Popen(
            [sys.executable, "-u", script, f"--local_rank={local}", *arguments], env=env
        )
    )
sys.exit(max(worker.wait() for worker in workers))
