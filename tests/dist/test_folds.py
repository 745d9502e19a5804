"""Meshes with an axis that divides the ranks of others anew: groups, sharding over the rest, norms, initial values."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tests.dist.test_gradients import PLAN
from tests.sweeps import sweep_but, swept_case
from titan.contracts import Axis, ModelPart
from titan.contracts.base.layout import lay_out
from titan.contracts.base.mesh import Mesh
from titan.contracts.base.spec import normal
from titan.errors import PluginError
from titan.testing.ranks import run_ranks
from titan.training import init
from titan.training.gradients import global_norm

AXES = [
    Axis(name="pp", data="same", weights="layers", topology_order=0, doc=""),
    Axis(name="rep", data="dealt", weights="copies", topology_order=10, doc=""),
    Axis(name="dp", data="dealt", weights="copies", topology_order=20, doc=""),
    Axis(name="ep", weights="slices", folds=("dp", "cp"), topology_order=25, doc=""),
    Axis(name="cp", data="sliced", weights="copies", topology_order=30, doc=""),
    Axis(name="tp", data="same", weights="slices", topology_order=40, doc=""),
]
SPEC = replace(PLAN, dim=8, init={"stack.weight": normal(0.5, per_element=True), "other.*": normal(0.5)})
LAYOUTS = [
    {"dp": 4, "tp": 2, "ep": 2},
    {"rep": 2, "dp": 2, "cp": 2, "ep": 2},
    {"rep": 2, "dp": 2, "tp": 2, "ep": 2},
    {"pp": 2, "dp": 2, "cp": 2, "ep": 4},
]


def _mesh(degrees: dict[str, int]) -> Mesh:
    layout, faults = lay_out(AXES, degrees, dist.get_world_size())
    assert not faults
    return Mesh(layout, torch.device("cpu"), dist.get_rank())


def _ranks_that_differ_in(mesh: Mesh, *axes: str) -> list[int]:
    """Ranks that have this rank's coordinates but along these axes and, as it is no dimension, on ep."""
    everyone = [mesh.layout.coordinate(rank) for rank in range(mesh.layout.world_size)]
    kept = everyone[mesh.rank].keys() - {*axes, "ep"}
    return [rank for rank, at in enumerate(everyone) if all(at[name] == everyone[mesh.rank][name] for name in kept)]


def _groups(degrees: dict[str, int]) -> dict[str, Any]:
    mesh = _mesh(degrees)
    folded = _ranks_that_differ_in(mesh, "dp", "cp")
    place = {rank: mesh.layout.coordinate(rank)["ep"] for rank in folded}
    alike = [rank for rank in folded if place[rank] == place[mesh.rank]]
    along = [rank for rank in folded if folded.index(rank) // degrees["ep"] == folded.index(mesh.rank) // degrees["ep"]]
    rest, whole = mesh.flat(("dp", "cp"), without="ep"), mesh.flat(("dp", "cp"))
    assert "ep" in mesh and mesh["ep"].size() == degrees["ep"] and mesh["ep"].get_local_rank() == mesh.at("ep")
    assert dist.get_process_group_ranks(mesh.group("ep")) == along
    assert dist.get_process_group_ranks(rest.get_group()) == alike
    assert dist.get_process_group_ranks(whole.get_group()) == folded
    named = {axes: dist.get_process_group_ranks(group) for axes, group in mesh.groups()}
    label = " x ".join(name for name in ("dp", "cp") if degrees.get(name, 1) > 1)
    assert named[f"{label} / ep"] == alike and named["ep"] == along
    sums = {fact: int(mesh.sum(torch.ones(()), fact)) for fact in ("slices", "layers")}  # type: ignore[arg-type]
    both = int(mesh.sum(torch.ones(()), "dealt", "sliced"))
    assert sums == {"slices": degrees.get("tp", 1), "layers": degrees.get("pp", 1)}
    assert both == math.prod(degrees.get(name, 1) for name in ("rep", "dp", "cp"))
    return named


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_the_groups_of_a_fold_and_of_what_it_leaves(degrees: dict[str, int]) -> None:
    run_ranks(_groups, 8, degrees)


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def _sharded(degrees: dict[str, int], dim: int) -> tuple[float, float, int, float]:
    mesh = _mesh(degrees)
    model = nn.ModuleDict({"stack": _Stack(), "other": nn.Linear(8, 3)})
    names, placements = (("ep", "tp"), [Shard(0), Shard(1)]) if "tp" in mesh else (("ep",), [Shard(0)])
    stack = model["stack"]
    stack.weight = nn.Parameter(distribute_tensor(stack.weight, mesh[names], placements, src_data_rank=None))
    part = ModelPart(model)
    assert part.folded(mesh) == [(stack, "ep")]
    dimensions = (("rep",), ("dp", "cp")) if "rep" in mesh else (("dp", "cp"),)
    fully_shard(stack, mesh=mesh.flat(*dimensions, without="ep"), shard_placement_fn=lambda _: Shard(dim))
    fully_shard(model["other"], mesh=mesh.flat(*dimensions))
    names, draw = [], init.draw
    init.draw = lambda *args: names.append(args[3]) or draw(*args)  # type: ignore[func-returns-value]
    init.init_weights(part, SPEC, seed=3)
    init.draw = draw
    drawn = [int(name[len("stack.weight[") : -1]) for name in names if name.startswith("stack.weight[")]
    for _, parameter in part.parameters():
        parameter.grad = parameter.detach().clone() * 2
    whole = stack.weight.full_tensor()
    same = init.draw(SPEC.init_of("stack.weight"), whole.shape, 3, "stack.weight", whole.device, whole.dtype)
    own = mesh.at("ep") * (4 // degrees["ep"])
    assert set(drawn) <= set(range(own, own + 4 // degrees["ep"])), drawn
    squares = global_norm([part], mesh) ** 2 / degrees.get("pp", 1)
    return float((whole - same).abs().max()), float(squares.sqrt()), len(drawn), float(same.abs().max())


@pytest.mark.parametrize("degrees", sweep_but(LAYOUTS, LAYOUTS[0]), ids=str)
@pytest.mark.parametrize("dim", [0, swept_case(1)])
def test_stacks_are_drawn_where_they_are_held_and_counted_once_in_the_norm(degrees: dict[str, int], dim: int) -> None:
    model = nn.ModuleDict({"stack": _Stack(), "other": nn.Linear(8, 3)})
    init.init_weights(ModelPart(model), SPEC, seed=3)
    expected = 2 * torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
    for difference, norm, count, largest in run_ranks(_sharded, 8, degrees, dim):
        assert difference == 0 and norm == pytest.approx(expected, rel=1e-6) and 0.5 < largest <= 1.5
        assert 1 <= count <= 4 // degrees["ep"]


def test_elements_of_a_stack_are_drawn_each_from_its_own_generator() -> None:
    shape, where = torch.Size((3, 40, 50)), (torch.device("cpu"), torch.float32)
    how = normal(0.02, per_element=True)
    stack = init.draw(how, shape, 0, "a.weight", *where)
    assert torch.equal(stack[:2], init.draw(how, torch.Size((2, 40, 50)), 0, "a.weight", *where))
    assert not torch.equal(stack[0], stack[1]) and not torch.equal(stack[0], stack[2])
    for element in stack:
        assert element.std().item() == pytest.approx(0.02, rel=0.05) and element.abs().max() <= 0.06


def _refused(placement: Placement) -> str:
    mesh, stack = _mesh({"dp": 2, "ep": 2}), _Stack()
    stack.weight = nn.Parameter(distribute_tensor(stack.weight, mesh["ep"], [placement], src_data_rank=None))
    stack.register_parameter("bias", nn.Parameter(torch.zeros(8)))
    with pytest.raises(PluginError) as error:
        ModelPart(nn.ModuleDict({"stack": stack})).folded(mesh)
    return str(error.value)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Shard(0), "stack has weight, a slice along mesh.ep, and bias, which is none; put slices into a module"),
        (Replicate(), "a parameter of shape [4, 8, 6] is R along mesh axis 'ep', which folds dp, cp: make it a slice"),
    ],
    ids=["slices beside others", "a copy along a fold"],
)
def test_parameters_that_cannot_be_folded_are_refused(placement: Placement, expected: str) -> None:
    assert all(expected in said for said in run_ranks(_refused, 2, placement))
