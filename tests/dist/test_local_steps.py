"""Workers that drift: exact where they must be, one curve at any layout inside of a worker, through resumes."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.commands import run_titan
from tests.dist.test_nonfinite import SKIP, inject_nan
from tests.jobs import FOUR_LAYERS, LLAMA, MOE, SAVING, THREE_STEPS, mesh, of_each_worker, stored
from tests.sweeps import swept_case
from titan.config import load_job
from titan.contracts import ModelPart
from titan.contracts.base.layout import Axis, lay_out
from titan.contracts.base.mesh import Mesh
from titan.errors import ConfigError
from titan.plugins.parallel.local_steps import BLOCK, LocalSteps, decoded, encoded
from titan.testing.jobs import (
    LOSS_RTOL,
    WEIGHT_ATOL,
    WEIGHT_RTOL,
    Outcome,
    agreed,
    assert_same_curve,
    saved_tensors,
    train_job,
    trained,
    whole,
)
from titan.testing.ranks import RankError, run_ranks

SGD = ("--optimizer.name", "sgd", "--optimizer.lr", "0.1", "--train.grad_clip", "0")


def local(every: int, **options: object) -> list[str]:
    """Words of a command line that set options of the technique."""
    given = {"every": every, **options}
    return [word for name, value in given.items() for word in (f"--plugins.local_steps.{name}", str(value))]


NESTEROV = local(3, outer="nesterov", outer_lr=0.6, outer_momentum=0.8)


def assert_same_losses_and_weights(one: Outcome, other: Outcome) -> None:
    """Norms are the workers' own: they are not those of the mean gradient."""
    assert one.rows.keys() == other.rows.keys()
    for step, row in one.rows.items():
        assert other.rows[step]["loss"] == pytest.approx(row["loss"], rel=LOSS_RTOL), step
    for name, weight in one.weights.items():
        torch.testing.assert_close(other.weights[name], weight, rtol=WEIGHT_RTOL, atol=WEIGHT_ATOL, msg=name)


def assert_one_update_skipped(run: Outcome) -> None:
    """Of two workers, in step 2 of 4; the other's was made, and all go on."""
    assert [run.rows[step]["skipped_updates"] for step in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert [run.rows[step]["valid_tokens"] for step in (1, 2, 3, 4)] == [128, 192, 320, 448]
    assert all(weight.isfinite().all() for weight in run.weights.values())


@pytest.mark.parametrize(
    "words",
    [
        [*mesh(worker=4), *local(1)],
        [*mesh(worker=2, dp_shard=2), *local(1)],
        [*mesh(worker=2, pp=2), *local(1, outer="nesterov", outer_lr=1.0, outer_momentum=0.0)],
    ],
)
def test_an_exchange_after_every_step_is_data_parallelism(words: list[str], one_rank, tmp_path: Path) -> None:
    many = train_job(tmp_path, 4, *THREE_STEPS, *SGD, *words)
    assert_same_losses_and_weights(one_rank(*THREE_STEPS, *SGD), many)


@pytest.mark.parametrize(
    ("ranks", "words", "config"),
    [
        swept_case((8, mesh(worker=2, dp_shard=2, tp=2), LLAMA)),
        swept_case((4, [*mesh(worker=2, pp=2), "--model.tied", "true"], LLAMA)),
        swept_case((4, mesh(worker=2, dp_replicate=2), LLAMA)),
        (4, mesh(worker=2, dp_shard=2, ep=2), MOE),
    ],
)
def test_one_curve_at_any_layout_inside_of_a_worker(ranks: int, words: list[str], config: Path, tmp_path: Path) -> None:
    """Loss, norm and weights, of the workers' mean and of each; ranks that hold the same weight agree to the bit."""
    same = [*NESTEROV, *(words[-2:] if "tied" in words[-2] else ())]
    one = train_job(tmp_path, 2, *mesh(worker=2), *same, config=config, name="one")
    many = train_job(tmp_path, ranks, *words, *same, config=config, name="many")
    assert_same_curve(one, many)
    for step, row in one.rows.items():
        for name in ("loss_worker_0", "loss_worker_1", "grad_norm_worker_0", "grad_norm_worker_1"):
            assert many.rows[step][name] == pytest.approx(row[name], rel=1e-4), (step, name)
        assert row["loss"] == pytest.approx((row["loss_worker_0"] + row["loss_worker_1"]) / 2, rel=1e-12)
        assert row["loss_worker_0"] != row["loss_worker_1"]
    assert min(row for row, found in one.rows.items() if "worker_drift" in found) == 3


def mesh_of_workers() -> Mesh:
    """Of which each rank is one."""
    axis = Axis(name="worker", data="dealt", weights="own", topology_order=0, doc="")
    layout, _ = lay_out([axis], {"worker": dist.get_world_size()}, dist.get_world_size())
    return Mesh(layout, torch.device("cpu"), dist.get_rank())


def _outer_steps(
    config: dict[str, Any], drifts: list[list[Tensor]], last: int = 1000
) -> tuple[Tensor, list[list[int]]]:
    """On a rank: the technique on one weight, moved by `drifts[step][worker]`; the weight, and what is due when."""
    technique, workers = LocalSteps(LocalSteps.Config(**config)), mesh_of_workers()
    schedule = SimpleNamespace(factor=lambda step, _: 1 / step)
    job = SimpleNamespace(train=SimpleNamespace(steps=last), lr_schedule=schedule)
    model = nn.Linear(7, 1, bias=False)
    nn.init.zeros_(model.weight)
    spec = SimpleNamespace(layer_names=lambda: ["a"])
    context: Any = SimpleNamespace(job=job, mesh=workers, spec=spec, device=workers.device)
    technique.apply(ModelPart(model), context)
    technique.load_state_dict({})
    due = []
    for step, drift in enumerate(drifts, 1):
        with torch.no_grad():
            model.weight += drift[dist.get_rank()]
        technique.after_step(step, torch.tensor(True))
        due.append(technique.state_dict()["due"])
    return model.weight.detach(), due


def test_the_outer_step_is_nesterovs(tmp_path: Path) -> None:
    """Against the recurrence in float64, with three workers and an exchange after every second step."""
    generator = torch.Generator().manual_seed(0)
    drifts = [[torch.randn(7, generator=generator) for _ in range(3)] for _ in range(6)]
    config = {"every": 2, "outer": "nesterov", "outer_lr": 0.6, "outer_momentum": 0.8}
    found = run_ranks(_outer_steps, 3, config, drifts)
    weights, momentum = torch.zeros(2, 7, dtype=torch.float64)
    for first in (0, 2, 4):
        change = -torch.stack([*drifts[first], *drifts[first + 1]]).double().sum(0) / 3
        momentum = 0.8 * momentum + change
        weights = weights - 0.6 * (change + 0.8 * momentum)
    for weight, _ in found:
        torch.testing.assert_close(weight[0].double(), weights, rtol=1e-5, atol=1e-6)


def test_a_falling_rate_makes_exchanges_rare() -> None:
    """At rate 1 / step, what is exchanged at step 2 waits for 2 x 2^2 steps."""
    drifts = [[torch.zeros(7)] for _ in range(11)]
    [(_, due)] = run_ranks(_outer_steps, 1, {"every": 2, "schedule": "quadratic"}, drifts)
    assert [one for [one] in due] == [2, *[10] * 8, 210, 210]


@pytest.mark.parametrize("form", ["fp32", "int8", "int4"])
def test_numbers_come_back_to_half_a_step(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 2 * BLOCK, generator=generator) * torch.tensor([1e-6, 1.0, 1e6])[:, None]
    rows[1, :BLOCK] = 0
    sent = encoded(rows, form)
    assert sent.nbytes == {"fp32": rows.nbytes, "int8": 6 * (BLOCK + 4), "int4": 6 * (BLOCK // 2 + 4)}[form]
    steps = {"fp32": torch.inf, "int8": 127, "int4": 7}[form]
    blocks = rows.unflatten(1, (2, BLOCK))
    off = (decoded(sent, form).unflatten(1, (2, BLOCK)) - blocks).abs()
    assert (off <= blocks.abs().amax(-1, keepdim=True) * (0.5001 / steps)).all()
    assert (form == "fp32") == bool((off == 0).all())


def _gone_back(folder: Path, name: str, step: int, to: str) -> Path:
    """A copy of a run without the checkpoints after a step; returns that step's."""
    shutil.copytree(folder / name, folder / to)
    checkpoints = folder / to / "checkpoints"
    for path in checkpoints.glob("step-*"):
        if path.name > f"step-{step:08}":
            shutil.rmtree(path)
    return checkpoints / f"step-{step:08}"


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        swept_case(({}, mesh(dp_replicate=2))),
        ({"outer": "nesterov", "offload": "true"}, mesh(pp=2)),
        # Quantised at the same layout: where rounding differs, a number between two levels may go to either.
        ({"exchange": "int8"}, []),
        swept_case(({"exchange": "int4", "outer": "nesterov"}, [])),
        ({"outer": "nesterov", "fragments": 2}, mesh(tp=2)),
        swept_case(({}, mesh(dp_shard=2, tp=2))),
    ],
)
def test_gone_on_from_the_middle_of_h_nothing_is_lost(
    options: dict[str, object], layout: list[str], tmp_path: Path
) -> None:
    """At any layout inside of the workers: what was agreed on, the momentum, each worker's weights and moments."""
    same = [*local(3, **options), *SAVING, "--checkpoint.keep_latest", "0", "--train.steps", "8"]
    through = train_job(tmp_path, 2, *mesh(worker=2), *same)
    middle = _gone_back(tmp_path, "run", 4, "again")
    tensors = stored(middle).tensors
    for name in ("model.embed.weight", "optimizer.embed.weight.exp_avg", "optimizer.embed.weight.step"):
        assert tensors[name].stacked and tensors[name].shape[0] == 2
    ranks = 2 * 2 ** (len(layout) // 2)
    again = train_job(tmp_path, ranks, *mesh(worker=2), *layout, *same, name="again")
    assert_same_curve(through, again)


def test_another_number_of_workers_begins_with_the_mean(tmp_path: Path) -> None:
    """4 workers, then 2, then 8, then one rank: from the middle of H, at a rate of almost nothing."""
    still = ["--optimizer.lr", "1e-30", "--optimizer.weight_decay", "0"]
    same = [*local(100), *SAVING, "--checkpoint.every", "2", "--checkpoint.keep_latest", "0", "--train.steps", "8"]
    train_job(tmp_path, 4, *mesh(worker=4), *same, "--optimizer.lr", "1e-2")
    middle = _gone_back(tmp_path, "run", 2, "again")
    workers = {name: of_each_worker(middle, name) for name in stored(middle).tensors if name.startswith("model.")}
    assert all(len(each) == 4 and not torch.equal(each[0], each[1]) for each in workers.values())
    mean = {name: torch.stack(each).double().mean(0).float() for name, each in workers.items()}
    alone = ["--plugins.local_steps.enabled", "false"]
    for step, ranks, words in ((4, 2, mesh(worker=2)), (6, 8, mesh(worker=8)), (8, 1, alone)):
        train_job(tmp_path, ranks, *words, *same, *still, "--train.steps", str(step), name="again")
        found = saved_tensors(tmp_path / "again" / "checkpoints" / f"step-{step:08}")
        for name in mean:
            torch.testing.assert_close(found[name], mean[name], rtol=1e-6, atol=1e-7, msg=name)
    said = (tmp_path / "again" / "logs" / "rank-0.log").read_text()
    for axis, before, now in (("worker", 4, 2), ("worker", 2, 8), ("workers", 8, 1)):
        assert f"{axis}: {before} ranks had tensors of their own; their mean goes to each of {now}" in said


def test_mean_of_the_workers_is_what_commands_use(tmp_path: Path) -> None:
    """`eval` of a checkpoint in the middle of H, and of the folder into which it was converted."""
    same = [*local(100), *SAVING, "--checkpoint.keep_latest", "0", "--optimizer.lr", "3e-2", "--train.steps", "5"]
    train_job(tmp_path, 2, *mesh(worker=2), *same)
    middle = _gone_back(tmp_path, "run", 4, "again")
    run, text = str(tmp_path / "again"), ["--data", "text", "--path", str(tmp_path / "text")]
    assert stored(middle).tensors["model.norm.weight"].stacked
    done = run_titan(["convert", "--from", run, "--output", str(tmp_path / "kept"), "--format", "titan"], tmp_path)
    assert done.returncode == 0, done.stderr
    evals = [
        run_titan(["eval", "--checkpoint", path, *text, "--json"], tmp_path) for path in (run, str(tmp_path / "kept"))
    ]
    assert [done.returncode for done in evals] == [0, 0], [done.stderr for done in evals]
    first, second = (json.loads(done.stdout)["loss"] for done in evals)
    assert first == pytest.approx(second, rel=1e-6)


def test_a_nan_of_one_worker_skips_its_update_alone(tmp_path: Path) -> None:
    """The worker goes on from its next batch; too many in a row on one worker end the run, on all ranks alike."""
    words = [*mesh(worker=2), *local(4), *inject_nan(2, rank=1), "--train.steps", "4"]
    found = train_job(tmp_path, 2, *words, *SKIP)
    assert_one_update_skipped(found)
    assert found.rows[2]["grad_norm_worker_1"] is None and found.rows[2]["grad_norm_worker_0"] is not None
    with pytest.raises(RankError, match=r"step 2 gave loss .* its update was skipped"):
        train_job(tmp_path, 2, *words, name="stopped")


@pytest.mark.parametrize(
    ("words", "told"),
    [(local(4, fragments=5), "fragments = 5: at most one per step and per layer, so 2"), (local(0), "every")],
)
def test_what_cannot_work_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_job(LLAMA, ["--data.path", "text", *mesh(worker=2), *words], 2)


@pytest.mark.parametrize(
    ("outer", "left"), [("average", "nothing changes"), ("nesterov", "the outer step is the worker's own")]
)
def test_a_worker_alone_is_told(outer: str, left: str, tmp_path: Path, capfd) -> None:
    """And so it is: the weights are those of a run without local steps, but for the outer step."""
    same = ("--train.steps", "2")
    plain = train_job(tmp_path, 1, *same, name="plain").weights
    assert "mesh.worker" not in capfd.readouterr().out
    alone = train_job(tmp_path, 1, *local(1, outer=outer), *same).weights
    said = f"warning: [plugins.local_steps] mesh.worker = 1, so nothing is exchanged and {left}; set it above 1"
    assert capfd.readouterr().out.count(said) == 1
    assert all(weight.equal(plain[name]) for name, weight in alone.items()) == (outer == "average")


def test_replicas_agree_whatever_slices_the_rest(tmp_path: Path) -> None:
    """Quantised, with norms that both ranks of tp hold and a table that both stages hold: the weights are checked."""
    words = [*mesh(worker=2, tp=2, pp=2), *local(2, exchange="int4"), "--model.tied", "true", "--train.steps", "4"]
    train_job(tmp_path, 8, *words)


def _each_part(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: train the job; the weights of its parts, which hold the same where they hold one name."""
    parts = trained(folder, words, config).parts
    return agreed({name: whole(p.detach()) for name, p in part.parameters()} for part in parts)


def test_a_tied_table_on_both_stages_of_a_rank_stays_one(tmp_path: Path) -> None:
    words = [*mesh(worker=2, pp=2), *local(2), *FOUR_LAYERS, "--model.tied", "true", "--train.steps", "4"]
    train_job(tmp_path, 4, *words, "--plugins.pipeline.schedule", "ZBVZeroBubble", run=_each_part)


def test_a_first_update_is_made_by_all_workers_or_by_none(tmp_path: Path) -> None:
    """Else only some would have state to save: SGD makes its sums at the first update."""
    words = [*mesh(worker=2), *local(4), *inject_nan(1, rank=1), *SKIP, *SAVING, "--checkpoint.every", "1"]
    found = train_job(tmp_path, 2, *words, *SGD, "--optimizer.momentum", "0.9", "--train.steps", "2")
    assert [found.rows[step]["skipped_updates"] for step in (1, 2)] == [2, 2]


def test_validation_of_a_worker_is_the_same_at_any_layout_inside(tmp_path: Path) -> None:
    words = [*local(100), "--train.steps", "2", "--validation.every", "1", "--validation.samples", "7"]
    words += ["--validation.name", "text", "--validation.path", str(tmp_path / "text")]
    one = train_job(tmp_path, 2, *mesh(worker=2), *words, name="one")
    many = train_job(tmp_path, 4, *mesh(worker=2, dp_shard=2), "--train.micro_batch_size", "1", *words, name="many")
    assert one.rows[1]["validation_loss"] == pytest.approx(many.rows[1]["validation_loss"], rel=LOSS_RTOL)


def test_fragments_take_turns() -> None:
    """Three of them in H 6: at the second, fourth and sixth step, and so on."""
    drifts = [[torch.zeros(7)] for _ in range(7)]
    [(_, due)] = run_ranks(_outer_steps, 1, {"every": 6, "fragments": 3}, drifts, 5)
    # The last step of a run has all of them, and leaves the turns as they are for a run that is made longer.
    assert due == [[2, 4, 6], [8, 4, 6], [8, 4, 6], [8, 10, 6], [8, 10, 6], [8, 10, 12], [8, 10, 12]]
