"""A built-in list of common types with what they cost: for who may ask neither EC2 nor the price list, and marked as such."""

from __future__ import annotations

from skymagic.plan.accelerators import kind
from skymagic.providers.aws.instance_types import InstanceType

DATE = "2025-07-01"
"""When these were the prices on demand in us-east-1, for Linux."""
WORDS = f"estimate of {DATE}"

# type, dollars per hour, vCPUs, GB, GPU:count, Gbit/s, network cards, GB on the machine's own disks, EFA
_TABLE = """
g4dn.xlarge      0.526      4    16  T4:1         25   1    125  -
g4dn.2xlarge     0.752      8    32  T4:1         25   1    225  -
g4dn.4xlarge     1.204     16    64  T4:1         25   1    225  -
g4dn.8xlarge     2.176     32   128  T4:1         50   1    900  efa
g4dn.16xlarge    4.352     64   256  T4:1         50   1    900  efa
g4dn.12xlarge    3.912     48   192  T4:4         50   1    900  efa
g5.xlarge        1.006      4    16  A10G:1       10   1    250  -
g5.2xlarge       1.212      8    32  A10G:1       10   1    450  -
g5.4xlarge       1.624     16    64  A10G:1       25   1    600  -
g5.8xlarge       2.448     32   128  A10G:1       25   1    900  efa
g5.16xlarge      4.096     64   256  A10G:1       25   1   1900  efa
g5.12xlarge      5.672     48   192  A10G:4       40   1   3800  efa
g5.24xlarge      8.144     96   384  A10G:4       50   1   3800  efa
g5.48xlarge     16.288    192   768  A10G:8      100   1   7600  efa
g6.xlarge        0.8048     4    16  L4:1         10   1    250  -
g6.2xlarge       0.9776     8    32  L4:1         10   1    450  -
g6.4xlarge       1.3232    16    64  L4:1         25   1    600  -
g6.8xlarge       2.0144    32   128  L4:1         25   1    900  efa
g6.16xlarge      3.3968    64   256  L4:1         25   1   1880  efa
g6.12xlarge      4.6016    48   192  L4:4         40   1   3760  efa
g6.24xlarge      6.6752    96   384  L4:4         50   1   3760  efa
g6.48xlarge     13.3504   192   768  L4:8        100   1   7520  efa
g6e.xlarge       1.861      4    32  L40S:1       20   1    250  -
g6e.2xlarge      2.24208    8    64  L40S:1       20   1    450  -
g6e.4xlarge      3.00424   16   128  L40S:1       20   1    600  -
g6e.8xlarge      4.52856   32   256  L40S:1       25   1    900  efa
g6e.16xlarge     7.57719   64   512  L40S:1       35   1   1900  efa
g6e.12xlarge    10.49264   48   384  L40S:4      100   1   3800  efa
g6e.24xlarge    15.06559   96   768  L40S:4      200   2   3800  efa
g6e.48xlarge    30.13118  192  1536  L40S:8      400   4   7600  efa
p3dn.24xlarge   31.212     96   768  V100-32GB:8 100   1   1800  efa
p4d.24xlarge    21.957642  96  1152  A100:8      400   4   8000  efa
p4de.24xlarge   27.447075  96  1152  A100-80GB:8 400   4   8000  efa
p5.4xlarge       6.88      16   256  H100:1      100   1   3800  efa
p5.48xlarge     55.04     192  2048  H100:8     3200  32  30400  efa
p5en.48xlarge   63.296    192  2048  H200:8     3200  16  30400  efa
p6-b200.48xlarge 113.9328 192  2048  B200:8     3200   8  30400  efa
c7i.large        0.08925    2     4  -          12.5   1      0  -
c7i.xlarge       0.1785     4     8  -          12.5   1      0  -
c7i.2xlarge      0.357      8    16  -          12.5   1      0  -
c7i.4xlarge      0.714     16    32  -          12.5   1      0  -
c7i.8xlarge      1.428     32    64  -          12.5   1      0  -
c7i.16xlarge     2.856     64   128  -            25   1      0  -
m7i.large        0.1008     2     8  -          12.5   1      0  -
m7i.xlarge       0.2016     4    16  -          12.5   1      0  -
m7i.2xlarge      0.4032     8    32  -          12.5   1      0  -
m7i.4xlarge      0.8064    16    64  -          12.5   1      0  -
m7i.8xlarge      1.6128    32   128  -          12.5   1      0  -
m7i.16xlarge     3.2256    64   256  -            25   1      0  -
r7i.large        0.1323     2    16  -          12.5   1      0  -
r7i.xlarge       0.2646     4    32  -          12.5   1      0  -
r7i.2xlarge      0.5292     8    64  -          12.5   1      0  -
r7i.4xlarge      1.0584    16   128  -          12.5   1      0  -
r7i.8xlarge      2.1168    32   256  -          12.5   1      0  -
r7i.16xlarge     4.2336    64   512  -            25   1      0  -
"""


def _read(line: str) -> tuple[InstanceType, float]:
    name, price, vcpus, memory, gpu, network, cards, nvme, efa = line.split()
    device, _, count = gpu.partition(":")
    return InstanceType(
        name,
        "x86_64",
        int(vcpus),
        float(memory),
        gpu=device if count else None,
        gpus=int(count or 0),
        gpu_memory=float(kind(device).memory) if count else 0.0,
        network=float(network),
        cards=int(cards),
        nvme=float(nvme),
        efa=efa == "efa",
    ), float(price)


_ROWS = [_read(line) for line in _TABLE.strip().splitlines()]
TYPES = {one.name: one for one, _ in _ROWS}
"""Types by name."""
PRICES = {one.name: price for one, price in _ROWS}
"""Dollars per hour of one machine by type, on demand, in us-east-1."""
