"""Stacks of weights of which each token passes some, such as experts, and layers of several kinds: by hand.

The numbers of Mixtral 8x7B are those of its paper, 46.7 B parameters of which a token passes 12.9 B (arXiv 2401.04088).
"""

from dataclasses import replace

import pytest

from tests.planned import CLUSTER, TOML, job_of
from tests.unit.test_kernels import KERNELS, PLAIN, costs, device
from tests.unit.test_search import EAGER, bounds, everything
from titan.config import Job, load_job
from titan.contracts import Costs
from titan.contracts.base import cost
from titan.contracts.base.cost import Attention, Matmul, Operation, SavedTensor, parameter_count
from titan.contracts.base.layout import Layout
from titan.contracts.base.spec import ModelSpec, normal
from titan.planner.picture.traffic import moved
from titan.planner.report import closed_form, render
from titan.planner.search.best_first import Search, search
from titan.planner.search.space import load_base
from titan.planner.step.activations import LayerMemory, kept_by
from titan.planner.step.arithmetic import flops_per_token
from titan.planner.step.layout import costs_of, uncut
from titan.planner.step.memory import GIB
from titan.planner.step.parameters import parameters_of
from titan.planner.step.predict import Planner
from titan.plugins.models.moe import MixtureConfig, MixtureOfExperts

MIXTRAL = ("--model.name", "moe", "--model.preset", "mixtral-8x7b", "--model.balance", "none")
SHORT = ("--data.seq_len", "4096", "--model.max_seq_len", "4096")
SHARDED = (*MIXTRAL, *SHORT, "--plugins.bf16.enabled", "true", "--mesh.dp_shard", "8")
SHARDED += ("--train.global_batch_size", "16", "--train.micro_batch_size", "1")


def sharded(stage: int, *words: str, ep: int = 1) -> tuple[Costs, Layout]:
    """Of Mixtral on 8 ranks, of which `ep` share the experts."""
    job = job_of(*SHARDED, "--plugins.fsdp.zero_stage", str(stage), "--mesh.ep", str(ep), *words)
    return costs_of(job), job.layout


def test_mixtral_has_its_parameters_and_passes_a_quarter_of_them() -> None:
    spec = job_of(*MIXTRAL).spec
    stacks = 32 * 3 * 8 * 4096 * 14336
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096)
    rest = attention + 32 * 4096 * 8 + 2 * 32000 * 4096 + 4096
    assert spec.params == stacks + rest == 46_702_792_704
    assert spec.active_params == stacks // 4 + rest == 12_879_925_248
    assert spec.stacked_params == stacks
    assert render.active_text(spec) == ["parameters: 12.9 B active of 46.7 B"]
    assert render.active_text(job_of().spec) == []
    drawn = [spec.init[f"layers.*.ffn.{name}.weight"] for name in ("experts.w1", "experts.w2", "router")]
    assert drawn == [normal(0.02, per_element=True), normal(0.02 / 8, per_element=True), normal(0.02)]


def test_a_token_has_two_flops_per_active_parameter() -> None:
    job, seq_len = job_of(*MIXTRAL, *SHORT), 4096
    spec = job.spec
    # Norms and the embedding table multiply nothing.
    multiplied = spec.active_params - (2 * 32 + 1) * 4096 - 32000 * 4096
    scores = 32 * 4 * seq_len * 32 * 128
    assert spec.flops_per_token(seq_len) == 3 * (2 * multiplied + scores)
    assert flops_per_token(costs_of(job)) == (spec.flops_per_token(seq_len),) * 2


def test_the_formulas_count_active_parameters_in_time_and_all_in_memory() -> None:
    report = closed_form.report(job_of(*SHARDED), peak_tflops=989)
    assert report["parameters"]["exact"] == sum(report["parameters"]["parts"].values()) == 46_702_792_704
    assert report["parameters"]["parts"]["layers: experts"] == 32 * 3 * 8 * 4096 * 14336
    assert report["parameters"]["parts"]["layers: norms and biases"] == 32 * 2 * 4096
    assert report["flops_per_token"]["6P"] == 6 * 12_879_925_248
    assert report["training"]["compute_optimal_tokens"] == 20 * 12_879_925_248
    assert report["state"]["whole_model"]["16"] == 16 * 46_702_792_704
    text = closed_form.text(report)
    assert "active per token" in text and "12,879,925,248  27.6%" in text
    assert "active per token" not in closed_form.text(closed_form.report(job_of()))


def test_the_worked_stack_of_the_contract_adds_up() -> None:
    ffn = [op for op in job_of(*MIXTRAL).spec.layer_ops if isinstance(op, Matmul) and op.stack > 1]
    numbers = sum(map(parameter_count, ffn)), sum(op.flops_per_token() for op in ffn)
    assert numbers == (1_409_286_144, 704_643_072)
    for number in numbers:
        assert f"{number:,.0f}" in (cost.__doc__ or "")


def mixed() -> ModelSpec:
    """One dense layer of four, the others with experts; windows in three of four layers."""
    sizes = {"n_layers": 4, "dim": 64, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 257, "max_seq_len": 64}
    experts = {"n_experts": 8, "top_k": 3, "expert_dim": 32, "n_dense_layers": 1, "ffn_dim": 128}
    spec = MixtureOfExperts(MixtureConfig(**sizes, **experts)).spec()
    (core,) = (op for op in spec.layer_ops if isinstance(op, Attention))
    cores = replace(core, window=16, of_layers=0.75), replace(core, of_layers=0.25)
    place = spec.layer_ops.index(core)
    return replace(spec, layer_ops=(*spec.layer_ops[:place], *cores, *spec.layer_ops[place + 1 :]))


def job_of_mixed(*words: str) -> Job:
    job = job_of(*words)
    vars(job)["spec"] = mixed()
    return job


def kinds(spec: ModelSpec) -> dict[tuple[bool, bool], tuple[Operation, ...]]:
    """(experts, window) -> the operations of a layer that has them, or the others in their place."""

    def fits(op: Operation, routed: bool, windowed: bool) -> bool:
        if op.of_layers == 1:
            return True
        return op.of_layers == (0.75 if (windowed if isinstance(op, Attention) else routed) else 0.25)

    return {
        (routed, windowed): tuple(replace(op, of_layers=1.0) for op in spec.layer_ops if fits(op, routed, windowed))
        for routed in (False, True)
        for windowed in (False, True)
    }


def test_layers_of_several_kinds_have_their_own_parameters_and_flops() -> None:
    spec = mixed()
    attention, norms = 2 * 64 * 64 + 2 * 64 * 32, 2 * 64
    dense, routed = 3 * 64 * 128, 64 * 8 + 8 * 3 * 64 * 32
    layers = 4 * (attention + norms) + dense + 3 * routed
    assert spec.params == layers + 2 * 257 * 64 + 64
    assert spec.active_params == spec.params - 3 * 5 * 3 * 64 * 32
    windows = 4 * 8 * 8 * (3 * 16 + 64)
    forward = 2 * (4 * attention + dense + 3 * (64 * 8 + 3 * 3 * 64 * 32)) + windows + 2 * 257 * 64
    assert spec.flops_per_token(64) == 3 * forward
    costs = costs_of(job_of_mixed())
    assert flops_per_token(costs)[0] == 3 * forward
    held = Planner(CLUSTER).stage_costs(costs, job_of().layout).memory(costs.stages[0]).held
    assert held["parameters"] == 4 * spec.params


def test_uneven_shares_of_layers_add_up_to_whole_parameters() -> None:
    """27 of 28 layers, as in DeepSeekMoE 16B: no float is exact, and their product is."""
    spec = job_of("--model.name", "moe", "--model.preset", "deepseek-moe-16b").spec
    ours = 28 * (4 * 2048**2 + 2 * 2048) + 3 * 2048 * 10944 + 27 * (64 * 2048 + (64 + 2) * 3 * 2048 * 1408)
    assert spec.params == ours + 2 * 102400 * 2048 + 2048
    assert isinstance(spec.params, int) and isinstance(spec.active_params, int)
    assert spec.active_params == spec.params - 27 * 58 * 3 * 2048 * 1408


def test_the_mean_layer_takes_and_saves_the_mean() -> None:
    job, planner = job_of_mixed(), Planner(CLUSTER)
    mean = costs_of(job)
    parts = {kind: replace(mean, layer=operations) for kind, operations in kinds(job.spec).items()}
    share = {(routed, windowed): (3 if routed else 1) * (3 if windowed else 1) / 16 for routed, windowed in parts}

    def mean_of(value) -> float:
        return sum(share[kind] * value(one) for kind, one in parts.items())

    seconds = planner.stage_costs(mean, job.layout).parts.layer
    for part in ("forward", "inputs", "weights"):
        expected = mean_of(lambda one: getattr(planner.stage_costs(one, job.layout).parts.layer, part))  # noqa: B023
        assert getattr(seconds, part) == pytest.approx(expected, rel=1e-12)
    assert kept_by(mean.layer, mean, True) == pytest.approx(mean_of(lambda one: kept_by(one.layer, one, True)))
    assert parameters_of(mean.layer, mean) == pytest.approx(mean_of(lambda one: parameters_of(one.layer, one)))


def test_the_largest_operation_counts_at_a_moment() -> None:
    costs = costs_of(job_of_mixed("--plugins.bf16.enabled", "true"))
    tokens = costs.share("seq_full")
    # A token has three results of a matrix of 64 outputs; no other operation has more.
    assert LayerMemory(costs, True, ways=1).midst == (3 * 3 * 64 + 64) * tokens * 2
    rare = tuple(replace(op, of_layers=0.01) if op.of_layers < 1 else op for op in costs.layer)
    assert LayerMemory(replace(costs, layer=rare), True, ways=1).midst == (3 * 3 * 64 + 64) * tokens * 2
    scratch = [
        replace(op, scratch=(SavedTensor(numel=size, region="tp_sharded"),)) if isinstance(op, Attention) else op
        for op, size in zip(costs.layer, range(len(costs.layer)), strict=True)
    ]
    largest = max(number for number, op in enumerate(costs.layer) if isinstance(op, Attention))
    assert LayerMemory(replace(costs, layer=tuple(scratch)), True, ways=1).core == largest * tokens * 2


def test_results_of_matmuls_that_recomputation_saves_are_those_of_the_mean_layer() -> None:
    costs = costs_of(job_of_mixed("--plugins.activation_checkpoint.mode", "selective"))
    least, last = LayerMemory(costs, True, ways=1).least, 4 * costs.share("seq_full")
    results = [op.of_layers * op.used * op.outputs for op in costs.layer if isinstance(op, Matmul)]
    assert sum(results) == 64 + 64 + 32 + 32 + 0.25 * (128 + 128 + 64) + 0.75 * (8 + 3 * (32 + 32 + 64))
    assert least == pytest.approx(last * (64 + sum(results) + 64) + 4 * 8 * costs.share("seq_full"))


def test_techniques_keep_what_layers_of_several_kinds_state() -> None:
    words = ("--mesh.cp", "2", "--mesh.dp_shard", "2", "--mesh.tp", "2", "--train.micro_batch_size", "2")
    words += ("--plugins.activation_checkpoint.mode", "full", "--plugins.compile.enabled", "true")
    job = job_of_mixed(*words, "--data.seq_len", "64", "--plugins.context.method", "ring")
    costs = costs_of(job)
    assert [op.of_layers for op in costs.layer] == [op.of_layers for op in job.spec.layer_ops]
    before, after = ([op for op in ops if isinstance(op, Matmul)] for ops in (job.spec.layer_ops, costs.layer))
    assert after == before
    sent = {c.of_layers for c in costs.collectives if c.axes == ("cp",) and c.when == "forward"}
    assert sent == {0.25, 0.75}
    # Sums of attention's output, of the dense feed-forward in one layer of four, of the experts in the others.
    summed = [c for c in costs.collectives if c.axes == ("tp",) and c.where == "layer" and c.when == "forward"]
    assert {c.collective: c.count for c in summed} == {"all_gather": 2, "reduce_scatter": 2}
    (first, *_) = (op for op in costs.layer if isinstance(op, Matmul) and op.stack > 1)
    assert costs.product(first) == (64, 16)
    assert parameters_of([first], costs) == first.of_layers * 8 * 64 * 16


STACK = Matmul(module="experts", inputs=4096, outputs=2048, stack=8, used=2)
GROUPED = {
    "FLOPs of 8,192 rows per weight": (32768, 1, 2 * 65536 * 4096 * 2048 / 50e12),
    "bytes of all weights, with two rows each": (8, 1, 2 * (16 * 4096 + 8 * 4096 * 2048 + 16 * 2048) / 500e9),
    "bytes of one weight": (8, 8, 2 * (16 * 4096 + 4096 * 2048 + 16 * 2048) / 500e9),
}
"""Tokens that pass 2 of 8 weights each, ranks that share the weights, and seconds."""


@pytest.mark.parametrize(("tokens", "ways", "took"), GROUPED.values(), ids=GROUPED)
def test_a_grouped_product_takes(tokens: int, ways: int, took: float) -> None:
    seconds = device().operation(STACK, costs(seq_len=tokens), "bfloat16", ways=ways)
    assert seconds.forward == pytest.approx(took)
    assert ways > 1 or seconds.forward == seconds.inputs == seconds.weights


def test_groups_share_a_launch_and_a_wave() -> None:
    """10 units: two groups of 5 tiles are one wave. A group of half as many rows as a tile takes whole tiles."""
    waved = device(replace(PLAIN, wave_quantization=1.0), replace(KERNELS, launch_us=7.0))
    tiles = {"k": 8192, "n": 1280, "even": 64, "dtype": "bfloat16", "width": 1}
    one = waved.product(256, 8192, 1280, "bfloat16", 1)
    assert waved.grouped(2, 128, **tiles) == pytest.approx(one)
    assert waved.grouped(2, 64, **tiles) == pytest.approx(one)
    # Of half tiles, three waves of half the work.
    assert waved.grouped(3, 128, **tiles) == pytest.approx(1.5 * one - 3.5e-6)
    measured = device(replace(PLAIN, points=("1e9 10", "1e11 40")))  # of each product of a group
    assert measured.grouped(3, 500, 10000, 1000, 8, "bfloat16", 2) == pytest.approx(3 * 1e10 / 25e12)


def test_small_experts_are_slower_per_flop() -> None:
    """By the part of a tile that their tokens leave empty, and by the short reduction of the gradient of weights."""
    slow = device(replace(PLAIN, wave_quantization=1.0, k_half=512))
    times = []
    for stack in (8, 384, 1024):
        op = replace(STACK, stack=stack)
        times.append(slow.operation(op, costs(seq_len=16384), "bfloat16"))
        shared_ = slow.operation(op, costs(seq_len=16384), "bfloat16", ways=8)
        assert shared_.forward <= times[-1].forward and shared_.weights < times[-1].weights
    assert times[0].forward < times[1].forward < times[2].forward
    assert times[0].weights / times[0].forward < times[1].weights / times[1].forward


def test_part_of_the_tokens_takes_its_part_and_float8_is_for_plain_linears() -> None:
    whole, job = Matmul(module="w", inputs=4096, outputs=8192), costs(seq_len=32768, dtype="float8")
    seconds = [device().operation(op, costs(seq_len=8192), "bfloat16") for op in (whole, replace(whole, used=0.5))]
    assert seconds[1].forward == pytest.approx(seconds[0].forward / 2)
    assert device().operation(STACK, job, "float8") == device().operation(STACK, job, "bfloat16")


def test_the_number_of_a_groups_tokens_need_not_be_even() -> None:
    odd = device(replace(PLAIN, aligned=64, unaligned_factor=0.9, unaligned_16b_factor=0.1))
    even, uneven = (odd.operation(STACK, costs(seq_len=length), "bfloat16") for length in (32768, 32764))
    assert uneven.forward == pytest.approx(even.forward, rel=1e-3)
    narrow = odd.operation(replace(STACK, outputs=2048 - 4), costs(seq_len=32768), "bfloat16")
    assert narrow.forward > 10 * even.forward


def test_gathers_and_reductions_are_of_the_experts_that_ranks_share() -> None:
    words, both = ("--mesh.cp", "2", "--mesh.dp_shard", "4", "--plugins.context.method", "ulysses"), ("dp_shard", "cp")
    stacks = job_of(*MIXTRAL).spec.stacked_params
    rest = job_of(*MIXTRAL).spec.params - stacks
    costs, layout = sharded(2, *words)
    assert moved(0, costs, layout)["reduce_scatter", both] == 4 * 4 * (rest + stacks)
    group = ("dp_shard", "cp / ep")
    for ep in (2, 4):
        costs, layout = sharded(2, *words, ep=ep)
        sent = moved(0, costs, layout)
        assert sent["reduce_scatter", both] == 4 * 4 * rest
        assert sent["reduce_scatter", group] == 4 * 4 * stacks / ep
        assert sent["all_gather", both] == 4 * 2 * rest + 2 * 4096 * 32000 + 2 * 4096
        assert sent["all_gather", group] == 4 * 2 * stacks / ep
    costs, layout = sharded(2, *words, ep=8)  # nobody has the same experts
    assert {axes for _, axes in moved(0, costs, layout)} == {both, ("cp",), ("ep",)}


def test_more_ranks_that_share_stacks_gather_less_and_send_more() -> None:
    seen = []
    for ep in (1, 2, 4, 8):
        costs, layout = sharded(3, ep=ep)
        prediction = Planner(CLUSTER).predict(costs, layout)
        gathered = sum(size for (kind, _), size in moved(0, costs, layout).items() if kind == "all_gather")
        figures = gathered, -prediction.time_s["ep"], prediction.memory[0].buffers, prediction.time_s["forward"]
        seen.append([float(f"{figure:.12g}") for figure in figures])  # sums in another order
        assert sum(prediction.time_s.values()) == pytest.approx(prediction.step_time_s)
    for column in zip(*seen, strict=True):
        assert list(column) == sorted(column, reverse=True)
        assert column[0] > column[-1] or column == column[:1] * 4
    assert seen[0][1] == 0 > seen[1][1]
    # Of 4,096 tokens twice 4,096 features in two bytes, three quarters go to other ranks; four exchanges per layer.
    exchange = 3 / 4 * 4096 * 2 * 4096 * 2 / 100e9
    assert -seen[2][1] == pytest.approx(costs.micro_batches * 32 * 4 * exchange)


def test_stacks_are_gathered_between_nodes_by_ranks_that_hold_the_same() -> None:
    """Of 8 ranks on two nodes the 4 neighbors hold other experts: pairs gather theirs, each over a link of its own."""
    costs, layout = sharded(1, ep=4)
    parts = Planner(CLUSTER).stage_costs(costs, layout).parts
    (gather, *_) = (c for c in costs.collectives if c.collective == "all_gather")
    layer = parts.tensors.layer
    assert layer.stacked == 3 * 2 * 4096 * 14336
    whole = 7 / 8 * 2 * layer.plain / 40e9 + 1 / 2 * 2 * layer.stacked / 10e9
    assert parts.seconds(gather, layer) == pytest.approx(whole)


MOE = ("--model.name=moe", "--model.preset=moe-tiny", "--model.n_experts=8", *EAGER)


def test_the_search_shares_stacks_over_ranks_that_come_out_even() -> None:
    words = (*MOE, "--mesh.tp=1", "--mesh.pp=1", "--mesh.cp=1")
    layouts = list(load_base(TOML, words).space(32, 4).layouts())
    assert all(layout.world_size == 32 for layout in layouts)
    found = {(layout.degrees["dp_shard"], layout.degrees["ep"]) for layout in layouts}
    shards = (1, 2, 4, 8, 16, 32)
    assert found == {(n, share) for n in shards for share in (1, 2, 4, 8) if share <= n}  # of eight experts
    fixed = load_base(TOML, (*words, "--mesh.ep=4")).space(32, 4)
    found = {(layout.degrees["dp_shard"], layout.degrees["ep"]) for layout in fixed.layouts()}
    assert found == {(n, 4) for n in (4, 8, 16, 32)}
    dense = load_base(TOML, ("--mesh.tp=1", *EAGER)).space(32, 4)
    assert {layout.degrees["ep"] for layout in dense.layouts()} == {1}


@pytest.mark.sweep
def test_no_layout_with_shared_stacks_is_better_than_its_bounds() -> None:
    words = (*MOE, "--mesh.cp=1", "--mesh.tp=1", "--plugins.bf16.enabled=true", "--train.global_batch_size=8")
    words += ("--plugins.activation_checkpoint.enabled=false",)
    base = load_base(TOML, words).job
    run = Search(base, Planner(CLUSTER), 1, "time")
    alone = replace(costs_of(base), recompute=None, collectives=(), fused=True, update_bytes=0.0)
    found = everything(4, *words)
    for choice, prediction in found:
        job = load_job(TOML, [*words, *choice.words()], 4)
        assert max(bounds(run, alone, job)) <= prediction.step_time_s * (1 + 1e-9), choice
        alike = run.planner.stage_costs(uncut(job), job.layout)
        assert run.least_memory(alike) / GIB <= prediction.peak_gib * (1 + 1e-9)
    assert {choice.layout.degrees["ep"] for choice, _ in found} == {1, 2, 4}
    best = search(base, Planner(CLUSTER), [load_base(TOML, words).space(4, 4)], keep=5).best
    values = sorted(prediction.step_time_s for _, prediction in found)
    assert [f.prediction.step_time_s for f in best] == pytest.approx(values[:5], rel=1e-9)
