"""The machine of a process: what kind of device it has, and what it takes of files, memory and CPU cores.

A rehearsal on a CPU stands in for a GPU: what asks `kind_of`, and not the tensor, is then done as there. What a process
takes is a default: where the user or a scheduler has chosen, that choice stands.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from titan.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

_stands_for: ContextVar[str | None] = ContextVar("_stands_for", default=None)

OFFLOADED = "techniques keep"

DESCRIPTORS = 1 << 20
"""Most that a process asks for: some systems have no hard limit at all."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with options of PyTorch's allocator on GPUs. The first one is the name since PyTorch 2.9."""

HOST_ALLOCATOR = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
"""Environment variables with options of glibc's allocator. `GLIBC_TUNABLES` can have them too."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""`mallopt`'s numbers: the most freed memory to keep, where -1 is all, and how many blocks may be mapped."""


# --- devices ---------------------------------------------------------------------------------------------------------


def kind_of(device: torch.device) -> str:
    """ "cpu", "cuda", ...: the device's own type, or that of the device it stands in for."""
    return _stands_for.get() or device.type


def runs_triton(device: torch.device) -> bool:
    """Whether kernels in Triton run there: on a GPU where Triton is installed.

    So it is for meta tensors that stand in for a GPU's: what they would be given to allocates as there, and runs none.
    """
    return _has_triton() if device.type == "cuda" else device.type == "meta" and kind_of(device) == "cuda"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def total_gib(device: torch.device) -> float | None:
    """Memory of a GPU in GiB; None: another kind of device, whose memory processes share."""
    return torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """What PyTorch calls the model of a GPU; of another kind of device, the kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def standing_in_for(kind: str) -> Iterator[None]:
    """Let every device be of this kind meanwhile, as far as `kind_of` is asked."""
    token = _stands_for.set(kind)
    try:
        yield
    finally:
        _stands_for.reset(token)


def on_this_device(act: Callable[P, T]) -> Callable[P, T]:
    """`act`, for a thread to call, on the GPU of the thread that asks. A new thread's current device is GPU 0; what it
    does there without naming a device would open a context, some hundred MB for each rank of the node."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return act
    index = torch.cuda.current_device()

    def acting(*args: P.args, **named: P.kwargs) -> T:
        torch.cuda.set_device(index)
        return act(*args, **named)

    return acting


# --- files, memory, cores --------------------------------------------------------------------------------------------


def raise_descriptor_limit() -> None:
    """Raise the limit of open files of this process and its children to the hard limit, at most `DESCRIPTORS`.
    A socket is an open file. The process that serves the store has a socket per rank of the run, and rank 0 of a gather
    has one per rank; the usual limit is 1,024. Silent where the system refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def let_segments_expand() -> None:
    """Let PyTorch's allocator extend a segment of GPU memory in place, so that freed memory is left in fewer pieces.
    To be called before the first use of CUDA, which is when the allocator reads its options. Does nothing where the
    user has set any of `ALLOCATOR`, and on AMD GPUs: of the builds of PyTorch 2.11 to 2.13 only some for ROCm 7 support
    it, and it can hang (pytorch issue 192259)."""
    if torch.version.hip is None and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, keep the host memory that a step frees for the next one, as PyTorch's allocators on GPUs do.

    glibc gives large blocks back to the system, which then clears every page of the next ones, by a fault each. From
    now on the process holds the most that it ever needs at once. Does nothing where the user has set any of
    `HOST_ALLOCATOR` or a tunable of malloc, and where the C library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    chosen = any(name in os.environ for name in HOST_ALLOCATOR) or "malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if device.type == "cpu" and mallopt is not None and not chosen:
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MMAP_MAX, 0)


def stay_near(device: torch.device, system: Path = Path("/sys")) -> set[int]:
    """Bind all threads of this process, and its later children, to the CPU cores of the NUMA node of its GPU.

    Returns these cores; empty where nothing is bound. That is on a CPU, on a machine with one NUMA node, where the
    kernel does not know the GPU's node, and where the process may not use all cores of the machine anyway: a scheduler,
    a container or the user has chosen then. `torch.numa` does the same for torchrun, but in a process that runs already
    only by private functions, and it needs the program numactl. system: where sysfs is mounted.
    """
    if device.type != "cuda" or sys.platform != "linux":
        return set()
    cores = cores_near(torch.cuda.get_device_properties(device), system, os.sched_getaffinity(0))
    if cores:
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it may have ended
                os.sched_setaffinity(int(thread), cores)
        torch.set_num_threads(min(torch.get_num_threads(), len(cores)))
    return cores


def cores_near(gpu: Any, system: Path, allowed: set[int]) -> set[int]:
    """The cores of a GPU's NUMA node, by its place on the bus; empty where they are unknown, or no choice."""
    try:
        place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((system / "bus/pci/devices" / place / "numa_node").read_text())
        cores = _numbers(system / f"devices/system/node/node{node}/cpulist")  # node -1: unknown, so no such folder
        chosen = allowed != _numbers(system / "devices/system/cpu/online")
    except (OSError, ValueError, AttributeError):
        return set()
    return set() if chosen or cores == allowed else cores & allowed


def _numbers(path: Path) -> set[int]:
    """The numbers of a list like 0-3,8."""
    spans = [span.partition("-") for span in path.read_text().strip().split(",") if span]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}


def process_state(pid: int | None) -> str:
    """What the system says a process does: "D (disk sleep)" is the wait that no signal ends."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "in an unknown state"
    return next(line for line in status.splitlines() if line.startswith("State:")).removeprefix("State:").strip()


def check_host_memory(each_gib: float, ranks: int, what: str, memory: Sequence[tuple[float, str]]) -> None:
    """A ConfigError where what `ranks` ranks will keep, each so many GiB, exceeds what `host_memory_gib` tells: all of
    it, as what others have for now may be free when the run is started again. what: who keeps it, and the verb."""
    for available, where in memory:
        if each_gib * ranks > available:
            raise ConfigError(too_little(what, each_gib, ranks, available, where))


def host_memory_gib(
    meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")
) -> list[tuple[float, str]]:
    """GiB of memory of this machine, and of the container's limit, each with where it stands; what is not told is
    left out."""
    found = []
    with suppress(OSError, KeyError, ValueError, IndexError):
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append((int(fields["MemTotal"].split()[0]) * 1024 / 2**30, f"MemTotal of {meminfo}"))
    with suppress(OSError, ValueError):  # "max": there is none
        found.append((int(limit.read_text()) / 2**30, str(limit)))
    return found


def too_little(what: str, each_gib: float, ranks: int, available_gib: float, where: str) -> str:
    """What is said where a node's host has too little memory. where: what tells how much it has."""
    each = f", {each_gib:.4g} GiB for each of {ranks} ranks of a node" if ranks > 1 else ""
    return (
        f"{what} {each_gib * ranks:.4g} GiB in the host's memory{each}, but "
        f"{where} = {available_gib:.4g} GiB; shard over more ranks, use more nodes, or offload less"
    )
