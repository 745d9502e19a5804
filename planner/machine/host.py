"""The memory of a node's host, by the cluster file, for what techniques keep there instead of on the devices."""

from collections.abc import Sequence

from titan.machine import OFFLOADED, too_little
from titan.planner.machine.cluster import DeviceMemory

GIB = 2.0**30


def short_of(memory: DeviceMemory, bytes_: Sequence[float], world_size: int) -> str:
    """Why a node's host has too little memory; empty: it has enough, or the cluster file does not tell.

    bytes_: kept in the host's memory, per rank of some stages; the largest counts for all ranks of the node.
    """
    each, available = max(bytes_, default=0.0) / GIB, memory.host_gib
    ranks = min(memory.ranks_per_node or world_size, world_size)
    if not available or each * ranks <= available:
        return ""
    return too_little(OFFLOADED, each, ranks, available, "[device] host_memory_gib of the cluster file")
