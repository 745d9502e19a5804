"""What models and techniques say a step costs: parameters and FLOPs of the spec, slices, bytes of state and traffic."""

from dataclasses import replace

import pytest
import torch

from tests.logits import logits_of
from tests.operations import Watch
from tests.planned import CLUSTER, job_of
from titan.config import Job
from titan.contracts import Model
from titan.contracts.base import cost
from titan.contracts.base.cost import Attention, Costs, Elementwise, Matmul, PersistentState, residual
from titan.contracts.plugin import registry
from titan.errors import ConfigError
from titan.planner.picture.traffic import moved
from titan.planner.step import layout
from titan.planner.step.activations import kept_by
from titan.planner.step.arithmetic import flops_per_token
from titan.planner.step.layout import costs_of
from titan.planner.step.parameters import parameters_of
from titan.planner.step.predict import Planner

registry.load_plugins()
ADDED = (torch.ops.aten.add, torch.ops.aten.add_)
MODELS = [(plugin, preset) for plugin in registry.of_kind("model") for preset in plugin.presets]


@pytest.mark.parametrize(("plugin", "preset"), MODELS, ids=lambda value: getattr(value, "name", value))
def test_operations_have_the_parameters_and_flops_of_the_plan(plugin: type[Model], preset: str) -> None:
    spec = plugin(plugin.Config(**plugin.presets[preset])).spec()
    job = job_of("--model.name", plugin.name, "--model.preset", preset, "--data.seq_len", str(spec.max_seq_len))
    costs = costs_of(job)
    embeddings, layer, head = (parameters_of(ops, costs) for ops in (costs.embeddings, costs.layer, costs.head))
    assert (embeddings, layer) == (spec.embedding_params, spec.layer_params)
    assert head - (spec.vocab_size * spec.dim if spec.tied else 0) == spec.head_params
    assert flops_per_token(costs)[0] == pytest.approx(spec.flops_per_token(job.data.seq_len), rel=1e-12)


@pytest.mark.parametrize("model", list(registry.of_kind("model")), ids=lambda plugin: plugin.name)
def test_backward_sums_the_gradients_of_states_that_are_used_several_times(model: type[Model]) -> None:
    size = {"dim": 32, "n_heads": 2, "vocab_size": 16, "max_seq_len": 8}
    found, sums = [], list[bool]()
    watch = Watch(lambda func, _, out: sums.append(func.overloadpacket in ADDED and out.shape == (2, 8, 32)))
    for layers in (1, 2):
        module = model(model.Config(n_layers=layers, **size)).build().to_empty(device="cpu")
        for layer in module.layers.values():
            for name, _ in list(layer.named_modules()):
                if name.endswith("norm"):
                    layer.set_submodule(name, torch.nn.Identity())  # norms have sums of their own
        loss = logits_of(module, torch.zeros(2, 8, dtype=torch.long)).sum()
        with watch:
            loss.backward()
        found.append(sum(sums))
        sums.clear()
    operations = model(model.Config(n_layers=1, **size)).spec().layer_ops
    residuals = [op for op in operations if op == residual(32)]
    stated = sum(op.backward for op in operations if isinstance(op, Elementwise) and not op.forward)
    stated += sum(op.backward for op in residuals)
    assert len(residuals) == 2 and stated == 3 * 32 * (found[1] - found[0])


def test_tensor_parallelism_slices_pairs_and_replicates_norms() -> None:
    whole, sliced_ = costs_of(job_of()), costs_of(job_of("--mesh.tp", "4"))
    norms, (all_, slices) = 2 * whole.dim, (parameters_of(costs.layer, costs) for costs in (whole, sliced_))
    assert slices == (all_ - norms) / 4 + norms
    assert sliced_.share("hidden") == whole.share("hidden") / 4
    assert sliced_.share("seq_full") == whole.share("seq_full")
    assert sliced_.share("logits") == whole.share("logits") / 4
    kept_whole = costs_of(job_of("--mesh.tp", "4", "--plugins.tensor.sequence_parallel", "false"))
    assert kept_whole.share("hidden") == whole.share("hidden")
    not_split = costs_of(job_of("--mesh.tp", "4", "--plugins.tensor.loss_parallel", "false"))
    assert not_split.share("logits") == whole.share("logits")
    assert not_split.product(not_split.head[1])[1] == whole.product(whole.head[1])[1] / 4


@pytest.mark.parametrize(
    ("words", "each"),
    [
        ((), (4, 4, 8)),
        (("--mesh.dp_shard", "4"), (1, 1, 2)),
        (("--mesh.dp_replicate", "4"), (4, 4, 8)),
        (("--mesh.dp_replicate", "2", "--mesh.dp_shard", "2"), (2, 2, 4)),
    ],
)
def test_state_in_bytes_a_parameter(words: tuple[str, ...], each: tuple[int, ...]) -> None:
    job = job_of(*words)
    costs = costs_of(job)
    held = Planner(CLUSTER).stage_costs(costs, job.layout).memory(costs.stages[0]).held
    found = [held[component] / job.spec.params for component in ("parameters", "gradients", "optimizer")]
    assert found == pytest.approx(each, rel=0.01)  # of 257 words, a quarter of the ranks hold one more than the others


def test_state_of_some_parameters_on_the_host_takes_the_time_of_their_bytes() -> None:
    job = job_of("--model.preset", "mini")
    costs = costs_of(job)
    means = PersistentState(component="optimizer", bytes_per_param=8, kinds=("vector",), on_host=True)
    costs = replace(costs, state=(*(each for each in costs.state if each.component != "optimizer"), means))
    slow = replace(CLUSTER, device=replace(CLUSTER.device, host_gb_s=1e-6))
    alike = Planner(slow).stage_costs(costs, job.layout)
    hosted = alike.memory(costs.stages[0]).hosted["optimizer"]
    assert hosted == 8 * (2 * job.spec.n_layers + 1) * job.spec.dim
    assert alike.work(costs.stages[0]).once["optimizer"] == pytest.approx(hosted / 1e3)
    assert alike.once_s == pytest.approx(8 * 2 * job.spec.dim / 1e3)


def test_collectives_of_a_layer_overlap_no_more_than_the_layer() -> None:
    job = job_of("--mesh.tp", "2")
    costs = costs_of(job)
    each = replace(next(c for c in costs.collectives if (c.where, c.when) == ("layer", "forward")), overlaps=True)
    for numel in (1, 1e9):  # of a few bytes, and of more than the layer takes
        one = replace(each, numel=numel)
        parts = Planner(CLUSTER).stage_costs(replace(costs, collectives=(one, one)), job.layout).parts
        hidden, layer_s = sum(parts.overlapped["layer", "forward"].values()), parts.layer.forward
        assert hidden == pytest.approx(min(2 * parts.seconds(one), layer_s)) and (hidden == layer_s) == (numel > 1)


def bytes_moved(job: Job, place: int = 0) -> dict[tuple[str, str], float]:
    return {(kind, axes[0]): size for (kind, axes), size in moved(place, costs_of(job), job.layout).items()}


def test_zero_stages_gather_and_reduce_as_often_as_they_say() -> None:
    words = ("--mesh.dp_shard", "4", "--train.global_batch_size", "24", "--train.micro_batch_size", "2")
    spec = job_of().spec
    whole, head = 4 * spec.params, 4 * spec.head_params
    # What forward ends with is still there when backward begins; and once per step it is prefetched for nobody.
    for stage, gathered, reduced in ((1, whole, 1), (2, 3 * whole + head, 3), (3, 6 * whole - 2 * head, 3)):
        sent = bytes_moved(job_of(*words, "--plugins.fsdp.zero_stage", str(stage)))
        assert sent["all_gather", "dp_shard"] == gathered
        assert sent["reduce_scatter", "dp_shard"] == reduced * whole
    hybrid = bytes_moved(job_of("--mesh.dp_shard", "2", "--mesh.dp_replicate", "2"))
    assert hybrid["all_reduce", "dp_replicate"] == 4 * spec.params / 2  # between replicas, what a shard holds


def test_tensor_parallelism_sends_what_its_docstring_says() -> None:
    job = job_of("--mesh.tp", "4")
    sizes = job.micro_batch * job.data.seq_len * job.spec.dim * 4 * job.micro_batches
    layers, sent = job.spec.n_layers, bytes_moved(job)
    # Forward 2 gathers per layer and the head's; backward 2 per layer and the embeddings'. Reductions likewise.
    assert sent["all_gather", "tp"] == sizes * (4 * layers + 2)
    assert sent["reduce_scatter", "tp"] == sizes * (4 * layers + 2)
    words = ("--mesh.tp", "4", "--plugins.activation_checkpoint.mode")
    full, selective = (bytes_moved(job_of(*words, mode)) for mode in ("full", "selective"))
    assert full["all_gather", "tp"] == sizes * (6 * layers + 2)
    assert full["reduce_scatter", "tp"] == sizes * (5 * layers + 2)
    assert selective == sent


CONTEXT = ("--mesh.cp", "4", "--mesh.dp_shard", "2", "--train.micro_batch_size", "2", "--plugins.bf16.enabled", "true")


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        # Three hops of keys and values each way; of gradients in float32 four, as they end where they began.
        ("ring", {"send": 3 * 2}, {"send": 3 * 2 + 4 * 4}),
        # The keys and values of four ranks, and once the gradients of all of them in float32.
        ("gather", {"all_gather": 4 * 2}, {"all_gather": 4 * 2, "reduce_scatter": 4 * 4}),
        # Twice as many queries and outputs as keys and values.
        ("ulysses", {"all_to_all": 3 * 2}, {"all_to_all": 3 * 2}),
    ],
)
def test_context_parallelism_sends_what_its_docstring_says(
    method: str, forward: dict[str, int], backward: dict[str, int]
) -> None:
    """Bytes per number in a rank's keys and values, which have 2 x 4 heads of 8 features at 2 x 16 positions."""
    mode, tp = "--plugins.activation_checkpoint.mode", ("--mesh.tp", "2")
    for more, passes, share in (((), 1, 1), ((mode, "selective"), 1, 1), ((mode, "full"), 2, 1), (tp, 1, 0.5)):
        if method == "ulysses" and more == tp:
            continue  # four ranks for two key-value heads: the next test
        job = job_of(*CONTEXT, "--plugins.context.method", method, *more)
        each = share * 2 * 4 * 8 * 2 * 16 * job.spec.n_layers * job.micro_batches
        sent = {kind: size for (kind, axis), size in bytes_moved(job).items() if axis == "cp"}
        assert sent == {kind: each * (passes * forward.get(kind, 0) + backward[kind]) for kind in backward}


def test_key_value_heads_that_are_fewer_than_ranks_are_sent_repeatedly() -> None:
    words = (*CONTEXT, "--plugins.context.method", "ulysses")
    job = job_of(*words, "--model.n_kv_heads", "2")
    # Eight query heads and outputs, and four of keys and of values where there are two.
    each = (8 + 8 + 4 + 4) * 8 * 2 * 16 * 2 * job.spec.n_layers * job.micro_batches
    assert bytes_moved(job)["all_to_all", "cp"] == 2 * each == bytes_moved(job_of(*words))["all_to_all", "cp"]
    sliced_ = job_of(*words, "--mesh.tp", "2")  # four kv heads are two per rank of tp, and so four again
    assert bytes_moved(sliced_)["all_to_all", "cp"] == (8 + 8 + 8 + 8) / (8 + 8 + 4 + 4) * each


def test_those_who_sum_gradients_share_state_over_the_ranks_of_a_sequence() -> None:
    job = job_of("--mesh.cp", "4", "--mesh.dp_shard", "2")
    costs = costs_of(job)
    held = Planner(CLUSTER).stage_costs(costs, job.layout).memory(costs.stages[0]).held
    assert held["parameters"] / job.spec.params == pytest.approx(4 / 8, rel=0.02)
    assert {axes for _, axes in moved(0, costs, job.layout)} == {("dp_shard", "cp"), ("cp",)}
    replicas = job_of("--mesh.cp", "2", "--mesh.dp_replicate", "4", "--plugins.ddp.enabled", "true")
    sums = moved(0, costs_of(replicas), replicas.layout)
    assert sums["all_reduce", ("dp_replicate", "cp")] == 4 * replicas.spec.params


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_a_rank_keeps_its_positions(method: str) -> None:
    """All that a layer saves for backward is shared out; ulysses has its output twice, as it exchanges it."""
    whole = costs_of(job_of(*CONTEXT, "--mesh.cp", "1"))
    part = costs_of(job_of(*CONTEXT, "--plugins.context.method", method))
    saved, most = (kept_by(costs.layer, costs, fused_norms=True) for costs in (part, whole))
    assert saved == most / 4 + (method == "ulysses") * 8 * 8 * 2 * 2 * 16
    (before,), (after,) = ([op for op in costs.layer if isinstance(op, Attention)] for costs in (whole, part))
    assert replace(after, blocks=1, copied=(0, 0), scratch=(), saved=before.saved) == before
    device = Planner(CLUSTER).device
    assert device.operation(replace(after, copied=(0, 0), blocks=1), part, "bfloat16").forward == pytest.approx(
        device.operation(before, whole, "bfloat16").forward / 4, rel=1e-12
    )


def test_only_attention_hides_what_goes_round_the_ring() -> None:
    job = job_of(*CONTEXT, "--data.seq_len", "4096", "--model.max_seq_len", "4096")
    costs = costs_of(job)
    (sent,) = [c for c in costs.collectives if c.when == "forward" and c.collective == "send"]
    for speed, shown in ((1e-6, 1.0), (1e6, 0.0)):
        links = tuple(replace(link, bandwidth_gb_s=link.bandwidth_gb_s * speed) for link in CLUSTER.links)
        parts = Planner(replace(CLUSTER, links=links)).stage_costs(costs, job.layout).parts
        core, all_ = parts.attention.forward * 3 / 4, parts.seconds(sent)
        exposed = parts.exposed["layer", "forward"]["cp"]
        # Four blocks of attention, and a send beside each of the first three.
        assert exposed == pytest.approx(all_ - min(core, all_), rel=1e-6, abs=1e-15)
        assert exposed / all_ == pytest.approx(shown, abs=1e-3)
    prediction = Planner(CLUSTER).predict(costs, job.layout)
    assert prediction.time_s["cp"] > 0 < prediction.overlapped_s["cp"]
    assert sum(prediction.time_s.values()) == pytest.approx(prediction.step_time_s)


def test_a_window_counts_the_keys_within_it() -> None:
    job = job_of()
    costs, device = costs_of(job), Planner(CLUSTER).device
    (core,) = (op for op in costs.layer if isinstance(op, Attention))
    (narrow,) = (op for op in job_of("--model.sliding_window", "16").spec.layer_ops if isinstance(op, Attention))
    assert narrow == replace(core, window=16)
    assert narrow.flops_per_token(64) == core.flops_per_token(64) / 4 == core.flops_per_token(16)
    spec = replace(job.spec, layer_ops=tuple(narrow if op is core else op for op in job.spec.layer_ops))
    lost = job.spec.layer_flops_per_token(64) - spec.layer_flops_per_token(64)
    assert lost == 0.75 * core.flops_per_token(64)
    unstated = replace(job.spec, layer_ops=tuple(op for op in job.spec.layer_ops if op is not core))
    assert unstated.layer_flops_per_token(64) == job.spec.layer_flops_per_token(64)
    # Of 64 x 64 scores half are computed; with a mask all, whatever the window.
    took = [device.operation(op, costs, "float32").forward for op in (core, narrow)]
    assert took[1] / took[0] == pytest.approx(2)
    packed = replace(core, documents=True)
    assert device.operation(packed, costs, "float32") == device.operation(narrow, costs, "float32")


@pytest.mark.parametrize(("schedule", "grows"), [("1F1B", False), ("GPipe", True)])
def test_what_a_schedule_keeps_under_way(schedule: str, grows: bool) -> None:
    words = ("--mesh.pp", "2", "--train.micro_batch_size", "1", "--plugins.pipeline.schedule", schedule)
    kept = []
    for size in (64, 128):
        job = job_of(*words, "--train.global_batch_size", str(size))
        costs = replace(costs_of(job), receive_buffers=0)
        kept.append(Planner(CLUSTER).draft(costs, job.layout).memory()[0].activations)
    assert kept[1] / kept[0] == pytest.approx(2 if grows else 1, rel=0.02)


def test_a_model_without_operations_is_refused() -> None:
    job = job_of()
    vars(job)["spec"] = replace(job.spec, layer_ops=())
    with pytest.raises(ConfigError, match="has no operations; state them"):
        costs_of(job)


def test_the_worked_layer_of_the_contract_adds_up() -> None:
    """The numbers in the docstring of titan/contracts/base/cost/__init__.py."""
    words = ("--model.name", "llama", "--model.dim", "1024", "--model.n_heads", "16", "--model.n_kv_heads", "4")
    words += ("--model.ffn_dim", "2816", "--model.max_seq_len", "2048", "--data.seq_len", "2048")
    words += ("--train.micro_batch_size", "1", "--plugins.bf16.enabled", "true")
    costs = costs_of(job_of(*words))
    products = (2 * op.inputs * op.outputs for op in costs.layer if isinstance(op, Matmul))
    scores = (4 * costs.seq_len * op.heads * op.head_dim for op in costs.layer if isinstance(op, Attention))
    flops = sum(products) + sum(scores)
    saved = [tensor for op in costs.layer for tensor in op.saved if tensor.kernels != "several"]
    numbers = [sum(tensor.numel for tensor in saved if tensor.itemsize == size) for size in (0, 4)]
    assert (flops, numbers) == (30_932_992, [17_920, 18])
    assert kept_by(costs.layer, costs, fused_norms=True) == 73_547_776 == 35_912 * 2_048
    sliced_ = costs_of(job_of(*words, "--mesh.tp", "2"))
    assert kept_by(sliced_.layer, sliced_, fused_norms=True) == 20_004 * 2_048
    for said in ("30,932,992", "17,920", "35,912", "73,547,776", "20,004"):
        assert said in (cost.__doc__ or ""), said


CLIPPING = {
    "the update's": ((), 2),
    "none": (("--train.grad_clip", "0"), 1),
    "of groups": (("--optimizer.groups", "[{match = 'head', lr = 1e-3}]"), 2),
    "not fused": (("--optimizer.name", "sgd"), 3),
    "before state is fetched": (("--plugins.offload.optimizer", "true"), 3),
    "before weights are rounded": (("--plugins.bf16.pure", "true"), 3),
    "weights are not rounded": (("--plugins.bf16.pure", "true", "--plugins.bf16.rounding", "nearest"), 2),
    "gradients are seen": (("--mesh.worker", "2", "--plugins.gossip.tracking", "true"), 3),
    "gradients are pushed": (("--mesh.worker", "2", "--plugins.parameter_server.enabled", "true"), 3),
}


@pytest.mark.parametrize(("words", "passes"), CLIPPING.values(), ids=CLIPPING)
def test_passes_over_gradients_for_norm_and_clipping(words: tuple[str, ...], passes: int) -> None:
    job = job_of(*words)
    bare = layout._of_model(job)
    assert bare.update_bytes == passes * bare.store_itemsize


SIZES = ("--model.dim", "2048", "--model.n_heads", "16", "--model.ffn_dim", "4096", "--model.n_layers", "4")
MUON = ("--optimizer.name", "muon", "--model.preset", "nano", *SIZES, "--plugins.bf16.enabled", "true")


def _planned(*words: str) -> tuple[Costs, float]:
    """(costs, seconds of the update)."""
    job = job_of(*MUON, *words, "--train.global_batch_size", "64")
    costs = costs_of(job)
    return costs, Planner(CLUSTER).predict(costs, job.layout).time_s["optimizer"]


def _products(ranks: int, *words: str) -> float:
    """Seconds of five iterations: what ten take more."""
    layout = ("--mesh.dp_shard", str(ranks), *words)
    return _planned(*layout, "--optimizer.ns_steps", "10")[1] - _planned(*layout)[1]


def test_five_iterations_take_their_flops() -> None:
    costs, _ = _planned()
    flops = 0.0
    for op in costs.layer:
        if isinstance(op, Matmul):
            m, n = sorted((op.inputs, op.outputs))
            flops += 4 * 2 * 5 * (2 * m * m * n + m**3)  # four layers
    assert _products(1) == pytest.approx(flops / 100e12, rel=0.02)  # bf16: half of 200 TFLOP/s


@pytest.mark.parametrize(
    ("ranks", "words", "shares"),
    [(4, (), 4), (2, ("--mesh.tp", "2"), 4), (2, ("--mesh.dp_replicate", "2"), 4), (1, ("--mesh.pp", "2"), 2)],
)
def test_ranks_that_share_matrices_share_their_products(ranks: int, words: tuple[str, ...], shares: int) -> None:
    assert _products(ranks, *words) == pytest.approx(_products(1) / shares, rel=1e-6)


def test_a_matrix_is_not_divided() -> None:
    """Of 28 matrices, 64 ranks have one at most, and so do 32."""
    longest = 2 * 5 * (2 * 2048**2 * 4096 + 2048**3) / 100e12
    assert _products(64) == pytest.approx(_products(32)) == pytest.approx(longest, rel=0.02)
