"""How ranks enter their process groups, `titan.ranks.process`, and what their rows say of all of them."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh

from tests.jobs import LLAMA
from tests.ranks import run_ranks
from titan.config import load_job
from titan.ranks import process
from titan.training import metrics


def _enter() -> None:
    process.enter(process.here("cpu"), timeout_s=60.0)


def _options(group: dist.ProcessGroup | None) -> tuple[int, timedelta]:
    assert group is not None
    options = group._get_backend(torch.device("cpu")).options
    return options._threads, options._timeout


def _groups() -> list[tuple[int, timedelta]]:
    _enter()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    own = dist.new_group(backend="gloo", timeout=timedelta(seconds=7))
    return [_options(group) for group in (dist.group.WORLD, mesh.get_group("outer"), own)]


def _chosen() -> int:
    _enter()
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = [ProcessGroupGloo.create_default_device()], 3
    return ProcessGroupGloo(HashStore(), 0, 1, options).options._threads


def test_every_gloo_group_has_one_worker() -> None:
    """Two write to one string without a lock and corrupt the heap, as `python -m bench.heap --kind gathers` shows."""
    default, minute, seven = (1, timedelta(minutes=30)), (1, timedelta(minutes=1)), (1, timedelta(seconds=7))
    assert run_ranks(_groups, 2, init=False) == [[minute, default, seven]] * 2


def test_options_that_a_caller_chose_stay() -> None:
    assert run_ranks(_chosen, 1, init=False) == [3]


HELD = ((1.5, 2.5), (2.5, 1.5), (2.0, 2.0), (0.25, 0.25 + 2**-20), (2.0**23 - 1, 1.0))
"""GiB on rank 0 and rank 1: less, more, as much, a KiB less, and nearly 8 PiB."""


def _rows(held: tuple[tuple[float, float], ...]) -> list[tuple[float, int]]:
    _enter()
    meter = metrics.Meter(load_job(LLAMA, ["--data.path", "tests"]).spec, 16, 2, torch.device("cpu"), stated_peak=1.0)
    found = []
    for gib in held:
        metrics.peak_memory_gib = lambda device, gib=gib: gib[dist.get_rank()]
        row = meter.row(1, 1.0, 1.0, 1e-3, 128)
        found.append((row["peak_memory_gib"], row["peak_memory_rank"]))
    return found


def test_a_row_tells_the_memory_of_the_fullest_rank() -> None:
    found = [(2.5, 1), (2.5, 0), (2.0, 0), (0.25 + 2**-20, 1), (2.0**23 - 1, 0)]
    assert run_ranks(_rows, 2, HELD, init=False) == [found] * 2
