"""Published rows: how they are read, and that the planner stays as near to them as it was."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import plan_accuracy
from bench.published import describe, keep, left_out, page, rows
from bench.published.describe import all_devices, all_fabrics, device_of, fabric_of, framework_of
from bench.published.fit import CONSTANTS, World, case_of, cases_of, get
from bench.published.report import UNEXPLAINED, by_group, memory, of_others, out_of_memory, ranked, spearman, sweeps
from bench.published.report import results as results_of
from bench.published.rows import Skip, load, measured, read
from tests.published import row


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
    described = row(**{"step_time_s": None, **stated})
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
    assert device_of(row(gpu="H100"), nemo) == "h100-cudnn" and device_of(row(gpu="H100"), megatron) == "h100-flash2"
    assert framework_of(row(framework="torchtitan FSDP2 +torch.compile")).compiled
    assert framework_of(row(framework=None)).name == "any other"


def test_a_source_left_out_is_told_with_and_without_its_unexplained_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ("plain", next(iter(UNEXPLAINED)))
    cases = [case_of(row(id=name, step_time_s=seconds)) for name, seconds in zip(ids, (10.0, 20.0), strict=True)]
    monkeypatch.setattr(left_out, "fit", lambda others, **how: {})
    told = left_out._without([], cases, {})
    seconds = World().seconds(cases[0])
    assert told["n"] == 2 and told["explained"]["n"] == 1
    assert told["explained"]["mean"] == pytest.approx(abs(seconds / 10 - 1))


def test_figures_count_what_they_say() -> None:
    def figure(**changed: Any) -> tuple[float, str, bool]:
        return memory(case_of(row(recompute=None, **changed)), World())

    nanotron: dict[str, Any] = {"framework": "nanotron", "precision": "bf16", "mem_kind": "GB"}
    first, everything = figure(**nanotron), figure(**nanotron | {"framework": "nothing known"})
    assert first[1] == "rank 0, reserved by PyTorch" and everything[1] == "as printed"
    full = figure(framework="Megatron-DeepSpeed", mem_kind="nvidia-smi", tp=1, pp=1)
    assert full == (World().devices["a100-80gb"].device.memory_gib, "whole process", False)
    kinds = ("nvidia-smi", "max reserved", "as printed")
    found = results_of([case_of(row(mem_gb=40, mem_kind=kind)) for kind in kinds], World())
    errors = [abs(r.memory_error or 0.0) for r in found[1:]]
    assert of_others(found)["n"] == 2 and of_others(found)["mean"] == pytest.approx(sum(errors) / 2)


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
    found = results_of(cases_of([*table, row(id="alone", layers=40)])[0], World())
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
    told = out_of_memory(results_of(cases_of(rows_)[0], World()))
    assert (told["out"], told["called"], told["ran"], told["false"]) == (1, 1, 1, [])


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda c: c.name)
def test_a_constant_is_what_it_was_set_to_and_keyed_on_no_source(constant: Any) -> None:
    middle = (constant.low + constant.high) / 2
    assert get(constant, World({constant: middle})) == middle != get(constant, World())
    assert constant.low <= get(constant, World()) <= constant.high
    names = {*all_devices(), *all_fabrics()}
    assert set(constant.devices) <= names
    assert constant.devices or constant.where.split(".")[1] in names


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
    keep.write(keep.kept(json.loads(plan_accuracy.FITTED.read_text())["constants"]))
    assert [file.read_text() for file in files] == before, "the files hold what the kept fit says"
    values = {c: round(c.low + (c.high - c.low) * (i + 1) / (len(CONSTANTS) + 2), 3) for i, c in enumerate(CONSTANTS)}
    keep.write(values)
    world = World()
    assert [get(c, world) for c in CONSTANTS] == pytest.approx(list(values.values()), rel=1e-3)
    launch = next(c for c in CONSTANTS if c.where == "kernels.launch_us")
    lent = {world.devices[name].kernels.launch_us for name in launch.lent}
    assert lent == {world.devices["a100-80gb"].kernels.launch_us}
    between = next(c for c in CONSTANTS if c.where == "fabric.InfiniBand.efficiency")
    assert world.devices["b200"].links[1].efficiency == pytest.approx(values[between], rel=1e-3)
    numbers = re.compile(r"(?m)= [\d.]+$")
    after = [file.read_text() for file in files]
    assert [numbers.sub("", text) for text in after] == [numbers.sub("", text) for text in before] and after != before


def test_a_file_without_a_place_for_a_constant_is_named() -> None:
    with pytest.raises(ValueError, match=r"a\.toml: \[kernels\] 0 has no odd"):
        keep.replaced("[kernels]\nbandwidth = 0.5\n", "[kernels]\n", 0, "odd", "0.1", "a.toml")


def test_the_planner_is_as_near_to_published_runs_as_it_was() -> None:
    """Means of grade A rows of the copy that comes along; what they are is in docs/validation.md."""
    cases, _ = cases_of(load(rows.OWN))
    groups = by_group(results_of(cases, World()))
    worst = {"A100, tp or pp above 1": 0.035, "A100, data parallel alone (FSDP, ZeRO)": 0.035}
    for name, most in {**worst, "H100, bf16": 0.06, "fp8": 0.12}.items():
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
