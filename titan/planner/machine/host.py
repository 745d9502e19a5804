"""The memory of a node's host: for what techniques keep there instead of on the devices, and for all on CPUs."""

from collections.abc import Sequence
from pathlib import Path

from titan.errors import ConfigError, ConfigIssue
from titan.planner.machine.cluster import DeviceMemory

GIB = 2.0**30
OFFLOADED = "techniques keep"


def short_of(memory: DeviceMemory, bytes_: Sequence[float], world_size: int) -> str:
    """Why a node's host has too little memory; empty: it has enough, or the cluster file does not tell.

    bytes_: kept in the host's memory, per rank of some stages; the largest counts for all ranks of the node.
    """
    each, available = max(bytes_, default=0.0) / GIB, memory.host_gib
    ranks = min(memory.ranks_per_node or world_size, world_size)
    if not available or each * ranks <= available:
        return ""
    return _too_little(OFFLOADED, each, ranks, available, "[device] host_memory_gib of the cluster file")


def check_this_machine(
    each_gib: float, ranks: int, what: str, meminfo: Path = Path("/proc/meminfo"),
    limit: Path = Path("/sys/fs/cgroup/memory.max"),
) -> None:  # fmt: skip
    """Hold what `ranks` ranks will keep, each so many GiB, against the memory that this machine has.

    What others have of it for now may be free when the run is started again, so all of it counts.

    what: who keeps it, and the verb.  limit: of the container's memory, in bytes. Nothing is compared with what the
    machine does not tell.

    Raises:
        ConfigError: it has too little.
    """
    for available, said in ((_total_gib(meminfo), f"MemTotal of {meminfo}"), (_limit_gib(limit), f"{limit}")):
        if available is not None and each_gib * ranks > available:
            raise ConfigError([ConfigIssue("", _too_little(what, each_gib, ranks, available, said))])


def _too_little(what: str, each_gib: float, ranks: int, available_gib: float, said: str) -> str:
    each = f", {each_gib:.4g} GiB for each of {ranks} ranks of a node" if ranks > 1 else ""
    return (
        f"{what} {each_gib * ranks:.4g} GiB in the host's memory{each}, but "
        f"{said} = {available_gib:.4g} GiB; shard over more ranks, use more nodes, or offload less"
    )


def _limit_gib(path: Path) -> float | None:
    try:
        return int(path.read_text()) / GIB
    except (OSError, ValueError):  # "max": there is none
        return None


def _total_gib(meminfo: Path) -> float | None:
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemTotal"].split()[0]) * 1024 / GIB
    except (OSError, KeyError, ValueError, IndexError):
        return None
