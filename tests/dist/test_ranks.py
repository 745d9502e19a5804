"""How ranks enter their process groups, `titan.ranks.process`, and what their rows say of all of them."""

import importlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh

from bench.scale import sockets
from tests.jobs import LLAMA
from titan.checkpoint.ranks import Ranks
from titan.config import load_job
from titan.contracts.base import mesh
from titan.contracts.base.layout import Axis, lay_out
from titan.errors import ConfigError
from titan.ranks import process
from titan.testing.ranks import run_ranks
from titan.training import metrics


def _enter() -> None:
    process.enter(process.here("cpu"), timeout_s=60.0)


def _options(group: dist.ProcessGroup | None) -> tuple[int, timedelta]:
    assert group is not None
    options = group._get_backend(torch.device("cpu")).options
    return options._threads, options._timeout


def _groups() -> list[tuple[int, timedelta]]:
    _enter()
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    own = dist.new_group(backend="gloo", timeout=timedelta(seconds=7))
    flat = both["outer", "inner"]._flatten("flat").get_group()
    return [_options(group) for group in (dist.group.WORLD, both.get_group("outer"), flat, own)]


def _chosen() -> int:
    _enter()
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = [ProcessGroupGloo.create_default_device()], 3
    return ProcessGroupGloo(HashStore(), 0, 1, options).options._threads


def _unknown() -> None:
    _enter()
    with pytest.raises(AttributeError, match="more_threads"):
        ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=7), more_threads=True)  # type: ignore[call-overload]


def test_every_gloo_group_has_one_worker() -> None:
    """Two write to one string without a lock and corrupt the heap, as `python -m bench.heap --kind gathers` shows."""
    default, minute, seven = (1, timedelta(minutes=30)), (1, timedelta(minutes=1)), (1, timedelta(seconds=7))
    assert run_ranks(_groups, 2, init=False) == [[minute, default, minute, seven]] * 2


def test_so_has_one_with_options_of_its_own() -> None:
    assert run_ranks(_chosen, 1, init=False) == [1]


def test_a_setting_that_is_no_option_is_not_passed_over() -> None:
    run_ranks(_unknown, 1, init=False)


def _sockets() -> int:
    names = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _open(number)]
    return sum(name.startswith("socket:") for name in names)


def _open(number: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{number}")


def _connections(eager: bool) -> int:
    """Sockets of a rank once it has joined, made the groups of a mesh and of checkpoints, and used all of them."""
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    if eager:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    before = _sockets()
    _enter()
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
    checkpoints = Ranks(dist.get_rank(), dist.get_world_size())
    number = torch.ones(1)
    for group in (dist.group.WORLD, *cube.get_all_groups()):
        dist.all_reduce(number, group=group)
    assert checkpoints.gather(dist.get_rank()) == list(range(8))
    assert checkpoints.first(lambda: "agreed") == "agreed"
    found = _sockets() - before
    dist.barrier()
    return found


def _hears_that_the_first_is_gone() -> float:
    """Seconds until this rank knows that rank 0, which it would send something to, has left."""
    _enter()
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    ranks.connect()
    group = ranks.group
    if dist.get_rank() == 0:
        ranks.leave()
    dist.barrier()
    began = time.monotonic()
    if dist.get_rank() > 0:
        with pytest.raises(RuntimeError):
            dist.gather(torch.ones(1), dst=0, group=group)
    waited = time.monotonic() - began
    dist.barrier()
    return waited


def test_ranks_that_are_connected_hear_at_once_of_one_that_is_gone() -> None:
    """Of six, rank 3 is the one that nothing but a gather connects with rank 0. It would wait for a minute."""
    assert max(run_ranks(_hears_that_the_first_is_gone, 6, init=False, timeout=50.0)) < 10


@pytest.mark.skipif(sys.platform != "linux", reason="counts /proc/self/fd")
def test_ranks_connect_to_those_they_exchange_data_with() -> None:
    """An eager group of N ranks opens N - 1 sockets per rank, a lazy one some log2(N): here 23 in all against 13."""
    eager, lazy = (run_ranks(_connections, 8, how, init=False) for how in (True, False))
    assert max(lazy) < min(eager), (eager, lazy)


@pytest.mark.skipif(sys.platform != "linux", reason="counts /proc/self/fd")
def test_the_formulas_of_the_docs_are_what_ranks_hold() -> None:
    """docs/hpc.md, "Thousands of ranks", and its figures at 8 ranks; the counts are those of rank 0, the largest."""
    run_ranks(sockets.held_here, 1, init=False)  # starts the fork server, which is one for all, as tests need it
    ranks, axes = 8, 3
    found = sockets.measure(ranks)
    gpus, after, before = found["after_on_gpus"], found["after"], found["before"]
    assert gpus == {"sockets": 12, "descriptors": ranks + 10, "threads": 2 * 2, "store_gets": 4 + ranks - 1}
    assert before["descriptors"] == 2 * ranks + 7 + axes * (4 + 1) and before["store_gets"] == 2 + 2 * ranks + axes * 2
    assert after["sockets"] == gpus["sockets"] + axes * (1 + 1) < before["sockets"] == 23
    docs = (Path(__file__).parents[2] / "docs" / "hpc.md").read_text()
    for row in (before, after, gpus):
        assert f" | {' | '.join(str(count) for count in row.values())} |\n" in docs


class _Nccl:
    """What PyTorch 2.15 has of NCCL, without it."""

    class Options:
        lazy_init = False


def test_groups_of_nccl_connect_when_they_are_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each is split from that of all ranks, in a call of all: a rank that is lost never answers."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _Nccl, raising=False)
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **more: made.append(more))
    monkeypatch.setattr(mesh, "init_device_mesh", lambda *_, **more: made.append(more))
    axes = [
        Axis(name=name, data="dealt", weights="own" if name == "worker" else "copies", topology_order=0, doc="")
        for name in ("worker", "tp")
    ]
    layout, _ = lay_out(axes, {"worker": 4, "tp": 2}, 8)
    there = mesh.Mesh(layout, torch.device("cuda"), 0)
    assert there.lose([2]) == [0, 1, 2, 3, 6, 7]
    backends, *groups = made
    assert [(name, options.lazy_init) for name, options in backends["backend_override"].values()] == [
        ("nccl", True)
    ] * 2
    assert [(group["backend"], group["pg_options"].lazy_init) for group in groups] == [("nccl", True)] * 2
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: made.append({"of all": backend, **more}))
    process.enter(process.Rank(0, 1, 0, torch.device("cuda")), 60.0)
    assert made[-1]["of all"] == "cpu:gloo,cuda:nccl" and made[-1]["pg_options"].lazy_init
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    assert mesh.made_when_used() is None, "it connects late by itself, and warns of options"
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2")
    monkeypatch.setattr(_Nccl, "Options", object)
    assert mesh.made_when_used() is None and there._backends(["tp"], [2]) == {"tp": "nccl"}


def _mesh_like_a_gpu(device: str) -> tuple[list[str], dict[str, int]]:
    """The backend of each group of a mesh's axes, and the descriptors and threads that came with them.

    On "cuda" the fake backend stands in for NCCL, and the CPU for the GPU. The mesh has an axis of all ranks.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    make = mesh.init_device_mesh

    def faked(kind: str, shape: tuple[int, ...], *, backend_override: Any, **more: Any) -> Any:
        assert kind == device
        return make("cpu", shape, backend_override=backend_override, **more)

    mesh.init_device_mesh, mesh.ON_GPUS = faked, "fake"  # type: ignore[assignment]
    mesh.made_when_used = lambda: None  # NCCL's options
    _enter()
    dist.barrier()  # so that its connections are there
    before = sockets.held_here()
    facts = {"data": "dealt", "weights": "copies", "doc": ""}
    axes = [Axis(name=name, topology_order=place, **facts) for place, name in enumerate("abc")]  # type: ignore[arg-type]
    groups = []
    for degrees in ({"a": 2, "b": 2, "c": 2}, {"a": 8, "b": 1, "c": 1}):
        layout, _ = lay_out(axes, degrees, 8)
        groups += [group for _, group in mesh.Mesh(layout, torch.device(device), dist.get_rank()).groups()]
    held = {what: count - before[what] for what, count in sockets.held_here().items()}
    dist.barrier()
    return [dist.get_backend(group) for group in groups], held


@pytest.mark.skipif(sys.platform != "linux", reason="counts /proc/self/fd")
def test_groups_of_a_mesh_on_gpus_have_no_gloo() -> None:
    """Each gloo group holds descriptors and two threads per rank, also when it is never used."""
    on_gpus, on_cpus = (run_ranks(_mesh_like_a_gpu, 8, device, init=False)[7] for device in ("cuda", "cpu"))
    assert on_gpus[0] == ["fake"] * 3 + ["gloo"] and on_cpus[0] == ["gloo"] * 4
    assert on_gpus[1]["threads"] == 0 and on_cpus[1]["threads"] == 3 * 2
    assert on_cpus[1]["descriptors"] - on_gpus[1]["descriptors"] >= 3 * 4


def test_a_task_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --gpus-per-task=1`: each task's own GPU is its device 0, whatever the task's number on the node."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(process, "let_segments_expand", lambda: None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    for seen, local, index in ((1, 0, 0), (1, 3, 0), (4, 3, 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: seen)
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert process.here("auto").device == torch.device("cuda", index)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"local rank 2 has no GPU: this process sees 2; start at most 2 ranks"):
        process.here("cuda")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"uuid": "a", "pci_bus_id": 1}, {"uuid": "b", "pci_bus_id": 1}),
        ({"uuid": "XX", "pci_bus_id": 1}, {"uuid": "XX", "pci_bus_id": 2}),
    ],
    ids=["slices of one GPU", "GPUs without a UUID of their own"],
)
def test_gpus_of_one_host_are_told_apart(one: dict[str, object], other: dict[str, object]) -> None:
    assert process.gpu_identity(SimpleNamespace(**one)) != process.gpu_identity(SimpleNamespace(**other))
    assert process.gpu_identity(SimpleNamespace(name="a GPU")) == ""


def test_two_ranks_on_one_gpu_are_refused() -> None:
    store = HashStore()
    process.claim("node0 GPU-a", 0, store)
    process.claim("node0 GPU-b", 1, store)
    process.claim("node1 GPU-a", 2, store)
    with pytest.raises(ConfigError, match=r"ranks 0 and 3 were given the same GPU \(node0 GPU-a\); start one task per"):
        process.claim("node0 GPU-a", 3, store)


HELD = ((1.5, 2.5), (2.5, 1.5), (2.0, 2.0), (0.25, 0.25 + 2**-20), (2.0**23 - 1, 1.0))
"""GiB on rank 0 and rank 1: less, more, as much, a KiB less, and nearly 8 PiB."""


def _rows(held: tuple[tuple[float, float], ...]) -> list[tuple[float, int]]:
    _enter()
    meter = metrics.Meter(load_job(LLAMA, ["--data.path", "tests"]).spec, 16, 2, torch.device("cpu"), stated_peak=1.0)
    found = []
    for gib in held:
        metrics.peak_memory_gib = lambda device, gib=gib: gib[dist.get_rank()]
        row = meter.row(1, 1.0, 1.0, 1e-3, 128, 96)
        found.append((row["peak_memory_gib"], row["peak_memory_rank"]))
    return found


def test_a_row_tells_the_memory_of_the_fullest_rank() -> None:
    found = [(2.5, 1), (2.5, 0), (2.0, 0), (0.25 + 2**-20, 1), (2.0**23 - 1, 0)]
    assert run_ranks(_rows, 2, HELD, init=False) == [found] * 2
