"""How ranks enter their process groups: `titan.ranks.process`."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks
from titan.ranks import process


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
