"""Studies: a job with one thing varied (planner/report/studies.py, study.py)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planned import job_of
from titan.cli import main
from titan.config import load_job
from titan.contracts import Technique
from titan.contracts.base.layout import Layout
from titan.contracts.plugin import registry
from titan.errors import ConfigError
from titan.packages import torch_release
from titan.planner.machine import cluster
from titan.planner.report import STUDIES
from titan.planner.report.studies import KINDS, Base, run
from titan.planner.report.study import MEASURES, Point, Study
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner, Prediction

FRONTIER = cluster.load("mi250x-frontier")
GPT175B, LLAMA65B = Path("tests/configs/gpt175b.toml"), Path("configs/llama65b.toml")


def _study(name: str, *words: str, config: Path | None = GPT175B, ranks: int | None = None) -> Study:
    return run(name, config, words, FRONTIER, ranks)


def _directly(*words: str, config: Path = GPT175B) -> Prediction:
    job = load_job(config, words)
    return Planner(FRONTIER).predict(costs_of(job), job.layout)


def _xs(points: Sequence[Point]) -> list[float]:
    return [point.x for point in points]


def _at(study: Study, x: float, series: str = "") -> Point:
    (point,) = (p for p in study.points if p.x == x and p.series == series)
    return point


def _same(point: Point, prediction: Prediction) -> bool:
    for name in ("step_time_s", "tokens_per_s", "bubble_fraction"):
        assert point.values[name] == pytest.approx(getattr(prediction, name), rel=1e-9)
    assert point.values["memory_gib"] == pytest.approx(max(m.total for m in prediction.memory) / 2**30, rel=1e-12)
    return point.fits == prediction.fits and not point.refused


def test_weak_scaling_keeps_the_share_of_each_rank() -> None:
    study = _study("weak-scaling")
    assert _xs(study.points) == [64, 128, 256, 512, 1024]  # two copies as given, up to eight times that
    for point in study.points:
        copies = int(point.x) // 64
        words = (f"--mesh.dp_shard={copies}", f"--train.global_batch_size={320 * copies}")
        assert _same(point, _directly(*words))
    fits = [point.fits for point in study.points]
    assert fits == [torch_release() >= (2, 15), True, True, True, True]  # from PyTorch 2.15 on stages hold less
    at = study.points[fits.index(True)]
    first = at.values
    for point in study.points:
        share = point.values["tokens_per_s"] / point.x / (first["tokens_per_s"] / at.x)
        assert point.values["efficiency"] == pytest.approx(share, rel=1e-12)
    assert first["efficiency"] == 1.0


def test_strong_scaling_keeps_the_batch_and_compares_with_the_smallest_that_fits() -> None:
    study = _study("strong-scaling", "--mesh.tp=8")
    for point in study.points:
        assert _same(point, _directly("--mesh.tp=8", f"--mesh.dp_shard={int(point.x) // 128}"))
    efficiency = [point.values["efficiency"] for point in study.points]
    assert efficiency[0] == 1.0 and efficiency[-1] < 0.9 and efficiency == sorted(efficiency, reverse=True)
    points = _study("strong-scaling", "--mesh.tp=2").points
    first = next(point for point in points if point.fits)
    assert first.values["efficiency"] == 1.0 and not points[0].fits and points[0].values["efficiency"] > 1.0
    none_fits = _study("strong-scaling", "--mesh.pp=1", "--mesh.tp=1", ranks=4).points
    assert not any(point.fits for point in none_fits) and none_fits[0].values["efficiency"] == 1.0


def test_scaling_goes_to_the_ranks_that_are_said() -> None:
    assert _xs(_study("weak-scaling", ranks=384).points) == [64, 128, 256, 384]
    with pytest.raises(ConfigError, match=r"--world-size 100: must be a multiple of .* 64 ranks; nearest: 128"):
        _study("weak-scaling", ranks=100)


def test_what_a_batch_does_not_divide_over_is_refused() -> None:
    *others, last = _study("strong-scaling", config=None, ranks=16).points
    assert len(others) == 4 and not any(point.refused for point in others) and last.values == {} and not last.fits
    said = "[train] global_batch_size = 24: must be divisible by the 16 data-parallel ranks"
    assert last.refused.startswith(said)


def test_tensor_trades_copies_for_slices_and_micro_batches_divide_what_a_rank_has() -> None:
    study = _study("tp")
    assert study.x_label == "mesh.tp" and _xs(study.points) == [1, 2, 4, 8]
    for point in study.points:
        assert _same(point, _directly(f"--mesh.tp={point.x}", f"--mesh.dp_shard={8 // int(point.x)}"))
    assert not study.points[0].fits and study.points[-1].fits
    study = _study("micro-batch")
    assert _xs(study.points) == [1, 2, 4, 5, 8, 10, 16]  # of 320 samples
    assert _same(_at(study, 5), _directly("--train.micro_batch_size=5"))


def test_pipeline_says_why_a_degree_cannot_work() -> None:
    study = _study("pp", config=LLAMA65B)
    assert _xs(study.points) == [1, 2, 4, 8, 16, 32, 64]
    assert _same(_at(study, 8), _directly("--mesh.pp=8", "--mesh.dp_shard=128", config=LLAMA65B))
    assert "n_layers = 80 cannot fill 128 stages" in _at(study, 64).refused


def test_longer_sequences_are_split_over_more_ranks_at_the_same_tokens() -> None:
    path = Path("configs/llama3_8b.toml")
    study = _study("cp", "--data.packing=concat", config=path)
    assert study.x_label == "mesh.cp" and study.series[:2] == ("8,192 tokens", "16,384 tokens")
    assert len(study.series) == 6 and {point.x for point in study.points} == {2**i for i in range(7)}
    words = ("--data.packing=concat", "--data.seq_len=32768", "--model.max_seq_len=32768")
    words += ("--train.global_batch_size=128", "--train.micro_batch_size=1", "--mesh.cp=4", "--mesh.dp_shard=16")
    assert _same(_at(study, 4, "32,768 tokens"), _directly(*words, config=path))
    assert _same(_at(study, 1, "8,192 tokens"), _directly("--data.packing=concat", config=path))
    assert "must be divisible by the 64 data-parallel ranks" in _at(study, 1, "131,072 tokens").refused
    peaks = [_at(study, x, "65,536 tokens").values["memory_gib"] for x in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 1.8 * peaks[1]
    for point in study.points:
        if point.values:
            assert point.values["tokens_per_s"] * point.values["step_time_s"] == pytest.approx(512 * 8192)


@pytest.mark.parametrize(("given", "at_64"), [(0, None), (2, 1), (1, 1)], ids=["unset", "two", "one"])
def test_longer_sequences_leave_a_micro_batch_that_is_not_set_to_each_layout(given: int, at_64: int | None) -> None:
    sharded = ("--mesh.dp_shard=2", "--plugins.fsdp.zero_stage=2")
    job = job_of(f"--train.micro_batch_size={given}", "--data.seq_len=32", *sharded)
    _, variants = KINDS["cp"].varied(Base(job, frozenset(), 0))
    sizes = {variant.series: variant.keys.get("train.micro_batch_size") for variant in variants}
    assert list(sizes) == [f"{length} tokens" for length in (32, 64, 128, 256)]
    assert (sizes["32 tokens"], sizes["64 tokens"]) == (given or None, at_64)


@pytest.mark.parametrize("name", ["cp", "tp", "pp", "strong-scaling"])
def test_a_study_of_an_axis_that_no_plugin_owns_is_refused(name: str) -> None:
    job = replace(job_of(), layout=Layout((), {}))
    fact = {"cp": "sliced", "tp": "slices", "pp": "layers"}.get(name, "dealt")
    with pytest.raises(ConfigError, match=f'--study: no plugin owns an axis that is "{fact}"'):
        KINDS[name].varied(Base(job, frozenset(), 0))


def test_the_axis_with_most_ranks_shares_the_batch_and_makes_up_ranks() -> None:
    points = _study("tp", "--mesh.dp_shard=1", "--mesh.dp_replicate=4").points
    assert _xs(points) == [1, 2, 4, 8, 16]
    assert _same(points[0], _directly("--mesh.tp=1", "--mesh.dp_shard=1", "--mesh.dp_replicate=16"))
    study = _study("tp", ranks=256)
    assert _xs(study.points) == [1, 2, 4, 8, 16] and "dp_shard 4" in study.job
    assert _same(_at(study, 8), _directly("--mesh.tp=8", "--mesh.dp_shard=2"))


def test_bubble_goes_through_schedules_and_micro_batches() -> None:
    study = _study("bubble", "--mesh.pp=4", "--mesh.tp=8")
    assert len(study.series) == 7 and "1F1B" in study.series  # the job's own stands for its schedule, once
    assert _xs([p for p in study.points if p.series == "1F1B"]) == [4, 8, 16, 32, 64, 128, 320]
    interleaved = ("--plugins.pipeline.schedule=Interleaved1F1B", "--plugins.pipeline.virtual_stages=2")
    for x, series, words in ((4, "1F1B", ()), (320, "1F1B", ()), (32, "Interleaved1F1B 2", interleaved)):
        direct = _directly("--mesh.pp=4", "--mesh.tp=8", f"--train.global_batch_size={2 * x}", *words)
        assert _same(_at(study, x, series), direct)
    assert "needs at least 8" in _at(study, 4, "DualPipeV 2").refused
    assert _study("bubble", "--mesh.pp=4", "--plugins.pipeline.schedule=GPipe").series == ("GPipe",)


def test_recompute_goes_through_all_that_is_optional() -> None:
    study = _study("recompute")
    assert [point.label for point in study.points] == ["off", "full", "selective", "every_n 2", "every_n 4"]
    assert _same(study.points[0], _directly("--plugins.activation_checkpoint.enabled=false"))
    every = ("--plugins.activation_checkpoint.mode=every_n", "--plugins.activation_checkpoint.every=4")
    assert _same(study.points[4], _directly(*every))
    techniques = [p for p in registry.of_kind(Technique.kind) if issubclass(p, Technique)]
    toggled = [p for p in techniques if p.search_toggle and p.phase == "recompute"]
    # Recomputing attention has no effect here: this model's attention writes no scores.
    assert len(study.points) == sum(1 + len(plugin.search_space) for plugin in toggled) - 1
    assert {"mode": "attention"} in toggled[0].search_space
    activations = [point.values["activations_gib"] for point in study.points]
    assert min(activations) == activations[1] < activations[3] < activations[4]


@pytest.mark.parametrize("name", KINDS)
def test_every_study_of_a_small_job(name: str) -> None:
    study = _study(name, config=Path("configs/debug3d.toml"))
    report = json.loads(json.dumps(study.as_json()))
    assert report["study"] == name and len(report["points"]) == len(study.points) >= 2
    for point in report["points"]:
        measured = set(point) & set(MEASURES)
        others = {"efficiency", "time_to_loss_s"} - set(study.shown)
        assert measured == (set() if point["refused"] else set(MEASURES) - others)
    assert set(study.shown) <= set(MEASURES) and all(p.label in study.text() for p in study.points)


def test_a_table_shows_what_does_not_fit_and_why_others_cannot_work() -> None:
    points = (
        Point(1, "1", "", {"tokens_per_s": 100.0, "memory_gib": 90.0}, False),
        Point(2, "2", "", {"tokens_per_s": 50.0, "memory_gib": 45.0}, True),
        Point(3, "3", "", {}, False, "three is odd"),
    )
    study = Study("s", "Title", "job", "ranks", ("tokens_per_s",), False, 80.0, points)
    assert study.text().splitlines() == [
        "Title",
        "job",
        "",
        "ranks  tokens/s  peak memory, GiB  tokens/s",
        "1*          100             90.00  " + 24 * "█",
        "2            50             45.00  " + 12 * "█",
        "3             -                 -",
        "",
        "*  does not fit into 80 GiB",
        "-  3: three is odd",
    ]


def test_series_stand_beside_each_other_and_share_a_reason() -> None:
    points = (
        Point(1, "1", "a", {"bubble_fraction": 0.5}, True),
        Point(2, "2", "a", {"bubble_fraction": 0.25}, False),
        Point(1, "1", "b", {}, False, "no"),
        Point(2, "2", "b", {}, False, "no"),
    )
    assert Study("s", "t", "j", "micro batches", ("bubble_fraction",), False, 80.0, points).text().splitlines()[3:] == [
        "bubble:",
        "micro batches      a   b",
        "1              50.0%   -",
        "2              25.0%*  -",
        "",
        "*  does not fit into 80 GiB",
        "-  b 1, 2: no",
    ]
    more = tuple(replace(p, values={**p.values, "memory_gib": 8.0} if p.values else {}) for p in points)
    two = Study("s", "t", "j", "micro batches", ("bubble_fraction", "memory_gib"), False, 80.0, more).text()
    assert two.splitlines()[7:11] == ["", "peak memory, GiB:", "micro batches     a   b", "1              8.00   -"]


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("recompte", (), r"--study: recompte: no such study.*recompute"),
        ("tp", (), r"nothing to vary with one rank; give it more ranks \(--world-size N\)"),
        ("tp", ("--mesh.nonsense=2", "--train.nonsense=2"), "unknown"),
        ("bubble", (), r"the job has no pipeline; give it one: --mesh\.pp 4"),
    ],
)
def test_faults(name: str, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _study(name, *words, config=None)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert (*KINDS, "fabric") == STUDIES  # which stand apart, for --help to be quick
    words = ["--config", "configs/debug3d.toml", "--study", "tp", "--cluster", "h100", "--json"]
    assert main(["plan", *words]) == 0
    assert [point["x"] for point in json.loads(capsys.readouterr().out)["points"]] == [1, 2, 4]
