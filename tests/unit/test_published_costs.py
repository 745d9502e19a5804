"""Costs of published runs: the stages, state, recomputation and collectives of each framework."""

from dataclasses import replace
from typing import Any

import pytest

from bench.published.describe import framework_of
from bench.published.fit import World, case_of
from bench.published.reader import costs_of, layout_of, padded
from bench.published.rows import read
from bench.published.state import as_held, as_reserved, recompute_of, stages_of
from tests.published import row
from titan.contracts.base.cost import Attention, Costs, Elementwise
from titan.planner.machine import cluster as clusters
from titan.planner.step.predict import Planner


def costs_of_row(described: dict[str, Any]) -> Costs:
    return costs_of(read(described), framework_of(described))


def test_a_row_becomes_costs() -> None:
    job, framework = read(row(vpp=2)), framework_of(row())
    costs, layout = costs_of(job, framework), layout_of(job)
    assert padded(job, framework) == 50688
    assert layout.world_size == 64 and layout.degree("tp") == 4
    assert [len(stage.layers) for stage in costs.stages] == [6] * 8
    assert [stage.rank for stage in costs.stages] == [0, 1, 2, 3] * 2
    assert costs.stages[0].embeddings and costs.stages[-1].head and not costs.stages[0].head
    assert costs.recompute is not None and costs.recompute.full_layer
    assert costs.share("tp_sharded") == 2 * 2048 / 4 and costs.share("hidden") == 2 * 2048


@pytest.mark.parametrize(
    ("cut", "layers"),
    [("even", [7, 7, 6, 7]), ("first", [7, 7, 7, 6]), ("last", [6, 7, 7, 7]), ("products", [8, 7, 7, 5])],
)
def test_layers_are_cut_as_the_framework_cuts_them(cut: str, layers: list[int]) -> None:
    stages, _ = stages_of(read(row(layers=27)), cut)
    assert [len(stage.layers) for stage in stages] == layers
    assert [layer for stage in stages for layer in stage.layers] == list(range(27))


def test_a_job_has_the_stages_of_its_framework_and_ends_count_as_layers_where_only_that_divides() -> None:
    uneven, ends = row(layers=27, framework="Megatron-DeepSpeed"), row(layers=70, pp=12, tp=4, n_gpus=48, gbs=64)
    found = [[len(stage.layers) for stage in costs_of_row(each).stages] for each in (uneven, ends)]
    assert found == [[7, 7, 7, 6], [5, *[6] * 10, 5]]


def test_scores_of_a_layer_that_is_computed_again_are_not_reserved_for_them_alone() -> None:
    for recompute, kept in (("full", 1), (None, 2)):
        described = row(framework="Megatron-DeepSpeed", recompute=recompute)
        job, framework = read(described), framework_of(described)
        reserved = as_reserved(job, framework, as_held(job, framework, costs_of(job, framework)))
        assert [len(op.saved) for op in reserved.layer if isinstance(op, Attention)] == [kept]


def test_products_in_float8_are_computed_again_where_only_wider_ones_are_saved() -> None:
    for precision, products in (("bf16", [4096, 4096, 16384]), ("bf16+float8 linear", [])):
        titan: dict[str, Any] = {"framework": "torchtitan FSDP2", "recompute": "selective op", "gpu": "H100"}
        described = row(precision=precision, **titan, pp=1, tp=1)
        job, framework = read(described), framework_of(described)
        costs = costs_of(job, framework)
        asked = as_held(job, framework, costs)
        assert costs.recompute is not None and costs.recompute.every == 2
        assert asked.recompute is not None and asked.recompute.every == 1
        # Beside the products: the result of attention, and its statistics.
        assert [kept.numel for kept in asked.recompute.also] == [*products, 4096, 32]


INTERNEVO = {"framework": "InternEvo", "gated_mlp": True, "precision": "bf16", "pp": 1, "tp": 2}


@pytest.mark.parametrize(("recompute", "backward"), [(None, 14), ("full", 8)])
def test_norms_of_a_float32_copy_are_computed_again_where_layers_are_not(recompute: str | None, backward: int) -> None:
    costs = costs_of_row(row(**INTERNEVO, recompute=recompute))
    norms = [op for op in costs.layer if isinstance(op, Elementwise) and op.module == "norm"]
    assert [(op.forward, op.backward) for op in norms] == [(6 * 4096, backward * 4096)] * 2


@pytest.mark.parametrize(("gated", "sums"), [(True, 3), (False, 2)])
def test_gate_and_up_of_their_own_sum_their_gradients_each(gated: bool, sums: int) -> None:
    traffic = costs_of_row(row(**{**INTERNEVO, "gated_mlp": gated})).collectives
    inside = {t.when: t.count for t in traffic if t.axes == ("tp",) and t.where == "layer"}
    assert (inside["forward"], inside["backward"]) == (2, sums)


def bytes_held(**changed: Any) -> dict[str, float]:
    """Bytes a parameter that a row's rank holds, by component."""
    return {part.component: part.bytes_per_param for part in costs_of_row(row(**changed)).state}


def test_state_is_what_the_framework_holds() -> None:
    deepspeed: dict[str, Any] = {"framework": "Megatron-DeepSpeed"}
    assert bytes_held(**deepspeed, zero_stage=1)["optimizer"] == 16
    assert bytes_held(**deepspeed, zero_stage=0)["optimizer"] == 20
    assert bytes_held(**deepspeed, precision="bf16")["gradients"] == 6
    assert bytes_held(**deepspeed, precision="bf16 (fp32 grad accumulation)")["gradients"] == 6.3
    assert bytes_held(framework="nanotron", precision="bf16")["gradients"] == 6
    assert bytes_held(framework="nanotron", precision="bf16", n_gpus=16, gbs=64)["gradients"] == 4
    assert bytes_held(framework="InternEvo", precision="bf16", zero_stage=1)["optimizer"] == 26


def test_optimizer_state_is_shared_by_the_group_that_a_row_names() -> None:
    job = read(row(zero_stage=1, tp=1, pp=1, extra={"zero1_group": "zero1 within 8 GPUs"}))
    assert layout_of(job).degree("dp_shard") == 8 and layout_of(job).degree("dp_replicate") == 8


def test_hidden_collectives_of_a_layer_cost_what_they_slow_down() -> None:
    job, cluster = read(row(pp=1, tp=8, n_gpus=8, gbs=16)), clusters.load("a100-80gb")
    shown = []
    for overlap in (False, True):
        costs = costs_of(job, replace(framework_of(row()), tp_overlap=overlap))
        ends = replace(costs, collectives=tuple(t for t in costs.collectives if t.where != "layer"))
        all_of_it, of_ends = (Planner(cluster).predict(c, layout_of(job)).time_s["tp"] for c in (costs, ends))
        shown.append(all_of_it - of_ends)
    assert shown[1] == pytest.approx(cluster.kernels.overlap_slowdown * shown[0])


@pytest.mark.parametrize(
    ("framework", "said", "meant"),
    [
        ("Megatron-LM (v3.0)", "selective", "core"),
        ("Megatron-LM (v3.0)", "selective (softmax and dropout of attention)", "core"),
        ("Megatron-Bridge", "selective core_attn", "core"),
        ("torchtitan FSDP2", "selective", "products"),
        ("torchtitan FSDP2", "selective (per-op SAC)", "products"),
        ("torchtitan FSDP2", "selective layer", "alternate"),
        ("Megatron-LM 6985e58", "full", "full"),
    ],
)
def test_selective_means_what_the_framework_means(framework: str, said: str, meant: str) -> None:
    stated = row(framework=framework, recompute=said)
    assert recompute_of(read(stated), framework_of(stated)) == meant


def test_recomputing_the_core_of_attention_costs_the_core_and_saves_the_scores() -> None:
    world = World()
    cases = {said: case_of(row(framework="Megatron-LM", recompute=said)) for said in ("none", "selective", "full")}
    seconds = {said: world.seconds(case) for said, case in cases.items()}
    assert seconds["none"] < seconds["selective"] < 0.5 * (seconds["none"] + seconds["full"])
    planner = world.planner(cases["none"])
    none, core, full = (planner.draft(case.costs, case.layout).memory()[0].activations for case in cases.values())
    # The paper's bytes per layer: 34 s b h with selective recomputation, 5 a s^2 b more without.
    assert full < core < none
    job = cases["none"].job
    tokens, layers, under_way = job.micro_batch * job.seq_len, job.layers / job.pp, job.pp
    scores = 5 * job.heads * job.seq_len * tokens / job.tp
    assert none - core == pytest.approx(scores * (layers * under_way - 1), rel=0.02)


def test_a_newer_megatron_is_not_that_of_2021() -> None:
    older, newer = (framework_of(row(framework=f"Megatron-LM {which}")) for which in ("6985e58", "(arXiv 2205.05198)"))
    assert "2021" in older.name and "2022" in newer.name
    # The product of the weights adds to float32 gradients; no gradient of a micro batch stays beside them.
    held = bytes_held(framework="Megatron-LM", precision="bf16")
    assert (held["gradients"], held["optimizer"]) == (4, 12)
    before, after = (World().seconds(case_of(row(framework=f"Megatron-LM {which}"))) for which in ("6985e58", "v3"))
    assert after < before


def test_sums_of_gradients_overlap_and_slices_of_inputs_are_gathered_again() -> None:
    costs = costs_of_row(row(framework="Megatron-LM", seq_parallel=True))
    found = [cost for cost in costs.collectives if cost.where == "layer"]
    backward = [(cost.collective, cost.count, cost.overlaps) for cost in found if cost.when == "backward"]
    assert sorted(backward) == [("all_gather", 2, False), ("all_gather", 2, True), ("reduce_scatter", 2, True)]
    assert not any(cost.overlaps for cost in found if cost.when != "backward")


TITAN: dict[str, Any] = {"framework": "torchtitan FSDP2 +torch.compile", "gpu": "H100-SXM-80GB"}
TITAN |= {"layers": 32, "hidden": 4096, "ffn": 14336, "gated_mlp": True, "kv_heads": 8}
TITAN |= {"seq_len": 8192, "vocab": 128256}
TITAN |= {"n_gpus": 8, "tp": None, "pp": None, "mbs": 1, "gbs": 8}
TITAN |= {"zero_stage": 3, "recompute": "selective op", "precision": "bf16"}


def held_by(**changed: Any) -> float:
    """GiB of the activations of a torchtitan row."""
    stated = row(**{**TITAN, **changed})
    case = case_of(stated)
    held = as_held(case.job, framework_of(stated), case.costs)
    return World().planner(case).draft(held, case.layout).memory()[0].activations


def test_selective_recomputation_saves_every_second_product_and_attention() -> None:
    def saved(**changed: Any) -> list[tuple[float, str, int]]:
        stated = row(**{**TITAN, **changed})
        case = case_of(stated)
        again = as_held(case.job, framework_of(stated), case.costs).recompute
        assert again is not None and again.every == 1
        return [(kept.numel, kept.region, kept.itemsize) for kept in again.also]

    attention = [(4096, "tp_sharded", 0), (32, "tp_sharded", 4)]
    # Of q, k, v, proj, up, gate and down: q, v, up and down.
    products = [(4096, "tp_sharded", 0), (1024, "tp_sharded", 0), (14336, "tp_sharded", 0), (4096, "seq_full", 0)]
    assert saved() == [*products, *attention]
    assert saved(precision="bf16+float8 linear") == attention
    assert saved(precision="bf16+float8 linear", source="benchmarks/llama3_h100_202412_torchtitan.md") == [
        *attention,
        (8192, "seq_full", 0),
        (18432, "tp_sharded", 0),
    ]
    assert saved(tp=2, n_gpus=16, seq_parallel=True)[-1] == (8192, "hidden", 0)
    assert held_by(recompute="full") < held_by(precision="bf16+float8 linear") < held_by() < held_by(recompute="none")


def test_state_and_gradients_are_sharded_over_context_parallelism_too() -> None:
    def state(cp: int) -> list[float]:
        case = case_of(row(**{**TITAN, "cp": cp, "gbs": 8 // cp, "seq_len": 8192 * cp, "recompute": "full"}))
        memory = World().planner(case).draft(case.costs, case.layout).memory()[0]
        return [memory.parameters, memory.gradients, memory.optimizer]

    assert state(8) == state(2) == state(1)
    costs = case_of(row(**{**TITAN, "cp": 8, "gbs": 1})).costs
    sharded = {cost.axes for cost in costs.collectives if cost.where == "unit" and cost.collective != "all_reduce"}
    assert sharded == {("dp_shard", "cp")}


def test_context_parallelism_sends_the_heads_that_its_framework_sends() -> None:
    def sent(framework: str) -> float:
        costs = case_of(row(**{**TITAN, "cp": 2, "gbs": 4, "framework": framework, "precision": "bf16"})).costs
        return sum(cost.numel for cost in costs.collectives if cost.axes == ("cp",) and cost.when == "forward")

    assert sent("torchtitan FSDP2") == 4 * sent("NeMo / Megatron-Core") == 2 * 4096 * 2


@pytest.mark.parametrize(
    ("precision", "bytes_"), [("bf16", 2), ("bf16+float8 linear", 1), ("float8 tensorwise", 1), ("float8 rowwise", 2)]
)
def test_float8_with_one_scale_is_gathered_in_one_byte(precision: str, bytes_: int) -> None:
    costs = case_of(row(**{**TITAN, "tp": 2, "n_gpus": 16, "seq_parallel": True, "precision": precision})).costs
    found = [cost for cost in costs.collectives if cost.collective == "all_gather" and cost.where in ("unit", "layer")]
    assert len(found) == 5 and {cost.itemsize or costs.itemsize for cost in found} == {bytes_}
    summed = [cost for cost in costs.collectives if cost.collective == "reduce_scatter"]
    assert {cost.itemsize or costs.itemsize for cost in summed} == {2}
