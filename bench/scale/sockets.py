"""Sockets, descriptors and store look-ups per rank: with gloo groups that connect all ranks, and with titan's.

Each rank enters the process group of all ranks, makes the groups of a mesh of three axes and the group of checkpoints,
and uses them as a run does: an all-reduce per group, a gather to all ranks and one to rank 0.
"""

import importlib
import multiprocessing
import os
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import init_device_mesh

from titan.checkpoint.ranks import Ranks
from titan.ranks import process

HOST = "127.0.0.1"
AXES = ("pp", "dp_shard", "tp")
KINDS = {"before": ("0", "gloo"), "after": ("1", "gloo"), "after_on_gpus": ("1", "fake")}
"""What is measured -> TORCH_GLOO_LAZY_INIT, and the backend of the mesh's axes; "fake" stands in for NCCL."""

Counts = dict[str, int]


def measure(ranks: int = 8) -> dict[str, Any]:
    """The most that a rank has of each count, before and after; on GPUs the axes of a mesh have no gloo groups.

    ranks: a multiple of 4, all on this machine. Takes some ten seconds on two cores, with `ranks` processes.
    """
    found: dict[str, Any] = {"ranks": ranks}
    for kind, choices in KINDS.items():
        counts = _on_ranks(ranks, *choices)
        found[kind] = {what: max(each[what] for each in counts) for what in counts[0]}
    return found


def _on_ranks(ranks: int, lazy: str, backend: str) -> list[Counts]:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    inboxes, processes = [], []
    for number in range(ranks):
        environment = {
            "RANK": str(number),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(number),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_GLOO_LAZY_INIT": lazy,
            "OMP_NUM_THREADS": "1",
        }
        inbox, outbox = context.Pipe(duplex=False)
        processes.append(context.Process(target=_be_rank, args=(environment, backend, outbox)))
        processes[-1].start()
        outbox.close()
        inboxes.append(inbox)
    try:
        return [inbox.recv() for inbox in inboxes]
    finally:
        for child in processes:
            child.join()


def _be_rank(environment: dict[str, str], backend: str, outbox: Connection) -> None:
    os.environ.update(environment)
    stores: list[_Counting] = []  # the process group reads them until it ends
    outbox.send(_used(backend, stores))
    store = stores[0]  # no rank leaves while another one still counts; a collective would connect ranks
    if store.add("counted", 1) == dist.get_world_size():
        store.set("all have counted", "")
    store.wait(["all have counted"])
    process.leave()


def _used(backend: str, stores: list["_Counting"]) -> Counts:
    """What this rank holds once all groups are made and used, more than before it entered the first one.

    stores: takes the store that the process group reads.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend "fake"
    held = held_here()
    open_store = process.open_store

    def counted(limit_s: float) -> Store:
        stores.append(_Counting(open_store(limit_s)))
        return stores[-1]

    process.open_store = counted
    process.enter(process.here("cpu"), timeout_s=60.0)
    size = dist.get_world_size()
    own: Any = dict.fromkeys(AXES, backend)
    mesh = init_device_mesh("cpu", (2, 2, size // 4), mesh_dim_names=AXES, backend_override=own)
    checkpoints = Ranks(dist.get_rank(), size)
    for group in (dist.group.WORLD, *(mesh.get_all_groups() if backend == "gloo" else ())):
        dist.all_reduce(torch.zeros(2, dtype=torch.int64), group=group)
    checkpoints.gather(0)
    checkpoints.gather_first(0)
    return {what: count - held[what] for what, count in held_here().items()} | {"store_gets": stores[0].gets}


def held_here() -> Counts:
    """Open files of this process, those of them that are sockets, and its threads."""
    kinds = []
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.islink(path):  # not what has listed the folder
            kinds.append(os.readlink(path).partition(":")[0])
    return {"sockets": kinds.count("socket"), "descriptors": len(kinds), "threads": len(os.listdir("/proc/self/task"))}


class _Counting(Store):
    """Another store, with the number of values that were read from it."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store, self.gets = store, 0

    def get(self, key: str) -> bytes:
        self.gets += 1
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.gets += len(keys)
        return self._store.multi_get(list(keys))

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return self._store.compare_set(key, expected, wanted)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(list(keys), *(() if timeout is None else (timeout,)))
