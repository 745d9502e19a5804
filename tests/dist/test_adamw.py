"""AdamW over plain tensors and DTensors of two meshes at once updates them as if they were whole."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titan.contracts import NamedParameter
from titan.plugins.optimizers.adamw import AdamW, Config
from titan.testing.jobs import whole
from titan.testing.ranks import run_ranks


def _tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((6, 4), (3, 5), (1, 4), (7,), (5, 2))]


def _train(tensors: list[Tensor]) -> list[Tensor]:
    named = [NamedParameter(str(i), nn.Parameter(t), "matrix", i % 2 == 0) for i, t in enumerate(tensors)]
    optimizer = AdamW(Config(lr=0.1)).build(named)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]
    for _ in range(3):
        for n in named:
            n.parameter.grad = torch.cos(n.parameter.detach())
        optimizer.step()
    return [whole(n.parameter.detach()) for n in named]


def _split() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    a, b, empty_on_some, plain, both = _tensors()
    return _train([
        distribute_tensor(a, mesh["outer"], [Shard(0)]),
        distribute_tensor(b, mesh["inner"], [Shard(1)]),
        distribute_tensor(empty_on_some, mesh["outer"], [Shard(0)]),
        plain,
        distribute_tensor(both, mesh, [Shard(0), Replicate()]),
    ])  # fmt: skip


def test_mixed_parameters() -> None:
    expected = _train(_tensors())
    for results in run_ranks(_split, 4):
        torch.testing.assert_close(results, expected, rtol=1e-6, atol=1e-7)
