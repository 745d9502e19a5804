"""The search splits sequences over ranks where that can pay, and finds the best of these layouts too."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planned import CLUSTER, TOML
from tests.unit.test_search import EAGER, bounds, everything
from titan.config import load_job
from titan.planner.machine.cluster import load
from titan.planner.search.best_first import _Search, search
from titan.planner.search.space import load_base
from titan.planner.step.layout import costs_of, uncut
from titan.planner.step.memory import GIB
from titan.planner.step.predict import Planner

LONG = ("--data.seq_len=65536", "--model.max_seq_len=65536", "--train.global_batch_size=4", *EAGER)


def test_sequences_are_split_where_ranks_still_have_many_positions() -> None:
    short = load_base(TOML, ["--data.seq_len=64"]).space(16, 4)
    assert {layout.degrees["cp"] for layout in short.layouts()} == {1}
    long = load_base(TOML, LONG).space(64, 4)
    assert {layout.degrees["cp"] for layout in long.layouts()} == {1, 2, 4, 8, 16}  # of 4,096 positions
    fixed = load_base(TOML, ["--data.seq_len=64", "--mesh.cp=2"]).space(16, 4)
    assert {layout.degrees["cp"] for layout in fixed.layouts()} == {2}


def test_a_split_sequence_gains_nothing_that_a_smaller_micro_batch_has_not() -> None:
    """Layouts whose micro batch has a factor in common with cp are left out: without them the best is the same."""
    words = ("--data.seq_len=8192", "--model.max_seq_len=8192", "--train.global_batch_size=16", "--mesh.pp=1", *EAGER)
    base = load_base(TOML, (*words, "--mesh.tp=1"))
    space = base.space(8, 4)
    sizes = {(layout.degrees["cp"], size) for layout in space.layouts() for size in space.micro_batches(layout)}
    assert (2, 1) in sizes and (1, 2) in sizes and not any(cp > 1 and size % 2 == 0 for cp, size in sizes)
    planner = Planner(CLUSTER)
    split = search(base.job, planner, [load_base(TOML, (*words, "--mesh.tp=1", "--mesh.cp=2")).space(8, 4)], keep=3)
    (best,) = search(base.job, planner, [space], keep=1).best
    assert any(found.choice.micro_batch % 2 == 0 for found in split.best)
    assert best.prediction.step_time_s <= split.best[0].prediction.step_time_s


@pytest.mark.sweep
def test_no_layout_of_split_sequences_is_better_than_its_bounds() -> None:
    words = ("--data.seq_len=16384", "--model.max_seq_len=16384", "--train.global_batch_size=3", *EAGER)
    words += ("--plugins.bf16.enabled=true", "--plugins.activation_checkpoint.enabled=false")
    base, methods = load_base(TOML, words).job, set()
    run = _Search(base, Planner(CLUSTER), 1, "time")
    alone = replace(costs_of(base), recompute=None, collectives=(), fused=True, update_bytes=0.0)
    found = everything(4, *words)
    for choice, prediction in found:
        job = load_job(TOML, [*words, *choice.words()], 4)
        assert max(bounds(run, alone, job)) <= prediction.step_time_s * (1 + 1e-9), choice
        alike = run.planner.stage_costs(uncut(job), job.layout)
        assert run._least_memory(alike) / GIB <= prediction.peak_gib * (1 + 1e-9)
        methods.add(dict(choice.options).get("context"))
    assert len(methods) == 4  # and none
    best = search(base, Planner(CLUSTER), [load_base(TOML, words).space(4, 4)], keep=5).best
    values = sorted(prediction.step_time_s for _, prediction in found)
    assert [f.prediction.step_time_s for f in best] == pytest.approx(values[:5], rel=1e-9)


def test_long_sequences_need_their_ranks() -> None:
    """Llama 3 8B at 131,072 tokens fits into no device of 40 GB with whole sequences, unless layers are sliced."""
    path, planner = Path("configs/llama3_8b_128k.toml"), Planner(load("a100-40gb"))
    whole = load_base(path, ["--mesh.cp=1", "--mesh.tp=1", "--mesh.pp=1"])
    assert not search(whole.job, planner, [whole.space(32, 8)], keep=1).best
    split = load_base(path, ["--mesh.tp=1", "--mesh.pp=1"])
    (best,) = search(split.job, planner, [split.space(32, 8)], keep=1).best
    assert best.choice.layout.degrees["cp"] > 1 and best.prediction.time_s["cp"] > 0
