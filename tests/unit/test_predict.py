"""Predictions against what can be worked out by hand, and the command that prints them."""

import json
from dataclasses import replace

import pytest

from tests.planned import CLUSTER, TOML, job_of, predicted
from titan.cli import main
from titan.contracts.base.cost import Recompute
from titan.planner.machine.network import Group
from titan.planner.report.render import prediction_text
from titan.planner.step.layout import costs_of, group_of
from titan.planner.step.predict import Planner

PIPELINE = ("--mesh.pp", "2", "--train.micro_batch_size", "1")

LAYOUTS = [
    (),
    ("--mesh.dp_shard", "4"),
    ("--mesh.tp", "4"),
    ("--mesh.dp_replicate", "2", "--mesh.dp_shard", "2", "--train.micro_batch_size", "1"),
    PIPELINE,
    (*PIPELINE, "--plugins.pipeline.schedule", "ZBVZeroBubble", "--mesh.tp", "2"),
    (*PIPELINE, "--plugins.activation_checkpoint.mode", "full", "--mesh.dp_shard", "2"),
    ("--plugins.bf16.enabled", "true", "--plugins.activation_checkpoint.mode", "selective", "--mesh.tp", "2"),
]


@pytest.mark.parametrize("words", LAYOUTS, ids=" ".join)
def test_the_parts_of_a_step_add_up(words: tuple[str, ...]) -> None:
    p = predicted(*words)
    assert sum(p.time_s.values()) == pytest.approx(p.step_time_s, rel=1e-9)
    assert min(p.time_s.values()) >= -1e-12
    job = job_of(*words)
    assert p.tokens == job.tokens_per_step
    model = job.spec.flops_per_token(job.data.seq_len) * p.tokens / p.step_time_s / p.world_size / 1e12
    assert p.model_tflops_per_device == pytest.approx(model, rel=1e-9)
    assert p.hardware_tflops_per_device >= p.model_tflops_per_device


def test_the_bubble_of_equal_stages_is_the_textbooks() -> None:
    """(p - 1) / m of the work (arXiv 1811.06965), here with nothing to send."""
    job = job_of("--mesh.pp", "4", "--train.micro_batch_size", "1", "--train.global_batch_size", "16")
    costs = costs_of(job)
    bare = replace(costs, embeddings=(), head=(), collectives=(), dim=0, update_bytes=0.0)
    p = Planner(CLUSTER).draft(bare, job.layout).finish(memory=())
    assert p.time_s["bubble"] / (p.step_time_s - p.time_s["bubble"]) == pytest.approx(3 / 16, rel=1e-3)
    assert p.bubble_fraction == pytest.approx(3 / (16 + 3), rel=1e-3)


def test_full_recompute_is_another_forward_but_for_the_last_product() -> None:
    job = job_of()
    each = (None, Recompute(), Recompute(full_layer=True), Recompute(every=2, full_layer=True))
    plain, stops, whole, half = (
        Planner(CLUSTER).predict(replace(costs_of(job), recompute=recompute), job.layout) for recompute in each
    )
    layers = whole.time_s["recompute"]
    assert plain.time_s["recompute"] == 0
    assert half.time_s["recompute"] == pytest.approx(layers / 2, rel=1e-9)
    assert 0.6 * layers < stops.time_s["recompute"] < layers
    layer_flops = job.spec.layer_flops_per_token(64) * job.spec.n_layers
    ratio = 1 + layer_flops / job.spec.flops_per_token(64)
    assert whole.hardware_tflops_per_device / whole.model_tflops_per_device == pytest.approx(ratio, rel=1e-9)


def test_collectives_take_their_bytes_over_the_slowest_link() -> None:
    mesh = job_of("--mesh.pp", "2", "--mesh.dp_shard", "2", "--mesh.tp", "2", "--train.micro_batch_size", "1").layout
    found = {axis: group_of([axis], mesh) for axis in ("tp", "dp_shard", "pp")}
    assert found == {"tp": Group(2, 1), "dp_shard": Group(2, 2), "pp": Group(2, 4)}
    network, gigabyte = Planner(CLUSTER).network, 1e9
    inner = group_of(["tp"], job_of("--mesh.tp", "4").layout)
    outer = group_of(["dp_shard"], job_of("--mesh.dp_shard", "8").layout)
    assert network.collective("all_gather", inner, gigabyte) == pytest.approx(3 / 4 / 100)
    assert network.collective("all_reduce", inner, gigabyte) == pytest.approx(2 * 3 / 4 / 100)
    # Two nodes of four ranks: all four drive their links of 10 GB/s.
    assert network.collective("all_gather", outer, gigabyte) == pytest.approx(7 / 8 / 40)


def test_joining_slices_takes_its_time_at_each_collective() -> None:
    job = job_of("--mesh.tp", "2")
    slow = replace(CLUSTER, kernels=replace(CLUSTER.kernels, tp_overhead_us=100.0))
    plain, joined = (Planner(cluster).predict(costs_of(job), job.layout) for cluster in (CLUSTER, slow))
    # Two gathers and two reductions per layer each way; one of each for embeddings and head together, each way.
    collectives = job.micro_batches * (8 * job.spec.n_layers + 4)
    assert joined.time_s["tp"] - plain.time_s["tp"] == pytest.approx(collectives * 100e-6)
    assert joined.step_time_s - plain.step_time_s == pytest.approx(collectives * 100e-6)


def test_gathering_shards_takes_its_time_at_each_collective() -> None:
    shown = replace(CLUSTER, kernels=replace(CLUSTER.kernels, overlap_slowdown=1.0))
    slow = replace(shown, kernels=replace(shown.kernels, fsdp_overhead_us=100.0))
    for words, each, kept in (
        (["--mesh.dp_shard", "2", "--plugins.fsdp.zero_stage", "3"], 3, 1),
        (["--mesh.dp_shard", "2", "--plugins.fsdp.zero_stage", "1"], 2, 0),
        (["--mesh.dp_replicate", "2"], 0, 0),
        (["--plugins.bf16.enabled", "true"], 0, 0),  # sharded over one rank
    ):
        job = job_of(*words)
        plain, gathered = (Planner(cluster).predict(costs_of(job), job.layout) for cluster in (shown, slow))
        # Units are embeddings, layers and head; the last one stays gathered for its backward.
        collectives = job.micro_batches * (each * (job.spec.n_layers + 2) - kept)
        assert gathered.time_s["dp"] - plain.time_s["dp"] == pytest.approx(collectives * 100e-6)


def test_energy_and_price() -> None:
    p, waiting = predicted(), predicted(*PIPELINE)
    assert p.energy_j == pytest.approx(400 * p.step_time_s)
    assert p.price == pytest.approx(3.6 * p.step_time_s / 3600)
    assert waiting.energy_j < 2 * 400 * waiting.step_time_s


def test_the_command_prints_what_scripts_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(TOML), "--mesh.pp", "2", "--train.micro_batch_size", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    told = {"world_size", "step_time_s", "tokens_per_s"}
    told |= {"tokens_per_s_per_device", "mfu", "hfu", "bubble_fraction", "fits"}
    told |= {"model_tflops_per_device", "hardware_tflops_per_device", "time_s", "stages"}
    assert set(report) >= told
    keys = {"forward", "backward", "recompute", "tp", "cp", "ep", "dp", "worker", "pp", "bubble", "optimizer"}
    assert set(report["time_s"]) == keys
    assert sum(report["time_s"].values()) == pytest.approx(report["step_time_s"])
    assert [stage["layers"] for stage in report["stages"]] == [[[0, 1]], [[2, 3]]]
    memory = report["stages"][0]["memory_gib"]
    total = memory.pop("total")
    assert set(memory) == {"parameters", "gradients", "optimizer", "activations", "buffers", "cached", "overhead"}
    assert sum(memory.values()) == pytest.approx(total)


def test_a_budget_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(TOML), "--tokens", "5.12e6", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    steps = 5.12e6 / (8 * 64)
    assert report["budget"]["device_hours"] == pytest.approx(steps * report["step_time_s"] / 3600)
    assert report["budget"]["energy_mwh"] == pytest.approx(steps * report["energy_j"] / 3.6e9)
    assert main(["plan", "--config", str(TOML), "--tokens", "-1"]) == 2
    assert "--tokens -1: must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "a100-80"], "a100-80: no such file or cluster (did you mean 'a100-80gb'?)"),
        (["--cluster", "v100-32gb", "--plugins.bf16.enabled", "true"], "has no bfloat16 (it has float32, float16)"),
        (["--dry-run", "--rank", "1"], "--rank 1: the layout has ranks 0 to 0"),
        (["--rank", "0"], "--rank: no rank is built; add --dry-run"),
        (["--dry-run", "--plot", "a.png"], "--plot: only one predicted job or a study is plotted"),
        (["--search", "--tokens", "1e9"], "--tokens: only one predicted job and --formulas say what tokens take"),
        (["--objective", "price"], "--objective: no layout is searched; add --search"),
        (["--devices", "8"], "--devices: the ranks of a layout are counted by --world-size; add --formulas"),
        (["--formulas", "--world-size", "8"], "--world-size: closed-form estimates count --devices"),
        (["--search", "--top", "0"], "command line: --top 0: must be at least 1"),
        (["--search", "--world-size", "0"], "command line: --world-size 0: must be at least 1"),
        (["--study", "weak-scaling", "--world-size", "0"], "command line: --world-size 0: must be at least 1"),
    ],
)
def test_wrong_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(TOML), *words]) == 2
    assert said in capsys.readouterr().err


def test_the_table_says_that_a_job_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "llama65b.toml", "--mesh.dp_shard", "1", "--mesh.tp", "1", "--mesh.pp", "1"]) == 0
    assert "does NOT fit" in capsys.readouterr().out


@pytest.mark.parametrize(("share", "warned"), [(0.94, False), (0.96, True)])
def test_the_table_warns_of_a_peak_above_the_limit_of_a_search(share: float, warned: bool) -> None:
    prediction = predicted()
    device = replace(CLUSTER.device, memory_gib=prediction.peak_gib / share)
    text = prediction_text(prediction, replace(CLUSTER, device=device), "", None)
    assert "\nfits: peak " in text and ("\nwarning: less than 5 % of the memory is free" in text) == warned
