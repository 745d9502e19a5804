"""The search finds what going through every layout finds, keeps what is fixed, and says why there is none.

It splits sequences over ranks where that can pay, and finds the best of these layouts too.
"""

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planned import CLUSTER, TOML, job_of, small_cluster
from titan.cli import main
from titan.config import Job, load_job
from titan.contracts.base.cost import Costs, Stage
from titan.errors import ConfigError
from titan.planner.machine.cluster import MEMORY_LIMIT, Cluster, load
from titan.planner.search import best_first
from titan.planner.search.best_first import Objective, Result, Search, search
from titan.planner.search.space import Choice, load_base
from titan.planner.step.layout import costs_of, uncut
from titan.planner.step.predict import Planner, Prediction, UnscheduledStep, stage_loads

EAGER = ("--plugins.compile.enabled=false",)
"""Halves the layouts, where compiled ones would show nothing more."""

VALUES = {"time": lambda p: p.step_time_s, "price": lambda p: p.price, "energy": lambda p: p.energy_j}

NOTHING_FITS = re.compile(
    r"error: no layout fits into 9.5e-05 GiB, 95 % of the device's 0.0001 GiB: (?P<looked>[\d,]+) layouts looked at, "
    r"(?P<invalid>[\d,]+) invalid, (?P<large>[\d,]+) too large; "
    r"the smallest needs at least (?P<peak>\S+) GiB per rank: .*\n"
)


def plan_of(ranks: int) -> list[str]:
    return ["plan", "--config", str(TOML), "--search", "--world-size", str(ranks)]


def everything(ranks: int, *words: str, cluster: Cluster = CLUSTER) -> list[tuple[Choice, Prediction]]:
    """Each layout that plugins allow and that fits, predicted through overrides of the TOML."""
    base, planner, found = load_base(TOML, words), Planner(cluster), []
    space = base.space(ranks, 4)
    for layout in space.layouts():
        for micro_batch in space.micro_batches(layout):
            for plain, staged in space.options(layout):
                for more in staged:
                    choice = Choice(layout, micro_batch, (*plain, *more))
                    try:
                        job = load_job(TOML, [*words, *choice.words()], ranks)
                    except ConfigError:
                        continue
                    prediction = planner.predict(costs_of(job), job.layout)
                    assert prediction.peak_gib < cluster.memory.limit_gib, "too large, which the caller does not expect"
                    found.append((choice, prediction))
    return found


def best_of(*words: str, cluster: Cluster = CLUSTER, ranks: int = 4, keep: int = 7, **how: Any) -> Result:
    base = load_base(TOML, words)
    return search(base.job, Planner(cluster), [base.space(ranks, 4)], keep=keep, **how)


def times(result: Result) -> list[float]:
    return [found.prediction.step_time_s for found in result.best]


FIXED = ("--train.global_batch_size=4", "--plugins.fsdp.zero_stage=1", *EAGER)


@pytest.fixture(scope="module")
def four_ranks() -> list[Prediction]:
    return [prediction for _, prediction in everything(4, *FIXED)]


@pytest.mark.parametrize("objective", ["time", "price", "energy"])
def test_the_best_are_the_best_of_all(objective: Objective, four_ranks: list[Prediction]) -> None:
    result = best_of(*FIXED, objective=objective)
    values = sorted(VALUES[objective](prediction) for prediction in four_ranks)
    assert len(values) > 100
    assert [VALUES[objective](found.prediction) for found in result.best] == pytest.approx(values[:7], rel=1e-9)
    if objective == "time":
        assert result.by_bound or result.slower, "nothing was ruled out early, so the bounds were not tested"


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_best_keep_headroom(share: float, four_ranks: list[Prediction], monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices on which some of the layouts exceed the limit, and others only seem to fit.

    What is too large is counted, and the tightest of it found, as if all stages of each were looked at.
    """
    below, above = sorted({prediction.peak_gib for prediction in four_ranks})[int(share * len(four_ranks)) :][:2]
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, memory_gib=(below + above) / 2 / MEMORY_LIMIT))
    result = best_of(*FIXED, cluster=cluster)
    within = sorted(p.step_time_s for p in four_ranks if p.peak_gib <= below)
    fitting = sorted(p.step_time_s for p in four_ranks if p.peak_gib <= cluster.device.memory_gib)
    assert result.too_large and within[:7] != fitting[:7]
    assert times(result) == pytest.approx(within[:7], rel=1e-9)
    memory = UnscheduledStep.memory
    monkeypatch.setattr(UnscheduledStep, "memory", lambda step, most: memory(step))
    assert best_of(*FIXED, cluster=cluster) == result


@pytest.mark.sweep
def test_the_best_are_the_best_of_all_with_compiled_layouts() -> None:
    words = FIXED[: -len(EAGER)]
    values = sorted(prediction.step_time_s for _, prediction in everything(4, *words))
    assert times(best_of(*words)) == pytest.approx(values[:7], rel=1e-9)


@pytest.mark.sweep
def test_the_best_are_the_best_where_ranks_share_processors() -> None:
    words, shared = ("--mesh.tp=1", *EAGER), replace(CLUSTER, device=replace(CLUSTER.device, full_speed_ranks=2))
    values = sorted(prediction.step_time_s for _, prediction in everything(4, *words, cluster=shared))
    assert times(best_of(*words, cluster=shared)) == pytest.approx(values[:7], rel=1e-9)


def bounds(run: Search, alone: Costs, job: Job) -> tuple[float, float, float, float]:
    """The bounds of a job, from the loosest: of its group, however it is cut, as it is cut, with its stages timed."""
    costs, planner = costs_of(job), run.planner
    alike, draft = planner.stage_costs(uncut(job), job.layout), planner.draft(costs, job.layout)
    least, busy = run.least_time(alike)
    return (
        run.group_bound(alone, job.layout, job.micro_batch),
        run.lower_bound(least, busy, job.layout),
        run.lower_bound(alike.lower_bound_of(stage_loads(costs.stages, costs.recompute)), busy, job.layout),
        run.lower_bound(draft.lower_bound_s, draft.busy_s, job.layout),
    )


def bounds_and_step(*words: str) -> tuple[float, float, float, float, float]:
    """The bounds of a job and what its step takes, where nothing but computing takes time."""
    links = tuple(replace(link, bandwidth_gb_s=1e9) for link in CLUSTER.links)
    planner = Planner(replace(CLUSTER, links=links))
    job = job_of(*words, "--model.preset", "mini", "--train.micro_batch_size", "1", "--train.global_batch_size", "32")
    run, costs = Search(job, planner, 1, "time"), costs_of(job)
    alone = replace(
        costs, recompute=None, collectives=(), update_bytes=0.0, stages=(Stage(0, range(job.spec.n_layers)),)
    )
    return *bounds(run, alone, job), planner.predict(costs, job.layout).step_time_s


def test_bounds_are_below_the_step_and_near_it() -> None:
    group, shared, work, draft, step = bounds_and_step()
    assert 0.9 * step < group <= shared <= work * (1 + 1e-9)
    assert work <= draft <= step * (1 + 1e-9)
    zero_bubble = ("--mesh.pp", "4", "--plugins.pipeline.schedule", "ZBVZeroBubble")
    group, shared, work, draft, step = bounds_and_step(*zero_bubble)
    assert max(group, shared) <= step and work <= draft <= step * (1 + 1e-9)
    assert draft > 0.93 * step
    for schedule in ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV"):
        *under, step = bounds_and_step("--mesh.pp", "4", "--plugins.pipeline.schedule", schedule)
        assert max(under) <= step * (1 + 1e-9), schedule


def judged(*words: str) -> Iterator[tuple[Choice, Job, Prediction, float]]:
    """Each layout of four ranks that fits, held against its bounds, and the bound of its memory as a share of it."""
    base = load_base(TOML, words).job
    runs = [Search(base, Planner(CLUSTER), 1, objective) for objective in ("time", "price", "energy")]
    alone = replace(costs_of(base), recompute=None, collectives=(), fused=True, update_bytes=0.0)
    for choice, prediction in everything(4, *words):
        job = load_job(TOML, [*words, *choice.words()], 4)
        for run in runs:
            assert max(bounds(run, alone, job)) <= VALUES[run.objective](prediction) * (1 + 1e-9), choice
        alike = runs[0].planner.stage_costs(uncut(job), job.layout)
        tensors = max(memory.total - memory.cached for memory in prediction.memory)
        yield choice, job, prediction, runs[0].least_memory(alike) / tensors


@pytest.mark.sweep
def test_no_layout_is_better_than_its_bounds() -> None:
    cuts, ratios = defaultdict(set), []
    for choice, job, _, ratio in judged("--train.global_batch_size=8", "--plugins.bf16.enabled=true", *EAGER):
        ratios.append(ratio)
        of_pipeline = dict(choice.options).get("pipeline")
        cuts[str(choice.layout), choice.micro_batch, of_pipeline].add(costs_of(job).stages)
    assert 0.9 < max(ratios) <= 1 + 1e-9
    assert len(cuts) > 20
    assert all(len(found) == 1 for found in cuts.values()), "a cut that depends on options of other techniques"


def test_workers_find_what_one_process_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_first, "FEW", 2)
    words = ("--train.global_batch_size=8", *EAGER)
    alone, shared = (best_of(*words, ranks=8, keep=20, workers=workers) for workers in (1, 3))
    assert [(str(f.choice), f.prediction) for f in shared.best] == [(str(f.choice), f.prediction) for f in alone.best]
    assert shared.layouts == alone.layouts


def test_tables_that_contradict_a_fixed_option_are_left_out() -> None:
    space = load_base(TOML, ["--plugins.activation_checkpoint.mode=selective"]).space(2, 0)
    plain = [dict(choice) for layout in space.layouts() for choice, _ in space.options(layout)]
    # Off, or as the command line says; every_n would have another mode.
    assert {chosen["activation_checkpoint"] for chosen in plain} == {None, ()}
    with pytest.raises(ConfigError, match=r"--mesh\.tq 2: no plugin owns it"):
        load_base(TOML, ["--mesh.tq=2"])


def test_compiled_blocks_are_searched_and_a_switch_without_options_is_tried_both_ways() -> None:
    for words in ((), ("--plugins.activation_checkpoint.mode=full", "--plugins.activation_checkpoint.every=2")):
        space = load_base(TOML, ["--mesh.dp_shard=2", *words]).space(2, 4)
        plain = [dict(chosen) for layout in space.layouts() for chosen, _ in space.options(layout)]
        assert {chosen["compile"] for chosen in plain} == {None, ()}
        recomputed = {chosen["activation_checkpoint"] for chosen in plain}
        assert (recomputed == {None, ()}) == bool(words) and None in recomputed


def test_layouts_share_out_all_ranks() -> None:
    ours = ["pp", "dp_replicate", "dp_shard", "tp"]
    others = [axis.name for axis in job_of().layout.axes if axis.name not in ours]  # loaded by other tests
    layouts = list(load_base(TOML, [f"--mesh.{axis}=1" for axis in others]).space(8, 4).layouts())
    assert all(layout.world_size == 8 for layout in layouts)
    assert [name for name in layouts[0].degrees if name in ours] == ours
    degrees = [tuple(layout.degrees[axis] for axis in ours) for layout in layouts]
    assert len(set(degrees)) == len(degrees)
    # pp up to its 4 layers, tp up to the 4 ranks of a node, the rest between both kinds of data parallelism.
    every = itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4))
    assert sorted(degrees) == sorted(d for d in every if math.prod(d) == 8)


def test_what_the_command_line_says_stays() -> None:
    words = ("--mesh.tp=2", "--train.micro_batch_size=1", "--plugins.activation_checkpoint.mode=selective")
    best = best_of(*words, ranks=8, keep=50).best
    assert len(best) == 50
    for found in best:
        values = found.choice.values()
        assert (values["mesh.tp"], values["train.micro_batch_size"]) == (2, 1)
        assert values.get("plugins.activation_checkpoint.mode", "selective") == "selective"


def test_a_layout_written_is_a_job_that_loads_and_is_what_was_found(tmp_path: Path, capsys) -> None:
    best = tmp_path / "best.toml"
    assert main([*plan_of(8), "--output", str(best), "--json", "--cluster", "a100-80gb"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["plan", "--config", str(best), "--json", "--cluster", "a100-80gb"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time_s"] == pytest.approx(found["layouts"][0]["step_time_s"], rel=1e-9)
    assert again["world_size"] == 8
    times = [layout["step_time_s"] for layout in found["layouts"]]
    assert times == sorted(times)


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([*plan_of(2), "--cluster", small_cluster(tmp_path, 0.0001), *FIXED]) == 2
    found = NOTHING_FITS.fullmatch(capsys.readouterr().err)
    assert found
    looked, invalid, large = (int(found[name].replace(",", "")) for name in ("looked", "invalid", "large"))
    space = load_base(TOML, FIXED).space(2, 0)
    groups = ((layout, len(space.micro_batches(layout))) for layout in space.layouts())
    assert looked == sum(sizes * len(staged) for layout, sizes in groups for _, staged in space.options(layout))
    assert looked == invalid + large and large > 10
    peaks = [prediction.peak_gib for _, prediction in everything(2, *FIXED)]
    assert 0 < float(found["peak"]) <= min(peaks) * (1 + 1e-2)


def test_every_layout_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert main([*plan_of(3), "--mesh.tp", "3", *EAGER]) == 2
    counted, _, why = capsys.readouterr().err.partition(" layouts looked at, all of them invalid, the first because: ")
    assert re.fullmatch(r"error: no valid layout: \d+", counted)
    assert why.startswith("[model] n_kv_heads = 4 cannot be split over mesh.tp = 3;")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--mesh.tp", "1", "--train.global_batch_size", "5"],
            "2 splits of 7 ranks over the mesh axes looked at, and none agrees with train.global_batch_size = 5;",
        ),
        (
            ["--mesh.tp", "1", "--train.global_batch_size", "16", "--train.micro_batch_size", "4"],
            "none agrees with train.global_batch_size = 16 and train.micro_batch_size = 4; global_batch_size must be a",
        ),
        (["--mesh.tp", "2"], "7 ranks cannot be split with mesh.tp = 2; change these degrees or --world-size"),
    ],
)
def test_no_degrees_and_micro_batch_belong_together(words: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main([*plan_of(7), *words]) == 2
    err = capsys.readouterr().err
    assert "error: no valid layout: " in err and said in err


DRIFTING = '''
"""Workers that drift apart, and a trick: both are fast, and both change the curve."""

from dataclasses import dataclass

from titan.contracts import Axis, Technique, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Drifting(Technique):
    """Sends nothing."""

    name = "drifting"
    Config = Config
    phase = "shard"
    preserves_numerics = False
    axes = (Axis(name="drift", data="dealt", weights="copies", topology_order=4, doc="ranks that see other samples"),)
'''


def test_what_changes_the_curve_is_left_out_unless_asked_for(tmp_path: Path, capsys) -> None:
    (tmp_path / "drifting.py").write_text(DRIFTING)
    command = [*plan_of(4), "--top", "3", "--data.path", "x", "--plugins.path", str(tmp_path), "--data.name", "text"]
    command += ["--train.global_batch_size", "8"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left_out"][0] == "drifting"
    assert {layout["layout"]["mesh.drift"] for layout in found["layouts"]} == {1}
    assert main(command) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    asking = "--plugins.drifting.enabled true"
    assert last.startswith("not searched, because they change the loss curve: drifting, ")
    assert f"; include them with {asking}, " in last
    for words, degrees in ((asking.split(), (2, 4)), (["--mesh.drift", "4"], (4,))):
        assert main([*command, "--json", *words]) == 0
        asked = json.loads(capsys.readouterr().out)
        assert "drifting" not in asked["left_out"] and asked["layouts"][0]["layout"]["mesh.drift"] in degrees


LONG = ("--data.seq_len=65536", "--model.max_seq_len=65536", "--train.global_batch_size=4", *EAGER)


def test_sequences_are_split_where_ranks_still_have_many_positions() -> None:
    def degrees(ranks: int, *words: str) -> set[int]:
        return {layout.degrees["cp"] for layout in load_base(TOML, words).space(ranks, 4).layouts()}

    assert degrees(16, "--data.seq_len=64") == {1}
    assert degrees(64, *LONG) == {1, 2, 4, 8, 16}  # of 4,096 positions
    assert degrees(16, "--data.seq_len=64", "--mesh.cp=2") == {2}


def test_a_split_sequence_gains_nothing_that_a_smaller_micro_batch_has_not() -> None:
    """Layouts whose micro batch has a factor in common with cp are left out: without them the best is the same."""
    words = ("--data.seq_len=8192", "--model.max_seq_len=8192", "--train.global_batch_size=16", *EAGER)
    words += ("--mesh.pp=1", "--mesh.tp=1")
    space = load_base(TOML, words).space(8, 4)
    sizes = {(layout.degrees["cp"], size) for layout in space.layouts() for size in space.micro_batches(layout)}
    assert (2, 1) in sizes and (1, 2) in sizes and not any(cp > 1 and size % 2 == 0 for cp, size in sizes)
    split = best_of(*words, "--mesh.cp=2", ranks=8, keep=3)
    assert any(found.choice.micro_batch % 2 == 0 for found in split.best)
    assert times(best_of(*words, ranks=8, keep=1))[0] <= times(split)[0]


@pytest.mark.sweep
def test_no_layout_of_split_sequences_is_better_than_its_bounds() -> None:
    words = ("--data.seq_len=16384", "--model.max_seq_len=16384", "--train.global_batch_size=3", *EAGER)
    words += ("--plugins.bf16.enabled=true", "--plugins.activation_checkpoint.enabled=false")
    choices, _, predictions, ratios = zip(*judged(*words), strict=True)
    assert max(ratios) <= 1 + 1e-9
    assert len({dict(choice.options).get("context") for choice in choices}) == 4  # and none
    values = sorted(prediction.step_time_s for prediction in predictions)
    assert times(best_of(*words, keep=5)) == pytest.approx(values[:5], rel=1e-9)


def test_long_sequences_need_their_ranks() -> None:
    """Llama 3 8B at 131,072 tokens fits into no device of 40 GB with whole sequences, unless layers are sliced."""
    path, planner = Path("configs/llama3_8b_128k.toml"), Planner(load("a100-40gb"))
    whole, split = (load_base(path, [*words, "--mesh.tp=1", "--mesh.pp=1"]) for words in (["--mesh.cp=1"], []))
    assert not search(whole.job, planner, [whole.space(32, 8)], keep=1).best
    (best,) = search(split.job, planner, [split.space(32, 8)], keep=1).best
    assert best.choice.layout.degrees["cp"] > 1 and best.prediction.time_s["cp"] > 0
