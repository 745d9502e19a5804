"""The global norm over mixed placements, initial weights that no layout changes, and clipping within the update."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.checkpoints import assert_same
from tests.contract.test_guests import GUESTS
from tests.jobs import mesh
from tests.sweeps import but_sweep
from titan.config import Job
from titan.contracts import Axis, ModelPart, Technique
from titan.contracts.base.layout import Layout, lay_out
from titan.contracts.base.mesh import Mesh
from titan.contracts.base.spec import ONES, ZEROS, ModelSpec, computed, normal
from titan.errors import PluginError
from titan.plugins.models.llama import Llama
from titan.testing.jobs import train_job, trained, whole
from titan.testing.ranks import run_ranks
from titan.training import build, phases
from titan.training.gradients import clip, global_norm
from titan.training.init import draw, init_weights

PLAN = ModelSpec(
    n_layers=1,
    dim=5,
    n_heads=1,
    n_kv_heads=1,
    head_dim=5,
    vocab_size=7,
    max_seq_len=4,
    embeddings=(),
    head=(),
    tensor={},
    init={"*.weight": normal(0.5), "*.bias": ONES},
    layer_params=0,
    embedding_params=0,
    head_params=0,
    matmul_params_per_layer=0,
    head_matmul_params=0,
)


def _module() -> nn.Module:
    # Sizes that divide by nothing: uneven and empty shards.
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))


def _sliced_and_sharded() -> ModelPart:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = _module()
    parallelize_module(module, both["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(module[0], mesh=both["dp"])
    fully_shard(module[1], mesh=both["dp"])  # the last layer stays plain
    return ModelPart(module)


def _mixed() -> tuple[float, float, dict[str, float]]:
    part = _sliced_and_sharded()
    init_weights(part, PLAN, seed=3)
    worst = {}
    for name, parameter in part.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        worst[name] = (whole - draw(PLAN.init_of(name), whole.shape, 3, name, whole.device, whole.dtype)).abs().max()
        parameter.grad = parameter.detach().clone() * 2
    axes = [
        Axis(name="dp", data="dealt", weights="copies", topology_order=1, doc=""),
        Axis(name="tp", data="same", weights="slices", topology_order=2, doc=""),
    ]
    mesh = Mesh(lay_out(axes, {"dp": 2, "tp": 2}, 4)[0], torch.device("cpu"), dist.get_rank())
    norm = global_norm([part], mesh)
    clip([part], norm, 0.25)
    return float(norm), float(global_norm([part], mesh)), {name: float(value) for name, value in worst.items()}


def test_norm_clipping_and_initial_weights_of_sharded_sliced_and_plain_parameters() -> None:
    module = _module()
    init_weights(ModelPart(module), PLAN, seed=3)
    expected = 2 * torch.cat([p.detach().flatten() for p in module.parameters()]).norm().item()
    for norm, clipped, worst in run_ranks(_mixed, 4):
        assert abs(norm / expected - 1) < 1e-6
        assert abs(clipped / 0.25 - 1) < 1e-5
        assert worst == dict.fromkeys(worst, 0.0) and len(worst) == 6


def _without(missing: list[str], ranks: tuple[int, ...]) -> tuple[float, int]:
    """The norm where some ranks lack some gradients, and how many all-reduces it has taken."""
    part = _sliced_and_sharded()
    for name, parameter in part.parameters():
        nn.init.ones_(parameter)
        if name not in missing or dist.get_rank() not in ranks:
            parameter.grad = torch.ones_like(parameter.detach())
    with CommDebugMode() as counter:
        norm = global_norm([part], SimpleNamespace(device=torch.device("cpu"), sum=lambda tensor, *_: tensor))  # type: ignore[arg-type]
    return float(norm), counter.get_total_counts()


@pytest.mark.parametrize("ranks", [(), (3,), (0, 1, 2, 3)])
def test_one_all_reduce_per_group_whoever_has_a_gradient(ranks: tuple[int, ...]) -> None:
    module = _module()
    numbers = sum(p.numel() for p in module.parameters())
    found = run_ranks(_without, 4, ["0.bias", "1.bias", "2.bias"], ranks)
    assert [collectives for _, collectives in found] == [2] * 4
    if len(ranks) != 1:
        numbers -= 7 + 3 + 1 if ranks else 0
        assert [norm for norm, _ in found] == pytest.approx([numbers**0.5] * 4, rel=1e-6)


def test_drawn_by_name_and_seed_alone() -> None:
    shape, where = torch.Size((64, 8)), (torch.device("cpu"), torch.float32)
    first = draw(normal(0.02), shape, 0, "a.weight", *where)
    assert torch.equal(first, draw(normal(0.02), shape, 0, "a.weight", *where))
    assert not torch.equal(first, draw(normal(0.02), shape, 1, "a.weight", *where))
    assert not torch.equal(first, draw(normal(0.02), shape, 0, "b.weight", *where))
    assert first.abs().max() <= 0.06 and abs(first.std().item() / 0.02 - 1) < 0.1


def test_a_computed_value_is_cast_and_must_have_the_shape() -> None:
    how, where = computed(lambda device: torch.arange(4.0, device=device)), torch.device("cpu")
    value = draw(how, torch.Size((4,)), 0, "rope", where, torch.int64)
    assert value.dtype == torch.int64 and value.tolist() == [0, 1, 2, 3]
    with pytest.raises(PluginError, match=r"computes rope with shape \[4\], the model has shape \[2, 2\]"):
        draw(how, torch.Size((2, 2)), 0, "rope", where, torch.float32)


def test_a_buffer_that_the_model_does_not_have_is_refused() -> None:
    spec = replace(PLAN, layers="0", buffers={"*.seen": ZEROS, "*.rope": ZEROS})
    names = ["0.weight", "0.bias"]
    spec.check_names(["0"], names, ["0.seen", "0.rope"])
    with pytest.raises(PluginError, match=r"match nothing in the model: \*\.rope"):
        spec.check_names(["0"], names, ["0.seen"])


def test_a_technique_may_give_values_to_buffers_that_it_registers_later() -> None:
    model = Llama(Llama.Config(**Llama.presets["tiny"]))
    late = replace(model.spec(), buffers={"layers.*.late": ONES})
    with torch.device("meta"):
        module = model.build()
    alone = SimpleNamespace(layout=Layout((), {}))
    context: Any = SimpleNamespace(spec=late, job=SimpleNamespace(model=model), mesh=alone)
    phases.check_names(module, context)
    context.job.model = SimpleNamespace(spec=lambda: late)
    with pytest.raises(PluginError, match=r"match nothing in the model: layers\.\*\.late"):
        phases.check_names(module, context)


class Forgetful(Technique):
    """Has state only after its first step."""

    name = "forgetful"

    def state_dict(self) -> dict[str, Any]:
        return dict(self.sums)  # type: ignore[attr-defined]


def test_a_state_that_cannot_be_asked_for_before_it_is_loaded_names_its_technique() -> None:
    with pytest.raises(PluginError, match=r"technique 'forgetful' in .*: state_dict\(\) raised .*before load"):
        build.state_now(Forgetful(None))


CLIPPED = ("--train.grad_clip", "0.3", "--train.steps", "5")  # in each step
LAYOUTS = {
    "one rank": (1, []),
    "dp 2": (2, mesh(dp_shard=2)),
    "ddp 2": (2, mesh(dp_replicate=2)),
    "tp 2": (2, mesh(tp=2)),
    "pp 2": (2, mesh(pp=2)),
    "groups": (1, ["--optimizer.groups", "[{match = 'head', lr = 1e-3}]"]),
}


def within(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """Train, and return the weights; the update must have been given a factor."""
    run = trained(folder, words, config)
    assert not run.job.clips_apart and float(run.optimizer.grad_scale) > 1  # type: ignore[attr-defined]
    return {name: whole(p.detach()) for part in run.parts for name, p in part.parameters()}


def before(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """Train with gradients clipped in a pass of their own, and return the weights."""
    Job.clips_apart = True  # type: ignore[assignment, method-assign]
    run = trained(folder, words, config)
    assert not hasattr(run.optimizer, "grad_scale")
    return {name: whole(p.detach()) for part in run.parts for name, p in part.parameters()}


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, "ddp 2", "pp 2", "tp 2"))
def test_same_bits_in_the_update_and_before_it(layout: str, tmp_path: Path) -> None:
    ranks, words = LAYOUTS[layout]
    runs = [train_job(tmp_path, ranks, *words, *CLIPPED, name=run.__name__, run=run) for run in (within, before)]
    assert runs[0].grad_norm == runs[1].grad_norm and min(runs[0].grad_norm) > 0.3
    assert runs[0].weights
    assert_same(runs[0].weights, runs[1].weights)


def test_a_technique_that_looks_before_the_update_sees_clipped_gradients(tmp_path: Path) -> None:
    seen = (*GUESTS, "--plugins.tally.enabled", "true", "--train.grad_clip", "0.01")
    rows = train_job(tmp_path, 1, *seen, "--train.steps", "3").rows
    assert len(rows) == 3 and all(0 < row["largest_gradient"] <= 0.01 < row["grad_norm"] for row in rows.values())
