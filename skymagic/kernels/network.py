"""Network interface to the head node, and the environment that frameworks read."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skymagic.runtime.info import InstanceInfo

SIOCGIFADDR = 0x8915


def interface_to(address: str) -> str | None:
    """Return the name of the interface that reaches `address`, or None if unknown.

    Without it gloo binds to the address of the hostname, which is often 127.0.0.1, and hangs.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect((address, 9))  # sends nothing
        own_address = probe.getsockname()[0]
        if own_address.startswith("127."):
            names = [name for _, name in socket.if_nameindex()]
            return "lo0" if "lo0" in names else "lo"  # macOS, Linux
    return next(
        (name for name, address in interface_addresses().items() if address == own_address), None
    )


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface of this machine; empty if unknown."""
    addresses: dict[str, str] = {}
    if sys.platform != "linux":
        return addresses
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                # the address within struct ifreq
                addresses[name] = socket.inet_ntoa(packed[20:24])
    return addresses


def private_addresses() -> list[str]:
    """Return this machine's private IPv4 addresses other than loopback.

    Nothing listens on a public one.
    """
    addresses = set(interface_addresses().values())
    with contextlib.suppress(OSError):  # the host name may not resolve
        addresses |= {
            str(entry[4][0])
            for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        }
    addresses = set(filter(_private, addresses))
    return sorted(addresses, key=ipaddress.IPv4Address)


def _private(address: str) -> bool:
    ip = ipaddress.IPv4Address(address)
    shared = ip in ipaddress.IPv4Network("100.64.0.0/10")  # RFC 6598: carriers' and tailnets'
    return (ip.is_private or shared) and not ip.is_loopback and not ip.is_unspecified


def environment(info: InstanceInfo) -> dict[str, str]:
    """Return the variables that torch, JAX, torchrun scripts and SkyPilot's examples read.

    MASTER_PORT is added once it is known. Names: torch.distributed.elastic's environment, and
    SkyPilot's "environment variables" page.
    """
    addresses = {peer.node: peer.addr for peer in info.peers} or {0: info.head_addr}
    values = {
        "RANK": info.rank,
        "LOCAL_RANK": info.local_rank,
        "WORLD_SIZE": info.world_size,
        "LOCAL_WORLD_SIZE": info.local_world_size,
        "NODE_RANK": info.node,
        "GROUP_RANK": info.node,
        "GROUP_WORLD_SIZE": info.total_nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": info.rank,
        "ROLE_WORLD_SIZE": info.world_size,
        "MASTER_ADDR": info.head_addr,
        "COMPUTE_POOL": info.to_json(),
        "SKYPILOT_NODE_IPS": "\n".join(addresses[node] for node in sorted(addresses)),
        "SKYPILOT_NUM_NODES": info.total_nodes,
        "SKYPILOT_NODE_RANK": info.node,
        "SKYPILOT_NUM_GPUS_PER_NODE": info.accelerators,
        "SKYPILOT_TASK_ID": info.job_id,
    }
    return {name: str(value) for name, value in values.items()}


def interfaces(info: InstanceInfo, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that pin gloo and NCCL to the cluster's interface.

    Variables that the user has set are left out.
    """
    name = interface_to(info.head_addr)
    # NCCL treats a name as a prefix unless "=" comes first: eth1 would also match eth10
    names = (
        {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name is not None else {}
    )
    unset = {key: value for key, value in names.items() if key not in environment}
    ports = infiniband_ports() if info.total_nodes > 1 and "NCCL_IB_HCA" not in environment else ()
    return {**unset, **({"NCCL_IB_HCA": selected} if (selected := hcas(ports)) else {})}


def infiniband_ports(
    root: Path = Path("/sys/class/infiniband"),
) -> tuple[tuple[str, bool, str], ...]:
    """Return (``mlx5_0:1``, is active, InfiniBand or Ethernet) for each RDMA port of this machine.

    EFA's ports are not NCCL's.
    """
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            active = "ACTIVE" in (port / "state").read_text()
            ports.append(
                (
                    f"{port.parents[1].name}:{port.name}",
                    active,
                    (port / "link_layer").read_text().strip(),
                )
            )
    return tuple(ports)


def hcas(ports: Sequence[tuple[str, bool, str]]) -> str:
    """Return NCCL_IB_HCA for these ports, or "" if NCCL's default, all of them, is right.

    By default NCCL uses all active ports. If a machine has an InfiniBand fabric and an Ethernet
    card for storage, it then waits for connections over the second one that lead nowhere.
    """
    active = [(name, layer) for name, is_active, layer in ports if is_active]
    fabric = [name for name, layer in active if layer == "InfiniBand"]
    return f"={','.join(fabric)}" if fabric and len(fabric) < len(active) else ""
