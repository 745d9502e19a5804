"""The formulas of courses and papers against the figures these print, and against the exact count of the models."""

import json
import math
from typing import Any

import pytest

from bench import arithmetic as published
from titan.config import Job, load_job
from titan.contracts import Model
from titan.contracts.base.cost import PersistentState
from titan.contracts.plugin import registry
from titan.errors import ConfigError
from titan.planner.report import closed_form
from titan.planner.step import arithmetic
from titan.plugins.models import gpt, llama

MODELS: list[type[Model]] = [gpt.Gpt, llama.Llama]
PRESETS = [pytest.param(m, preset, id=f"{m.name}-{preset}") for m in MODELS for preset in m.presets]


def alone(name: str, preset: str, *words: str) -> Job:
    return closed_form.alone(["--model.name", name, "--model.preset", preset, *words])


@pytest.fixture(scope="module")
def gpt3() -> Job:
    return alone("gpt", "175b")


@pytest.mark.parametrize(("model", "preset"), PRESETS)
def test_parts_add_up(model: type[Model], preset: str) -> None:
    spec = model(model.Config(**model.presets[preset])).spec()
    parts = arithmetic.parts(spec)
    assert sum(parts.values()) == spec.params
    assert min(parts.values()) >= 0
    assert parts["head"] == (0 if spec.tied else spec.vocab_size * spec.dim)


def test_parameters_of_gpt3(gpt3: Job) -> None:
    spec = gpt3.spec
    assert spec.params == 174_604_259_328
    textbook = arithmetic.textbook_parameters(96, 12288, 50257)
    assert textbook == 175_181_291_520
    # What the textbook counts twice and leaves out is the whole of the difference.
    parts = arithmetic.parts(spec)
    left_out = parts["layers: norms and biases"] + parts["positions"] + parts["last norm"]
    assert textbook - 50257 * 12288 + left_out == spec.params
    assert arithmetic.megatron_parameters(96, 12288, 50257, 2048) == pytest.approx(spec.params - 2 * 12288, abs=1)


@pytest.mark.parametrize(
    ("preset", "billions"), [("frontier-22b", 22.07), ("frontier-175b", 174.62), ("frontier-1t", 1008.04)]
)
def test_parameters_of_frontier(preset: str, billions: float) -> None:
    spec = alone("gpt", preset).spec
    assert spec.params / 1e9 == pytest.approx(billions, abs=0.005)
    assert spec.params == pytest.approx(12 * spec.n_layers * spec.dim**2, rel=0.02)


@pytest.mark.parametrize(("preset", "row"), [*zip(("7b", "13b", "33b", "65b"), published.LLAMA, strict=True)])
def test_parameters_of_llama(preset: str, row: Any) -> None:
    assert alone("llama", preset).spec.params == row.params


def test_zero_is_the_papers_figure_and_saves_nothing_on_one_rank() -> None:
    # arXiv 1910.02054, figure 1: 7.5e9 parameters over 64 ranks.
    assert [round(size / 1e9, 1) for size in arithmetic.zero_bytes(7.5e9, 64)] == [120, 31.4, 16.6, 1.9]
    for name, recipe in arithmetic.RECIPES.items():
        assert set(arithmetic.zero_bytes(10, 1, recipe)) == {10 * sum(recipe)} == {10 * int(name)}


def test_frontiers_table_adds_to_18_and_prints_20() -> None:
    for billions, rows, printed in published.FRONTIER:
        assert (sum(rows), printed) == (18 * billions, 20 * billions)
        assert sum(arithmetic.RECIPES["20"]) * billions == printed


def test_opengptx_divides_the_optimizer_twice() -> None:
    assert published.opengptx() == pytest.approx(56.875)
    assert round(published.opengptx() / 4) == 14
    strict = arithmetic.zero_bytes(13e9 / 4, 8)
    assert strict[1] / 1e9 == pytest.approx(17.875)
    # The strict number has the optimizer over all 32 already; 14 GB has it over 128.
    over_128 = strict[1] / 1e9 - 12 * 13 / 32 + 12 * 13 / 128
    assert over_128 == pytest.approx(published.opengptx() / 4)


def test_activations_of_gpt3(gpt3: Job) -> None:
    spec = gpt3.spec
    kept = arithmetic.activations(2048, 12288, 96)
    assert kept.none == 2048 * 12288 * (34 + 80)
    assert kept.full == 2 * 2048 * 12288
    assert spec.n_layers * kept.none / 1e9 == pytest.approx(275.4, abs=0.05)
    assert spec.n_layers * arithmetic.float32_activations(2048, 12288, 96) / 1e9 == pytest.approx(444.5, abs=0.05)
    assert 4 * spec.params / 1e9 == pytest.approx(698.4, abs=0.05)


def test_splitting_activations() -> None:
    whole = arithmetic.activations(2048, 12288, 96)
    for ranks in (1, 2, 8):
        both = arithmetic.activations(2048, 12288, 96, tensor=ranks, sequence=True)
        assert both.none == pytest.approx(whole.none / ranks)
        assert both.selective == pytest.approx(whole.selective / ranks)
        assert both.full == whole.full
        layer = arithmetic.activations(2048, 12288, 96, tensor=ranks)
        # Without sequence parallelism 10 s b h stay whole on each rank.
        assert layer.none - both.none == pytest.approx(10 * 2048 * 12288 * (1 - 1 / ranks))
    assert arithmetic.activations(2048, 12288, 96, batch=3).none == 3 * whole.none


@pytest.mark.parametrize("preset", ["175b", "frontier-22b", "frontier-1t"])
def test_megatrons_flops_are_the_plans(preset: str) -> None:
    spec = alone("gpt", preset).spec
    formula = arithmetic.megatron_flops(3, 2048, spec.n_layers, spec.dim, spec.vocab_size)
    assert 3 * 2048 * arithmetic.hardware_flops_per_token(spec, 2048) == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize("row", published.MEGATRON, ids=lambda row: f"{row.billions}b")
def test_megatrons_rows_agree_with_themselves(row: published.Row) -> None:
    assert published.agrees(row)
    assert not published.agrees(row._replace(billions=row.billions * 1.1))
    assert not published.agrees(row._replace(percent=row.percent + 2))
    assert not published.agrees(row._replace(pflops=row.pflops * 1.05))


def test_step_of_the_largest_megatron_row() -> None:
    billions, step, percent, pflops = published.megatron(published.MEGATRON[-1])
    assert (round(billions, 2), round(percent, 1), round(pflops, 1)) == (1008.04, 52.2, 500.7)
    assert step == pytest.approx(102.63, abs=0.01)


@pytest.mark.parametrize(
    ("params", "tokens", "gpus", "tflops", "days"),
    [(175e9, 300e9, 1024, 140, 34), (1008e9, 450e9, 3072, 163, 84)],
    ids=["gpt3", "1t"],
)
def test_megatrons_training_days(params: float, tokens: float, gpus: int, tflops: int, days: int) -> None:
    seconds = arithmetic.training_seconds(params, tokens, gpus, 312e12, tflops / 312, recompute=True)
    assert round(seconds / 86400) == days
    assert arithmetic.training_seconds(params, tokens, gpus, 312e12, tflops / 312) == pytest.approx(0.75 * seconds)


def test_llamas_hours() -> None:
    used = {row.billions: 6 * row.tokens * row.params / (row.hours * 3600 * 312e12) for row in published.LLAMA}
    assert used == pytest.approx({6.7: 0.437, 13.0: 0.514, 32.5: 0.459, 65.2: 0.478}, abs=0.001)
    largest = published.LLAMA[-1]
    assert round(largest.hours / 2048 / 24) == 21
    assert arithmetic.optimal_tokens(largest.params) == pytest.approx(1.306e12, rel=1e-3)
    # The others' parameters are rounded, 65.29 is printed as 65.2; energies are cut off.
    assert [round(row.params / 1e9, 1) == row.billions for row in published.LLAMA] == [True, True, True, False]
    assert [math.floor(row.hours * 0.4 * 1.1 / 1e3) for row in published.LLAMA] == [36, 59, 233, 449]


def report_of(job: Job) -> dict[str, Any]:
    return closed_form.report(job, tokens=300e9, devices=1024, peak_tflops=312, utilisation=140 / 312)


def test_report_of_gpt3(gpt3: Job) -> None:
    report = report_of(gpt3)
    assert json.loads(json.dumps(report)) == report
    assert report["model"]["seq_len"] == 2048
    assert report["parameters"]["exact"] == gpt3.spec.params
    assert report["state"]["data_parallel_ranks"] == 1024
    assert report["state"]["whole_model"]["20"] == 20 * gpt3.spec.params
    days = {name: seconds / 86400 for name, seconds in report["training"]["seconds"].items()}
    assert days == pytest.approx({"6TP": 25.4, "8TP": 33.8, "exact": 26.1, "exact_full_recompute": 34.7}, abs=0.06)
    assert report["flops_per_token"]["6P"] * 300e9 == pytest.approx(3.14e23, rel=2e-3)  # arXiv 2005.14165, table D.1


def test_report_splits_the_model_as_the_job_does() -> None:
    job = alone("gpt", "13b", "--mesh.tp", "4")
    report = closed_form.report(job, devices=32)
    assert (report["state"]["model_split_over"], report["state"]["data_parallel_ranks"]) == (4, 8)
    assert report["state"]["zero"]["16"][1] == pytest.approx((4 + 12 / 8) * job.spec.params / 4)
    assert set(report["activations"]["per_layer"]) == {"one device", "tensor 4", "tensor and sequence 4"}
    assert report["training"]["devices"] == 32
    assert report["training"]["tokens"] == 20 * job.spec.params
    assert report["training"]["seconds"] is None


def test_report_counts_what_the_job_holds(gpt3: Job) -> None:
    held = [
        PersistentState(component="parameters", bytes_per_param=4),
        PersistentState(component="parameters", bytes_per_param=2, gathered_units=2),
        PersistentState(component="optimizer", bytes_per_param=4),
        PersistentState(component="optimizer", bytes_per_param=4, axes=("dp_shard",)),
    ]
    own = closed_form.report(gpt3, held=held)["state"]["own_bytes_per_parameter"]
    assert own == {"parameters": 4, "optimizer": 8}


def test_layout_of_a_config_is_the_default() -> None:
    overrides = ["--mesh.tp", "2", "--mesh.pp", "2", "--mesh.dp_shard", "3"]
    state = closed_form.report(load_job(None, overrides))["state"]
    assert (state["model_split_over"], state["data_parallel_ranks"]) == (4, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"devices": 30}, "--devices 30: must be a multiple of the 4 model-parallel ranks; nearest: 28 or 32"),
        ({"devices": 2}, "nearest: 4$"),
        ({"tokens": 0}, "--tokens 0: must be above 0"),
        ({"utilisation": -0.5, "peak_tflops": 0}, "--peak-tflops 0: must be above 0"),
    ],
)
def test_faults(given: dict[str, float], said: str) -> None:
    job = alone("gpt", "13b", "--mesh.tp", "4")
    with pytest.raises(ConfigError, match=said):
        closed_form.report(job, **given)  # type: ignore[arg-type]


def test_text_has_the_numbers(gpt3: Job) -> None:
    text = closed_form.text(report_of(gpt3))
    for said in ("174,604,259,328", "+0.33%", "698.4 GB", "275.4 GB", "444.5 GB", "33.8 days", "34.7 days"):
        assert said in text
    assert max(map(len, text.splitlines())) <= 120
    assert "formulas for a GPT" not in text
    registry.load_plugins(())
    assert "formulas for a GPT" in closed_form.text(closed_form.report(alone("llama", "llama3-8b")))


def test_published_tables_print(capsys: pytest.CaptureFixture[str]) -> None:
    published.main()
    printed = capsys.readouterr().out
    for said in ("34 | 33.9 days", "84 | 83.9 days", "56.9 -> 14.2", "17.9", "120.0  31.4  16.6  1.9"):
        assert said in printed
