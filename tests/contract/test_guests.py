"""Each widening of the contract, by a guest from outside (tests/guests): the curve of one rank at other layouts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_titan
from tests.jobs import CONFIGS, GPT, LLAMA, SAVING, THREE_STEPS, mesh
from tests.planned import CLUSTER
from tests.sweeps import sweep_but, swept_case
from titan.config import load_job
from titan.errors import ConfigError, PluginError
from titan.layers.experts import SideLoss
from titan.planner.dryrun.run import dry_run
from titan.planner.step.arithmetic import flops_per_token
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner
from titan.testing.jobs import Outcome, assert_same_curve, run_job, train_job
from titan.testing.ranks import RankError

GUESTS = ("--plugins.path", str(Path(__file__).parents[1] / "guests"))
PARALLEL, STACKED, SWITCH = (CONFIGS / f"{name}.toml" for name in ("parallel", "stacked", "switch"))
COUNTS = ("most_tokens", "used_experts")
PACKED = ("--data.packing", "document_mask")


@pytest.mark.parametrize(
    "degrees",
    [swept_case({"slicer": 4}), {"slicer": 2, "tp": 2}, swept_case({"slicer": 2, "pp": 2, "dp_shard": 2})],
    ids=str,
)
def test_a_sequence_sliced_from_outside(degrees: dict[str, int], same_curve) -> None:
    ranks = 8 if len(degrees) == 3 else 4
    same_curve(ranks, [*GUESTS, *PACKED, *mesh(**degrees)], PACKED)


@pytest.mark.parametrize(
    "words", [[], ["--mesh.cp", "2", "--plugins.context.method", "ulysses"]], ids=["alone", "ulysses"]
)
def test_another_attention_kernel(words: list[str], same_curve) -> None:
    same_curve(2 if words else 1, [*GUESTS, *PACKED, "--plugins.tiled.keys", "5", *words], PACKED)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.sliding_window", "5"], r"technique tiled replaces attention, .* its window of 5 positions"),
        (["--mesh.cp", "2"], r"techniques \w+ and \w+ both replace attention"),
    ],
    ids=["window", "ring"],
)
def test_an_operation_that_would_leave_something_out_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises((PluginError, RankError), match=said):
        train_job(tmp_path, 2 if "--mesh.cp" in words else 1, *GUESTS, "--plugins.tiled.keys", "5", *words)


def test_sequences_are_split_by_one_technique() -> None:
    with pytest.raises(ConfigError, match=r"and mesh\.cp would both slice sequences; set one of them to 1"):
        load_job(LLAMA, [*GUESTS, "--data.path", "x", *mesh(cp=2, slicer=2)])


@pytest.mark.parametrize(
    "degrees",
    [{"dp_shard": 2, "tp": 2}, *map(swept_case, [{"pp": 2, "dp_shard": 2}, {"cp": 2, "dp_replicate": 2}])],
    ids=str,
)
def test_a_loss_without_all_logits(degrees: dict[str, int], same_curve) -> None:
    same_curve(4, [*GUESTS, "--loss.name", "frugal", *mesh(**degrees)])


WHOLE = ["--plugins.tensor.sequence_parallel", "false"]


@pytest.mark.parametrize(
    "words",
    [mesh(tp=2, pp=2), swept_case([*mesh(dp_shard=2, tp=2), *WHOLE]), swept_case(mesh(cp=2, pp=2))],
    ids=" ".join,
)
def test_a_model_of_shared_layers(words: list[str], same_curve) -> None:
    same_curve(4, [*PACKED, *words], PACKED, PARALLEL)


NOISE = ("--plugins.neftune.alpha", "20")
COMPILED = ["--plugins.compile.backend", "aot_eager"]


@pytest.mark.parametrize(
    "words",
    [
        [*mesh(tp=2, pp=2), "--plugins.activation_checkpoint.mode", "full"],
        swept_case([*mesh(dp_shard=2, tp=2), *WHOLE, *COMPILED]),
        swept_case(mesh(cp=2, dp_shard=2)),
    ],
    ids=" ".join,
)
def test_noise_from_outside(words: list[str], one_rank, same_curve) -> None:
    noisy = same_curve(4, [*GUESTS, *NOISE, *words], (*GUESTS, *NOISE))
    plain = one_rank(*THREE_STEPS, config=LLAMA)
    assert abs(noisy.rows[1]["loss"] / plain.rows[1]["loss"] - 1) > 1e-4  # there is noise


def test_a_model_of_shared_layers_is_planned() -> None:
    job = load_job(PARALLEL, ["--data.path", "nowhere", *mesh(tp=2)], 2)
    costs, net = costs_of(job), job.model.build()
    assert job.spec.params == sum(p.numel() for p in net.parameters())
    assert flops_per_token(costs)[0] == pytest.approx(job.spec.flops_per_token(job.data.seq_len))
    assert Planner(CLUSTER).predict(costs, job.layout).step_time_s > 0


def test_a_model_of_shared_layers_generates_with_a_cache(tmp_path: Path) -> None:
    """On one rank and on two with a cache, and on four stages and slices without: the same text, beyond the window."""
    train_job(tmp_path, 1, *SAVING, config=PARALLEL)
    words = ["generate", "--checkpoint", str(tmp_path / "run"), *GUESTS, "--prompt", "the model", "--json"]
    words += ["--max-new-tokens", "16", "--temperature", "0", "--run.device", "cpu"]
    texts = []
    for ranks, layout in (("1", []), ("2", mesh(tp=2)), ("4", mesh(tp=2, pp=2))):
        done = run_titan([*words, *layout], tmp_path, {"NPROC": ranks})
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout)["tokens"])
    assert len(texts[0]) == 16 and texts[0] == texts[1] == texts[2]


FIRST = ("--plugins.spread.enabled", "true")
"""Tensor parallelism wants every parameter placed when its turn comes: the technique of stacks stands above it."""


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"dp_shard": 4, "spread": 2}, ["--plugins.fsdp.zero_stage", "3"]),
        swept_case(({"dp_shard": 2, "cp": 2, "spread": 4}, [])),
        swept_case(({"dp_shard": 2, "pp": 2, "spread": 2}, [])),
        swept_case(({"dp_shard": 4, "tp": 2, "spread": 2}, [*FIRST, *WHOLE])),
        swept_case(
            (
                {"dp_shard": 2, "cp": 2, "dp_replicate": 2, "spread": 2},
                ["--plugins.fsdp.zero_stage", "2", "--train.micro_batch_size", "1"],
            )
        ),
        swept_case(({"cp": 2, "dp_replicate": 2, "spread": 2}, ["--plugins.ddp.enabled", "true"])),
    ],
    ids=str,
)
def test_stacks_spread_over_ranks_of_other_axes(degrees: dict[str, int], words: list[str], same_curve) -> None:
    ranks = math.prod(degree for axis, degree in degrees.items() if axis != "spread")
    same_curve(ranks, [*PACKED, *mesh(**degrees), *words], PACKED, STACKED)


@pytest.mark.sweep
def test_stacks_are_saved_and_resumed_spread_otherwise(one_rank, tmp_path: Path) -> None:
    def run(until: int, **degrees: int) -> Outcome:
        words = [*PACKED, *SAVING, "--checkpoint.every", "2", "--train.steps", str(until), *mesh(**degrees)]
        return train_job(tmp_path, 4, *words, config=STACKED)

    run(2, dp_shard=4, spread=2)
    run(4, dp_shard=2, dp_replicate=2)
    assert_same_curve(one_rank(*PACKED, config=STACKED), run(6, dp_shard=2, cp=2, spread=4))


def test_stacks_are_rehearsed() -> None:
    job = load_job(STACKED, ["--data.path", "nowhere", *mesh(dp_shard=2, dp_replicate=2, cp=2, spread=2)], 8)
    found = {c.axes for c in dry_run(job, 5).collectives}
    assert {"spread", "dp_shard x cp / spread", "dp_shard x cp"} <= found


SWITCHED = [
    {"dp_shard": 4, "ep": 4},
    swept_case({"dp_shard": 2, "cp": 2, "ep": 2, "tp": 2}),
    swept_case({"dp_shard": 2, "pp": 2, "ep": 2}),
    swept_case({"tp": 2, "cp": 2}),
]


@pytest.mark.parametrize("degrees", SWITCHED, ids=str)
def test_a_mixture_from_outside(degrees: dict[str, int], one_rank, tmp_path: Path) -> None:
    """Its router's loss counts once whatever slices sequences or layers, and its experts travel as the host's do."""
    ranks = math.prod(degree for axis, degree in degrees.items() if axis != "ep")
    expected = one_rank(config=SWITCH)
    found = train_job(tmp_path, ranks, *mesh(**degrees), config=SWITCH)
    assert_same_curve(expected, found)
    for step, row in found.rows.items():
        assert [row[key] for key in COUNTS] == [expected.rows[step][key] for key in COUNTS]


def test_a_side_loss_changes_the_curve(one_rank, tmp_path: Path) -> None:
    alone = train_job(tmp_path, 1, config=SWITCH, run=_without_side_losses)
    found = one_rank(config=SWITCH)
    assert alone.rows[1]["loss"] == found.rows[1]["loss"]  # it is not what the logs show
    assert abs(alone.rows[1]["grad_norm"] / found.rows[1]["grad_norm"] - 1) > 1e-3


def _without_side_losses(*args: Any) -> dict[str, Any]:
    SideLoss.forward = lambda self, x, loss: x  # type: ignore[method-assign]
    return run_job(*args)


MUON = (*GUESTS, "--optimizer.name", "whole_muon")
CASES = {
    "tp x pp, llama": (mesh(tp=2, pp=2), LLAMA, "3e-3"),
    "tp x pp, gpt": (mesh(tp=2, pp=2), GPT, "3e-4"),
    "fsdp x tp, llama": (mesh(tp=2), LLAMA, "3e-3"),
    "fsdp x pp, gpt": (mesh(pp=2), GPT, "3e-4"),
    "each matrix of a stack": (mesh(dp_shard=4, spread=2), STACKED, "3e-3"),
}


@pytest.mark.parametrize("case", sweep_but(CASES, "tp x pp, llama", "each matrix of a stack"))
def test_muon_has_one_curve_on_shards_slices_and_stages(case: str, tmp_path: Path) -> None:
    layout, config, lr = CASES[case]
    words = (*MUON, "--optimizer.lr", lr)
    alone = train_job(tmp_path / "1", 1, *words, config=config)
    assert_same_curve(alone, train_job(tmp_path / "4", 4, *words, *layout, config=config))


@pytest.mark.sweep
def test_muon_resumes_on_another_layout(tmp_path: Path) -> None:
    alone = train_job(tmp_path, 1, *MUON, name="alone")
    train_job(tmp_path, 4, *MUON, *SAVING, *mesh(tp=2), "--train.steps", "4")
    assert_same_curve(alone, train_job(tmp_path, 4, *MUON, *SAVING, *mesh(pp=2)))
