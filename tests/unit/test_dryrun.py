"""The dry run's numbers are those of the shapes, counted by hand, and it leaves nothing behind.

Every TOML in `configs/` dry-runs too, with its own widths, techniques and ranks: one layer a stage and the fewest micro
batches that fill the pipeline, as what more of them would show is more of the same.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.sweeps import but_sweep
from titan.config import Job, load_job
from titan.contracts import Mesh
from titan.errors import ConfigError, PluginError
from titan.packages import torch_release
from titan.planner.dryrun import COMPONENTS, DryRun, dry_run, report
from titan.planner.step.arithmetic import flops_per_token
from titan.planner.step.layout import costs_of

LAYERS, DIM, FFN, VOCAB, SEQ, BATCH = 4, 128, 384, 4097, 128, 8
SMALL = ("--model.n_layers", "4", "--train.global_batch_size", "8", "--train.micro_batch_size", "2")
LAYER = 4 * DIM * DIM + 3 * DIM * FFN
PARAMETERS = LAYERS * (LAYER + 2 * DIM) + 2 * VOCAB * DIM + DIM
ONE = ("--mesh.dp_shard", "1")
TWO = ("--mesh.dp_shard", "2")


def _job(*words: str) -> Job:
    return load_job(None, [*SMALL, *words])


def _sent(run: DryRun, kind: str, axes: str) -> tuple[int, int]:
    """(calls, bytes) of a kind over an axis."""
    found = [c for c in run.collectives if (c.kind, c.axes) == (kind, axes)]
    return sum(c.count for c in found), sum(c.count * c.bytes for c in found)


def test_one_rank() -> None:
    run, tensors = dry_run(_job(*ONE), 0), LAYERS * 9 + 3
    assert run.parameters == PARAMETERS
    assert run.steady["parameters"] == 4 * PARAMETERS
    assert run.steady["optimizer"] == 8 * PARAMETERS + 4 * tensors  # two moments, and a counter for each tensor
    assert run.peak_by_component["gradients"] == run.at_peak["gradients"] == 4 * PARAMETERS
    assert run.steady["gradients"] == run.steady["saved"] == run.at_peak["gathered"] == 0
    assert run.collectives == ()


def test_components_are_all_of_it_in_words_and_in_json() -> None:
    run = dry_run(_job(*TWO), 0)
    assert set(run.at_peak) == set(COMPONENTS) and 0 < len(run.timeline) <= 400
    assert run.peak_bytes == sum(run.at_peak.values()) == max(point.bytes for point in run.timeline)
    assert 0.5 * run.peak_bytes < sum(each.bytes for each in run.top_allocations) <= run.peak_bytes
    table, text = json.loads(json.dumps(run.as_json())), report(run)
    assert table["peak_bytes"] == run.peak_bytes and table["collectives"][0]["axes"] == "dp_shard"
    assert "rank 0 of 2" in text and "reduce_scatter over dp_shard (2 ranks): 6 calls" in text


def test_matrix_products_and_attention() -> None:
    run, tokens = dry_run(_job(*ONE), 0), BATCH * SEQ
    forward = tokens * (2 * (LAYERS * LAYER + VOCAB * DIM) + LAYERS * 4 * SEQ * DIM)
    scores = tokens * LAYERS * 2 * SEQ * DIM  # made again in the backward of attention
    total, early = run.total_flops, tokens * 4 * VOCAB * DIM  # the loss makes the gradients of the head in forward
    assert (total.forward, total.backward, total.recompute) == (forward + early, 2 * forward - early, scores)
    assert run.flops["layers.2.ffn.w1"].forward == tokens * 2 * DIM * FFN
    assert run.flops["layers.2.ffn.w1"].backward == tokens * 4 * DIM * FFN


def test_full_recompute_does_the_layers_again_and_saves_their_inputs() -> None:
    plain, run = (dry_run(_job(*ONE, *more), 0) for more in ((), ("--plugins.activation_checkpoint.mode", "full")))
    # The last product of a block is not needed again: nothing saves its result.
    again = run.total_flops.recompute - plain.total_flops.recompute
    down = sum(f.forward for name, f in run.flops.items() if name.endswith("w2"))
    layers = sum(f.forward for name, f in run.flops.items() if name.startswith("layers."))
    assert again == layers - down
    assert run.peak_by_component["saved"] < 0.5 * plain.peak_by_component["saved"]


def test_every_second_block_is_recomputed_and_selective_mode_repeats_no_product() -> None:
    modes = ("--plugins.activation_checkpoint.mode=every_n", "--plugins.activation_checkpoint.mode=selective")
    plain, second, selective = (dry_run(_job(*ONE, *words), 0) for words in ((), modes[:1], modes[1:]))
    again = [layer for layer in range(LAYERS) if second.flops[f"layers.{layer}.ffn.w1"].recompute]
    assert again == [0, 2]
    assert selective.total_flops == plain.total_flops
    assert selective.peak_by_component["saved"] < plain.peak_by_component["saved"]


@pytest.mark.parametrize(("mode", "products"), [("attention", 1), ("selective", 2)])
def test_recomputing_scores_repeats_products_of_attention_and_saves_no_scores(mode: str, products: int) -> None:
    unfused = (*ONE, "--model.attention", "unfused")
    job = _job(*unfused, "--plugins.activation_checkpoint.mode", mode)
    plain, run = dry_run(_job(*unfused), 0), dry_run(job, 0)
    tokens, (model, hardware) = BATCH * SEQ, flops_per_token(costs_of(job))
    assert plain.total_flops.recompute == 0
    assert run.total_flops.recompute == tokens * LAYERS * products * 2 * SEQ * DIM == tokens * (hardware - model)
    saved = plain.peak_by_component["saved"] - run.peak_by_component["saved"]
    # In float32; beside the scores each layer's mask of S x S bytes goes, and one layer's come back in backward.
    scores = 4 * job.micro_batch * job.spec.n_heads * SEQ * SEQ
    assert (LAYERS - 1) * scores <= saved and (mode == "selective" or saved <= LAYERS * (scores + SEQ * SEQ))


def test_shards_and_what_is_gathered() -> None:
    run, layer = dry_run(_job(*TWO), 0), 4 * (LAYER + 2 * DIM)
    assert run.steady["parameters"] == 4 * run.parameters
    assert run.parameters == pytest.approx(PARAMETERS / 2, rel=1e-3)
    assert run.at_peak["gathered"] == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert run.at_peak["gradients"] == 4 * PARAMETERS
    calls, sent = _sent(run, "reduce_scatter", "dp_shard")
    assert calls == LAYERS + 2  # each layer, the embeddings, the head
    assert sent == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert [c.count for c in run.collectives if (c.kind, c.bytes) == ("all_gather", layer)] == [LAYERS]


def test_zero_1_gathers_the_head_once_however_many_micro_batches() -> None:
    job = _job(*TWO, "--train.micro_batch_size", "1", "--plugins.fsdp.zero_stage", "1")
    assert job.micro_batches == 4
    assert _sent(dry_run(job, 0), "all_gather", "dp_shard")[0] == LAYERS + 2


def test_zero_3_gathers_for_every_use_and_keeps_a_unit_or_two() -> None:
    run, micro_batches = dry_run(_job(*TWO, "--plugins.fsdp.zero_stage", "3"), 0), 2
    layer = 4 * (LAYER + 2 * DIM)
    gathers = [c.count for c in run.collectives if (c.kind, c.bytes) == ("all_gather", layer)]
    assert gathers == [micro_batches * 2 * LAYERS]
    assert _sent(run, "reduce_scatter", "dp_shard")[0] == micro_batches * (LAYERS + 2)
    assert run.at_peak["gathered"] < 4 * PARAMETERS / 2 and run.steady["gathered"] == 0


def test_bf16_halves_what_is_computed_with_and_sums_in_fp32() -> None:
    full, half = (dry_run(_job(*TWO, *more), 0) for more in ((), ("--plugins.bf16.enabled", "true")))
    assert half.steady == full.steady
    assert 2 * half.at_peak["gathered"] == full.at_peak["gathered"]
    assert full.at_peak["gradients"] == 4 * PARAMETERS
    # The gradient that the head has saved in forward: cast to be summed, or from PyTorch 2.15 on added as it is.
    head, cast = VOCAB * DIM, torch_release() < (2, 15)
    assert half.at_peak["gradients"] == 4 * PARAMETERS + 2 * head * cast
    saved, halved = (run.peak_by_component["saved"] for run in (full, half))
    assert 0.45 < (halved - 2 * head * (not cast)) / (saved - 4 * head) < 0.55
    assert 2 * _sent(half, "all_gather", "dp_shard")[1] == _sent(full, "all_gather", "dp_shard")[1]
    assert _sent(half, "reduce_scatter", "dp_shard") == _sent(full, "reduce_scatter", "dp_shard")


def test_tensor_parallel_sends_eight_times_a_layer() -> None:
    run = dry_run(_job(*ONE, "--mesh.tp", "2"), 1)
    micro_batches, hidden = 4, 2 * SEQ * DIM * 4
    calls, sent = _sent(run, "all_gather", "tp")
    # Forward 2, backward 2 per layer; the head, and the embeddings' backward.
    assert calls == micro_batches * (4 * LAYERS + 2) and sent == calls * hidden
    assert run.total_flops.forward == pytest.approx(dry_run(_job(*ONE), 0).total_flops.forward / 2, rel=1e-3)
    assert run.steady["parameters"] == pytest.approx(4 * PARAMETERS / 2, rel=1e-2)


@pytest.mark.parametrize("rank", [0, 1])
def test_pipeline(rank: int) -> None:
    run = dry_run(_job(*ONE, "--mesh.pp", "2", "--train.micro_batch_size", "1"), rank)
    hidden, micro_batches = SEQ * DIM * 4, 8
    assert run.stages == (rank,)
    both = [(c.kind, c.count, c.group_size) for c in run.collectives if (c.axes, c.bytes) == ("pp", hidden)]
    assert sorted(both) == [(kind, micro_batches, 2) for kind in ("recv", "send")]
    kept = micro_batches if torch_release() < (2, 15) else 1  # torch kept a buffer for each
    assert run.at_peak["communication"] >= kept * hidden
    assert run.peak.micro_batch >= 0
    split = ("--plugins.pipeline.schedule", "ZBVZeroBubble", "--plugins.bf16.enabled", "true")
    run = dry_run(_job(*ONE, "--mesh.pp", "2", "--train.micro_batch_size", "1", *split), rank)
    assert run.stages == (rank, 3 - rank)
    assert run.peak_by_component["gradients"] >= 4 * run.parameters


def test_norms_as_on_a_gpu_save_less_and_send_the_same() -> None:
    job = _job(*ONE, "--mesh.tp", "2")
    fused, plain = dry_run(job, 0), dry_run(job, 0, fused=False)
    rows = 2 * SEQ // 2  # of a micro batch, over the ranks of tp
    assert plain.peak_by_component["saved"] >= fused.peak_by_component["saved"] + 2 * LAYERS * rows * DIM * 4
    assert (fused.collectives, fused.total_flops) == (plain.collectives, plain.total_flops)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = torch.UntypedStorage.resize_, F.rms_norm
    runs = [dry_run(_job("--mesh.dp_shard", str(ranks)), ranks - 1) for ranks in (4, 2, 4)]
    assert not dist.is_initialized()
    assert (torch.UntypedStorage.resize_, F.rms_norm) == before
    assert runs[0] == runs[2] != runs[1]
    assert torch.ones(2).sum().item() == 2
    assert list(tmp_path.iterdir()) == []


def test_ranks_in_one_process_do_not_share_shapes() -> None:
    """An uneven vocabulary gives ranks of equal meshes other shapes."""
    first, last = (dry_run(_job(*ONE, "--mesh.tp", "2"), rank) for rank in (0, 1))
    assert first.parameters - last.parameters == 2 * DIM
    for rank in (0, 3):
        assert dry_run(_job(*ONE, "--mesh.dp_shard", "2", "--mesh.tp", "2"), rank).rank == rank
    with pytest.raises(ConfigError, match="rank 2: must be from 0 to 1"):
        dry_run(_job(*TWO), 2)


def test_a_group_that_the_mesh_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "groups", lambda _: [])
    with pytest.raises(PluginError, match=r"which the mesh does not have; make it with Mesh\.flat"):
        dry_run(_job(*ONE, "--mesh.dp_shard", "2", "--mesh.tp", "2"), 0)


CONFIGS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("*.toml"))
LARGEST = ("gpt175b", "gpt1t", "llama33b", "qwen3_8b", "mixtral8x7b", "llama13b")


def _short(name: str) -> Job:
    path = Path(__file__).parents[2] / "configs" / f"{name}.toml"
    job = load_job(path)
    stages = job.layout.degree_of("layers")
    each = next((t.config.stages_per_rank for t in job.techniques if hasattr(t.config, "stages_per_rank")), 1)
    batch = job.micro_batch * job.batch_ranks * stages * min(each, 2)  # DualPipeV needs one for each of its stages
    words = ["--model.n_layers", f"{stages * each}", "--train.global_batch_size", f"{batch}"]
    if any(getattr(t.config, "split_points", None) for t in job.techniques):
        words += ["--plugins.pipeline.split_points", ""]
    return load_job(path, [*words, "--train.micro_batch_size", f"{job.micro_batch}"])


# The plugin that wraps ignores this warning, and says why; pytest starts each test with filters of its own.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", but_sweep(CONFIGS, *LARGEST))
def test_first_and_last_rank_of_each_config(name: str) -> None:
    job = _short(name)
    for rank in {0, job.layout.world_size - 1}:
        run = dry_run(job, rank)
        assert 4 * run.parameters <= run.steady["parameters"] < 4.4 * run.parameters  # uneven shards are padded
        assert run.steady["optimizer"] >= 8 * run.parameters
        assert run.peak_bytes > run.steady_bytes
        total, head = run.total_flops, run.flops.get(job.spec.head[-1])
        early = 2 * head.forward // 3 if head else 0  # the loss makes the gradients of the head in forward
        assert total.recompute > 0 and total.backward + early == 2 * (total.forward - early)
