"""Published rows: how they are read, and that the planner stays as near to them as it was."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import plan_accuracy
from bench.published import describe, keep, left_out, page, rows
from bench.published.describe import all_devices, all_fabrics, device_of, fabric_of, framework_of
from bench.published.fit import CONSTANTS, World, case_of, cases_of, get
from bench.published.reader import costs_of, layout_of, padded
from bench.published.report import (
    UNEXPLAINED,
    by_group,
    memory,
    of_others,
    out_of_memory,
    ranked,
    results,
    spearman,
    sweeps,
)
from bench.published.rows import Skip, load, measured, read
from bench.published.state import as_held, as_reserved, recompute_of, stages_of
from titan.contracts.base.cost import Attention, Elementwise
from titan.planner.machine import cluster as clusters
from titan.planner.step.predict import Planner

GPT: dict[str, Any] = {
    "id": "g", "layers": 48, "hidden": 4096, "heads": 32, "seq_len": 2048, "vocab": 50257, "gpu": "A100-SXM-80GB",
    "gpu_mem_gb": 80, "n_gpus": 64, "tp": 4, "pp": 4, "mbs": 2, "gbs": 256, "recompute": "full", "precision": "fp16",
    "framework": "Megatron-LM 6985e58", "step_time_s": 10.0, "source": "a paper",
}  # fmt: skip


def row(**changed: Any) -> dict[str, Any]:
    """A row of a GPT on 64 devices; None: not stated."""
    return {key: value for key, value in {**GPT, **changed}.items() if value is not None}


def test_what_a_row_does_not_say_follows_from_the_rest() -> None:
    job = read(row())
    assert (job.dp, job.micro_batches, job.chunks, job.kv_heads, job.ffn) == (4, 32, 1, 32, 16384)
    assert job.global_batch == 256 and job.guessed == ("vpp",)
    assert read(row(mbs=None, grad_accum=8)).micro_batch == 8


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"layers": None}, "not stated: layers"),
        ({"n_gpus": 60}, "60 ranks are not a multiple"),
        ({"mbs": None}, "not stated: micro batches"),
        ({"pp": 16, "vpp": 8, "n_gpus": 64, "layers": 40}, r"more stages \(16 x 8\) than layers \(40\)"),
        ({"hidden": 1e9}, "exceeds the plausible maximum 200000"),
        ({"gpu": "TPU v4"}, "no cluster file for TPU v4"),
        ({"precision": "NVFP4"}, "no cluster file has a peak for nvfp4"),
        ({"precision": "fp8"}, "a100-80gb has no peak for float8"),
        ({"schedule": "ZB-2p"}, "schedule zb-2p"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(Skip, match=why):
        case_of(row(**changed))


def test_heads_that_are_not_stated_can_be_shared_by_the_ranks_of_a_layer() -> None:
    unsaid = {"hidden": 13824, "heads": None, "kv_heads": None, "n_gpus": 32, "gbs": None}
    assert read(row(**unsaid, tp=1)).heads == 108
    assert read(row(**unsaid, tp=8)).heads == 96


def test_rows_of_another_kind_are_listed_not_raised() -> None:
    cases, skipped = cases_of([row(), row(id="bad", extra="text", layers="many"), row(id="odd", precision=[])])
    assert [case.id for case in cases] == ["g", "odd"]
    assert skipped == {"bad": "not stated: layers"}


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [
        ({"step_time_s": 3.5}, 3.5),
        ({"tokens_per_s_per_gpu": 1000}, 256 * 2048 / 64000),
        ({"tokens_per_s": 1000}, 256 * 2.048),
        ({"samples_per_s": 8}, 32.0),
        ({}, None),
    ],
)
def test_times_are_worked_out_from_rates(stated: dict[str, float], seconds: float | None) -> None:
    described = row(step_time_s=None, **stated) if "step_time_s" not in stated else row(**stated)
    assert measured(described, read(described)) == seconds


def test_hardware_flops_count_the_layers_four_times() -> None:
    described = row(step_time_s=None, tflops_per_gpu=100, tflops_kind="hardware")
    layer = 2 * 12 * 4096**2 + 4 * 2048 * 4096
    flops = (4 * 48 * layer + 6 * 4096 * 50257) * 256 * 2048
    assert measured(described, read(described)) == pytest.approx(flops / 64 / 100e12)


@pytest.mark.parametrize(
    ("said", "gb_s", "name"),
    [
        ("NVLink in node; 4 Omni-Path links per node", 6.25, "Omni-Path 4 x 100 Gb/s"),
        ("4x100Gb RoCE per node", 6.25, "RoCE 4 x 100 Gb/s"),
        ("1600Gbps RoCE node-node", 25.0, "RoCE 8 x 200 Gb/s"),
        ("NVLink; 400Gb/s per GPU", 50.0, "InfiniBand"),
        ("", 25.0, "InfiniBand"),
    ],
)
def test_bandwidths_are_those_that_a_row_states(said: str, gb_s: float, name: str) -> None:
    described = row(interconnect=said)
    assert fabric_of(described, read(described), "a100-80gb") == (name, gb_s)


def test_devices_and_frameworks_are_found_by_what_rows_call_them() -> None:
    megatron = framework_of(row())
    assert megatron.blocking_p2p and not megatron.flash
    assert device_of(row(), megatron) == "a100-80gb"
    assert device_of(row(gpu="A100-40GB", gpu_mem_gb=40), megatron) == "a100-40gb"
    nemo = framework_of(row(framework="NeMo 24.07"))
    assert device_of(row(gpu="H100"), nemo) == "h100-cudnn" and device_of(row(gpu="H100"), megatron) == "h100"
    assert framework_of(row(framework="torchtitan FSDP2 +torch.compile")).compiled
    assert framework_of(row(framework=None)).name == "any other"


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


def test_ends_count_as_layers_where_only_that_divides() -> None:
    costs = costs_of(read(row(layers=70, pp=12, tp=4, n_gpus=48, gbs=64)), framework_of(row()))
    assert [len(stage.layers) for stage in costs.stages] == [5, *[6] * 10, 5]


@pytest.mark.parametrize(
    ("cut", "layers"),
    [("even", [7, 7, 6, 7]), ("first", [7, 7, 7, 6]), ("last", [6, 7, 7, 7]), ("products", [8, 7, 7, 5])],
)
def test_layers_are_cut_as_the_framework_cuts_them(cut: str, layers: list[int]) -> None:
    stages, _ = stages_of(read(row(layers=27)), cut)
    assert [len(stage.layers) for stage in stages] == layers
    assert [layer for stage in stages for layer in stage.layers] == list(range(27))


def test_a_job_has_the_stages_of_its_framework() -> None:
    described = row(layers=27, framework="Megatron-DeepSpeed")
    costs = costs_of(read(described), framework_of(described))
    assert [len(stage.layers) for stage in costs.stages] == [7, 7, 7, 6]


def test_scores_of_a_layer_that_is_computed_again_are_not_reserved_for_them_alone() -> None:
    for recompute, kept in (("full", 1), (None, 2)):
        described = row(framework="Megatron-DeepSpeed", recompute=recompute)
        job, framework = read(described), framework_of(described)
        reserved = as_reserved(job, framework, as_held(job, framework, costs_of(job, framework)))
        assert [len(op.saved) for op in reserved.layer if isinstance(op, Attention)] == [kept]


def test_products_in_float8_are_computed_again_where_only_wider_ones_are_saved() -> None:
    for precision, products in (("bf16", [4096, 4096, 16384]), ("bf16+float8 linear", [])):
        described = row(
            precision=precision, framework="torchtitan FSDP2", recompute="selective op", pp=1, tp=1, gpu="H100"
        )
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
    described = row(**INTERNEVO, recompute=recompute)
    costs = costs_of(read(described), framework_of(described))
    norms = [op for op in costs.layer if isinstance(op, Elementwise) and op.module == "norm"]
    assert [(op.forward, op.backward) for op in norms] == [(6 * 4096, backward * 4096)] * 2


@pytest.mark.parametrize(("gated", "sums"), [(True, 3), (False, 2)])
def test_gate_and_up_of_their_own_sum_their_gradients_each(gated: bool, sums: int) -> None:
    described = row(**{**INTERNEVO, "gated_mlp": gated})
    traffic = costs_of(read(described), framework_of(described)).collectives
    inside = {t.when: t.count for t in traffic if t.axes == ("tp",) and t.where == "layer"}
    assert (inside["forward"], inside["backward"]) == (2, sums)


def test_a_source_left_out_is_told_with_and_without_its_unexplained_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ("plain", next(iter(UNEXPLAINED)))
    cases = [case_of(row(id=name, step_time_s=seconds)) for name, seconds in zip(ids, (10.0, 20.0), strict=True)]
    monkeypatch.setattr(left_out, "fit", lambda others, **how: {})
    told = left_out._without([], cases, {})
    seconds = World().seconds(cases[0])
    assert told["n"] == 2 and told["explained"]["n"] == 1
    assert told["explained"]["mean"] == pytest.approx(abs(seconds / 10 - 1))


def bytes_held(**changed: Any) -> dict[str, float]:
    """Bytes a parameter that a row's rank holds, by component."""
    described = row(**changed)
    return {part.component: part.bytes_per_param for part in costs_of(read(described), framework_of(described)).state}


def test_state_is_what_the_framework_holds() -> None:
    deepspeed: dict[str, Any] = {"framework": "Megatron-DeepSpeed"}
    assert bytes_held(**deepspeed, zero_stage=1)["optimizer"] == 16
    assert bytes_held(**deepspeed, zero_stage=0)["optimizer"] == 20
    assert bytes_held(**deepspeed, precision="bf16")["gradients"] == 6
    assert bytes_held(**deepspeed, precision="bf16 (fp32 grad accumulation)")["gradients"] == 6.3
    assert bytes_held(framework="nanotron", precision="bf16")["gradients"] == 6
    assert bytes_held(framework="nanotron", precision="bf16", n_gpus=16, gbs=64)["gradients"] == 4
    assert bytes_held(framework="InternEvo", precision="bf16", zero_stage=1)["optimizer"] == 26


def test_figures_count_what_they_say() -> None:
    def figure(**changed: Any) -> tuple[float, str, bool]:
        (case,), _ = cases_of([row(recompute=None, **changed)])
        return memory(case, World())

    nanotron: dict[str, Any] = {"framework": "nanotron", "precision": "bf16", "mem_kind": "GB"}
    first, everything = figure(**nanotron), figure(**nanotron | {"framework": "nothing known"})
    assert first[1] == "rank 0, reserved by PyTorch" and everything[1] == "as printed"
    full = figure(framework="Megatron-DeepSpeed", mem_kind="nvidia-smi", tp=1, pp=1)
    assert full == (World().devices["a100-80gb"].device.memory_gib, "whole process", False)


def test_errors_of_other_frameworks_are_those_of_all_but_whole_processes() -> None:
    rows_ = [row(mem_gb=40, mem_kind=kind) for kind in ("nvidia-smi", "max reserved", "as printed")]
    found = results(cases_of(rows_)[0], World())
    errors = [abs(r.memory_error or 0.0) for r in found[1:]]
    assert of_others(found)["n"] == 2 and of_others(found)["mean"] == pytest.approx(sum(errors) / 2)


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


def test_ranks_correlate_as_spearman_has_it() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    # d = (0, 1, 1, 0): 1 - 6 * 2 / (4 * 15)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)


def test_a_sweep_is_rows_that_differ_in_layout_and_its_choice_is_judged() -> None:
    table = [
        row(id=f"g{tp}", tp=tp, pp=16 // tp, step_time_s=seconds, complete_time="A")
        for tp, seconds in ((2, 11.0), (4, 10.0), (8, 12.0))
    ]
    found = results(cases_of([*table, row(id="alone", layers=40)])[0], World())
    (named,) = sweeps(found).values()
    assert [r.case.id for r in named] == ["g2", "g4", "g8"]
    of = ranked(named)
    best = min(named, key=lambda r: r.seconds)
    assert of["lost"] == pytest.approx(1 - 10.0 / (best.case.seconds or 0))
    assert of["apart"] == 3
    by_rank = sorted(named, key=lambda r: r.case.seconds or 0)
    assert of["right"] == sum(a.seconds < b.seconds for i, a in enumerate(by_rank) for b in by_rank[i + 1 :])


def test_runs_out_of_memory_are_called() -> None:
    rows_ = [row(id="fits"), row(id="not", tp=2, pp=1, outcome="OOM"), row(id="fine", outcome="ok")]
    told = out_of_memory(results(cases_of(rows_)[0], World()))
    assert (told["out"], told["called"], told["ran"], told["false"]) == (1, 1, 1, [])


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda c: c.name)
def test_a_constant_is_what_it_was_set_to(constant: Any) -> None:
    middle = (constant.low + constant.high) / 2
    world = World({constant: middle})
    assert get(constant, world) == middle != get(constant, World())
    assert constant.low <= get(constant, World()) <= constant.high


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the files that describe devices and fabrics, which is what is read and written meanwhile."""
    own, whole = tmp_path / "bench" / "published", describe.FOLDER.parents[1] / "configs"
    shutil.copytree(describe.FOLDER, own, ignore=shutil.ignore_patterns("*.py", "*.jsonl", "__pycache__"))
    shutil.copytree(whole, tmp_path / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    with monkeypatch.context() as patch:
        patch.setattr(describe, "FOLDER", own)
        describe.reread()
        yield tmp_path
    describe.reread()


def test_fitted_constants_are_put_where_they_are_read_and_nothing_else_changes(copied: Path) -> None:
    files = sorted(copied.rglob("*.toml"))
    before = [file.read_text() for file in files]
    values = {c: round(c.low + (c.high - c.low) * (i + 1) / (len(CONSTANTS) + 2), 3) for i, c in enumerate(CONSTANTS)}
    keep.write(values)
    world = World()
    assert [get(c, world) for c in CONSTANTS] == pytest.approx(list(values.values()), rel=1e-3)
    launch = next(c for c in CONSTANTS if c.where == "kernels.launch_us")
    assert {world.devices[name].kernels.launch_us for name in launch.lent} == {
        world.devices["a100-80gb"].kernels.launch_us
    }
    between = next(c for c in CONSTANTS if c.where == "fabric.InfiniBand.efficiency")
    assert world.devices["b200"].links[1].efficiency == pytest.approx(values[between], rel=1e-3)
    numbers = re.compile(r"(?m)= [\d.]+$")
    after = [file.read_text() for file in files]
    assert [numbers.sub("", text) for text in after] == [numbers.sub("", text) for text in before] and after != before


def test_the_files_hold_what_the_kept_fit_says(copied: Path) -> None:
    before = [file.read_text() for file in sorted(copied.rglob("*.toml"))]
    keep.write(keep.kept(json.loads(plan_accuracy.FITTED.read_text())["constants"]))
    assert [file.read_text() for file in sorted(copied.rglob("*.toml"))] == before


def test_a_file_without_a_place_for_a_constant_is_named() -> None:
    with pytest.raises(ValueError, match=r"a\.toml: \[kernels\] 0 has no odd"):
        keep.replaced("[kernels]\nbandwidth = 0.5\n", "[kernels]\n", 0, "odd", "0.1", "a.toml")


def test_no_constant_is_keyed_on_a_source() -> None:
    names = {*all_devices(), *all_fabrics()}
    for constant in CONSTANTS:
        assert set(constant.devices) <= names
        assert constant.devices or constant.where.split(".")[1] in names


def test_the_planner_is_as_near_to_published_runs_as_it_was() -> None:
    """Means of grade A rows of the copy that comes along; what they are is in docs/validation.md."""
    cases, _ = cases_of(load(rows.OWN))
    groups = by_group(results(cases, World()))
    worst = {
        "A100, tp or pp above 1": 0.035,
        "A100, data parallel alone (FSDP, ZeRO)": 0.035,
        "H100, bf16": 0.06,
        "fp8": 0.12,
    }
    for name, most in worst.items():
        assert groups[name]["n"] > 8
        assert groups[name]["mean"] < most, name


def test_the_command_runs_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, (row(complete_time="A"), {"id": "empty"}, row(id="o", extra=None)))))
    assert plan_accuracy.main(["--rows", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == 3 and list(told["skipped"]) == ["empty"] and told["groups"]["all"]["n"] == 2
    assert plan_accuracy.main(["--rows", str(file)]) == 0
    assert "# Validation" in capsys.readouterr().out
    assert plan_accuracy.main(["--rows", str(tmp_path / "none")]) == 2


def test_the_page_says_first_that_its_main_table_is_in_sample_and_is_the_generators() -> None:
    text = plan_accuracy.PAGE.read_text()
    first = " ".join(text.split("\n\n")[1].split())
    assert "is in-sample" in first and "For an unseen cluster, use the leave-one-source-out table" in first
    assert text.index("## Step time of an unseen source") < text.index("## Step time\n")
    for part in (page.INTRO, page.LEFT_OUT, page.LEFT_OUT_LIMITS, page.SWEEPS, page.MEMORY, page.WHY, page.CONSTANTS):
        assert part in text


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
    assert none - core == pytest.approx(
        5 * job.heads * job.seq_len * tokens / job.tp * (layers * under_way - 1), rel=0.02
    )


def test_a_newer_megatron_is_not_that_of_2021() -> None:
    older, newer = (framework_of(row(framework=f"Megatron-LM {which}")) for which in ("6985e58", "(arXiv 2205.05198)"))
    assert "2021" in older.name and "2022" in newer.name
    wide = row(framework="Megatron-LM", precision="bf16")
    by_state = {state.component: state for state in costs_of(read(wide), framework_of(wide)).state}
    # The product of the weights adds to float32 gradients; no gradient of a micro batch stays beside them.
    assert by_state["gradients"].bytes_per_param == 4 and by_state["optimizer"].bytes_per_param == 12
    before, after = (World().seconds(case_of(row(framework=f"Megatron-LM {which}"))) for which in ("6985e58", "v3"))
    assert after < before


def test_sums_of_gradients_overlap_and_slices_of_inputs_are_gathered_again() -> None:
    stated = row(framework="Megatron-LM", seq_parallel=True)
    found = [cost for cost in costs_of(read(stated), framework_of(stated)).collectives if cost.where == "layer"]
    backward = [(cost.collective, cost.count, cost.overlaps) for cost in found if cost.when == "backward"]
    assert sorted(backward) == [("all_gather", 2, False), ("all_gather", 2, True), ("reduce_scatter", 2, True)]
    assert not any(cost.overlaps for cost in found if cost.when != "backward")


TITAN: dict[str, Any] = {
    "framework": "torchtitan FSDP2 +torch.compile", "gpu": "H100-SXM-80GB", "layers": 32, "hidden": 4096, "ffn": 14336,
    "gated_mlp": True, "kv_heads": 8, "seq_len": 8192, "vocab": 128256, "n_gpus": 8, "tp": None, "pp": None, "mbs": 1,
    "gbs": 8, "zero_stage": 3, "recompute": "selective op", "precision": "bf16",
}  # fmt: skip


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
        *attention, (8192, "seq_full", 0), (18432, "tp_sharded", 0)
    ]  # fmt: skip
    assert saved(tp=2, n_gpus=16, seq_parallel=True)[-1] == (8192, "hidden", 0)
    assert held_by(recompute="full") < held_by(precision="bf16+float8 linear") < held_by() < held_by(recompute="none")


def test_state_and_gradients_are_sharded_over_context_parallelism_too() -> None:
    def state(cp: int) -> list[float]:
        case = case_of(row(**{**TITAN, "cp": cp, "gbs": 8 // cp, "seq_len": 8192 * cp, "recompute": "full"}))
        memory = World().planner(case).draft(case.costs, case.layout).memory()[0]
        return [memory.parameters, memory.gradients, memory.optimizer]

    assert state(8) == state(2) == state(1)
    costs = case_of(row(**{**TITAN, "cp": 8, "gbs": 1})).costs
    assert {cost.axes for cost in costs.collectives if cost.where == "unit" and cost.collective != "all_reduce"} == {
        ("dp_shard", "cp")
    }


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
