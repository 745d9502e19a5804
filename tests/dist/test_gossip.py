"""Workers that average with neighbors: graphs, recurrences in float64, data parallelism where the mean is exact."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.test_local_steps import (
    SGD,
    _gone_back,
    assert_one_update_skipped,
    assert_same_losses_and_weights,
    mesh_of_workers,
)
from tests.dist.test_nonfinite import SKIP, inject_nan
from tests.jobs import (
    FOUR_LAYERS,
    LLAMA,
    MOE,
    SAVING,
    THREE_STEPS,
    mesh,
    of_each_worker,
    run_with_state,
    stored,
)
from tests.planned import CLUSTER, job_of
from tests.sweeps import swept_case
from titan.config import load_job
from titan.contracts import ModelPart
from titan.errors import ConfigError
from titan.planner.dryrun.run import dry_run
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner
from titan.plugins.parallel import gossip
from titan.plugins.parallel.gossip import Gossip, averaged
from titan.testing.jobs import assert_same_curve, saved_tensors, train_job
from titan.testing.ranks import run_ranks

GRAPHS = get_args(get_type_hints(Gossip.Config)["graph"])
WIDTH = 64
"""Of the layer whose steps are compared: sums in another order are then not all the same by chance."""
SIX = ("--train.global_batch_size", "6", "--train.micro_batch_size", "1")
V_SHAPED = ("--plugins.pipeline.schedule", "ZBVZeroBubble", "--train.micro_batch_size", "1")
TIED = ("--model.tied", "true")


def words_of(graph: str, **options: object) -> list[str]:
    """Words of a command line that set options of the technique."""
    given = {"graph": graph, **options}
    return [word for name, value in given.items() for word in (f"--plugins.gossip.{name}", str(value))]


TRACKING = words_of("ring", tracking="true", momentum=0.9)


def mixing(graph: str, workers: int, step: int) -> np.ndarray:
    """W, float64."""
    matrix = np.zeros((workers, workers))
    for row, members in zip(matrix, averaged(graph, workers, step), strict=True):
        row[members] = 1 / len(members)
    return matrix


@pytest.mark.parametrize("graph", GRAPHS)
def test_mixing_keeps_the_mean_and_brings_all_to_it(graph: str) -> None:
    """Doubly stochastic in each step; over a period all but the mean shrinks, to nothing with "one_peer" and K 2^m."""
    for workers in (1, 2, 3, 4, 6, 7, 8, 9, 12, 16, 31):
        period, product = max(1, (workers - 1).bit_length()), np.eye(workers)
        for step in range(1, period + 1):
            matrix = mixing(graph, workers, step)
            assert (matrix >= 0).all() and (matrix.diagonal() > 0).all()
            for axis in (0, 1):
                np.testing.assert_allclose(matrix.sum(axis), 1, rtol=1e-15)
            product = matrix @ product
        mean = np.full((workers, workers), 1 / workers)
        assert np.linalg.norm(product - mean, 2) < 1 - 1e-4, workers
        if graph == "one_peer" and workers & (workers - 1) == 0:
            assert (product == mean).all(), workers


def test_gaps_and_neighbors_are_those_of_the_table() -> None:
    """Of 16 workers; see the module's docstring."""
    gaps = {graph: 1 - np.linalg.norm(mixing(graph, 16, 1) - 1 / 16, 2) for graph in GRAPHS}
    assert gaps["ring"] == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / 16)))
    assert gaps["torus"] == pytest.approx(2 / 5 * (1 - np.cos(2 * np.pi / 4)))
    assert gaps["exponential"] == pytest.approx(2 / (1 + 4))
    assert [len(averaged(graph, 16, 1)[0]) - 1 for graph in GRAPHS] == [2, 4, 4, 1]
    assert [averaged("one_peer", 16, step)[15] for step in range(1, 6)] == [[0, 15], [1, 15], [3, 15], [7, 15], [0, 15]]
    assert averaged("torus", 6, 1)[1] == [0, 1, 2, 4]


def _mixed_steps(config: dict[str, Any], gradients: Tensor, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """On a rank: SGD at rate 0.1 with the technique, by `gradients[step, worker]` [2, 5]; a buffer counts workers.

    Returns weights and buffer, flat, and what it measures, after each step.
    """
    gossip.BUCKET = 2 * WIDTH + 2  # weight and bias, then the buffer
    rank = dist.get_rank()
    technique = Gossip(Gossip.Config(**config))
    model = nn.Linear(WIDTH, 2)
    model.register_buffer("count", torch.zeros(3))
    model.register_buffer("whole", torch.zeros((), dtype=torch.int64))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    job = SimpleNamespace(train=SimpleNamespace(steps=steps))
    context: Any = SimpleNamespace(job=job, mesh=mesh_of_workers())
    technique.apply(ModelPart(model), context)
    technique.load_state_dict({})
    found, measured = [], []
    for step, gradient in enumerate(gradients[:, rank], 1):
        model.weight.grad = gradient.clone()  # the bias never has one
        technique.before_update(model.weight.grad.norm())
        with torch.no_grad():
            if gradient.isfinite().all():
                model.weight -= 0.1 * model.weight.grad
            model.count += rank
        technique.after_step(step, gradient.isfinite().all())
        found.append(torch.cat([model.weight.detach().flatten(), model.count]))
        measured.append(technique.measure()["consensus_distance"])
    return found, measured


@pytest.mark.parametrize(
    ("config", "workers"),
    [
        ({"graph": "ring"}, 4),
        ({"graph": "one_peer", "tracking": True}, 4),
        ({"graph": "exponential", "tracking": True, "momentum": 0.8}, 5),
        ({"graph": "torus", "tracking": True, "momentum": 0.8}, 6),
    ],
    ids=lambda value: value["graph"] if isinstance(value, dict) else "",
)
def test_the_steps_are_those_of_the_papers(config: dict[str, Any], workers: int) -> None:
    """Against the recurrences in float64, and the distance from the mean; one worker leaves out its third step."""
    gradients = torch.randn(6, workers, 2, WIDTH, generator=torch.Generator().manual_seed(0))
    gradients[2, 1] = torch.nan
    ranks = run_ranks(_mixed_steps, workers, config, gradients, 6)
    weights, tracked, summed = (np.zeros((workers, 2 * WIDTH)) for _ in range(3))
    count = np.zeros((workers, 3))
    for step in range(6):
        given = gradients[step].flatten(1).double().numpy()
        made = np.isfinite(given).all(1, keepdims=True)
        now = np.where(made, config.get("momentum", 0.0) * summed + given, summed)
        tracked, summed = tracked + now - summed, now
        stepped_by = tracked if config.get("tracking") else np.nan_to_num(given)
        matrix = mixing(config["graph"], workers, step + 1) if step < 5 else np.full((workers, workers), 1 / workers)
        weights = matrix @ (weights - 0.1 * np.where(made, stepped_by, 0))
        tracked, count = matrix @ tracked, matrix @ (count + np.arange(workers)[:, None])
        np.testing.assert_allclose(tracked.sum(0), summed.sum(0), rtol=1e-12, atol=1e-12)
        for worker, (found, _) in enumerate(ranks):
            wanted = np.concatenate([weights[worker], count[worker]])
            np.testing.assert_allclose(found[step].double(), wanted, rtol=1e-5, atol=1e-6)
        total, numbers = torch.stack([measured[step] for _, measured in ranks]).sum(0).tolist()
        assert numbers == (2 * WIDTH + 2) * workers
        wanted = np.square(weights - weights.mean(0)).sum() / (2 * WIDTH + 2) / workers  # the bias is 0 on all
        assert total / numbers == pytest.approx(wanted, rel=1e-5, abs=1e-12)
    assert all(torch.equal(found[-1], ranks[0][0][-1]) for found, _ in ranks)


def test_a_mean_over_all_has_the_same_bits_on_each() -> None:
    """A ring of three, in steps before the last."""
    gradients = torch.randn(2, 3, 2, WIDTH, generator=torch.Generator().manual_seed(0))
    (first, _), *others = run_ranks(_mixed_steps, 3, {"graph": "ring"}, gradients, 6)
    assert all(torch.equal(one, other) for found, _ in others for one, other in zip(first, found, strict=True))


@pytest.mark.parametrize(
    ("ranks", "words", "same"),
    [
        (2, [*mesh(worker=2), *words_of("one_peer")], ()),
        (3, [*mesh(worker=3), *words_of("ring")], SIX),
        (4, [*mesh(worker=2, dp_shard=2), *words_of("exponential", tracking="true")], ()),
        (4, [*mesh(worker=2, pp=2), *words_of("ring", tracking="true"), *V_SHAPED], (*TIED, *FOUR_LAYERS)),
        swept_case((6, [*mesh(worker=3, tp=2), *words_of("exponential")], SIX)),
        swept_case((4, [*mesh(worker=2, dp_replicate=2), *words_of("one_peer", tracking="true")], ())),
    ],
)
def test_an_exact_mean_after_every_step_is_data_parallelism(
    ranks: int, words: list[str], same: tuple[str, ...], one_rank, tmp_path: Path
) -> None:
    """Loss and weights; both copies of a tied table on a rank of a V-shaped schedule have the same bits."""
    many = train_job(tmp_path, ranks, *THREE_STEPS, *SGD, *same, *words, run=run_with_state)
    assert_same_losses_and_weights(one_rank(*THREE_STEPS, *SGD, *same), many)


def test_tracked_momentum_is_the_optimizers(one_rank, tmp_path: Path) -> None:
    """The mean of tracked gradients has the momentum of the run that data parallelism makes with it."""
    one = one_rank(*SGD, "--optimizer.momentum", "0.9")
    many = train_job(tmp_path, 2, *SGD, *mesh(worker=2), *TRACKING)
    assert_same_losses_and_weights(one, many)


@pytest.mark.parametrize(
    ("ranks", "words", "config"),
    [
        (8, mesh(worker=4, tp=2), LLAMA),
        swept_case((8, [*mesh(worker=4, pp=2), *TIED], LLAMA)),
        swept_case((8, mesh(worker=2, dp_shard=2, tp=2), LLAMA)),
        swept_case((8, mesh(worker=4, dp_shard=2, ep=2), MOE)),
    ],
)
def test_one_curve_at_any_layout_inside_of_a_worker(ranks: int, words: list[str], config: Path, tmp_path: Path) -> None:
    """Loss, norm and weights, of the workers' mean and of each; ranks that hold the same weight agree to the bit."""
    same = [*TRACKING, *(TIED if "--model.tied" in words else ())]
    one = train_job(tmp_path, int(words[1]), *words[:2], *same, config=config, name="one")
    many = train_job(tmp_path, ranks, *words, *same, config=config, name="many")
    assert_same_curve(one, many)
    for step, row in one.rows.items():
        for name in (name for name in row if "_worker_" in name):
            assert many.rows[step][name] == pytest.approx(row[name], rel=1e-4), (step, name)
    distances = [row["consensus_distance"] for row in one.rows.values()]
    assert distances[-1] == 0 and (int(words[1]) == 2 or min(distances[:-1]) > 0)


def test_gone_on_in_the_middle_of_a_period(tmp_path: Path) -> None:
    """At another layout inside of the workers: each one's weights and tracked gradients, and whose turn it is."""
    options = words_of("one_peer", tracking="true", momentum=0.9)
    same = [*options, *SAVING, "--checkpoint.every", "3", "--checkpoint.keep_latest", "0", "--train.steps", "6"]
    whole = train_job(tmp_path, 4, *mesh(worker=4), *same)
    middle = _gone_back(tmp_path, "run", 3, "again")
    tensors = stored(middle).tensors
    for name in ("model.embed.weight", "rest.techniques.gossip.tracked.embed.weight"):
        assert tensors[name].stacked and tensors[name].shape[0] == 4
    again = train_job(tmp_path, 8, *mesh(worker=4, dp_shard=2), *same, name="again")
    assert_same_curve(whole, again)


@pytest.mark.sweep
def test_another_number_of_workers_begins_with_the_mean(tmp_path: Path) -> None:
    """4 workers, then 2, then 4: weights stay at a rate of almost nothing, and c keeps the mean of u."""
    same = [*TRACKING, *SAVING, "--checkpoint.every", "2", "--checkpoint.keep_latest", "0"]
    still = ["--optimizer.lr", "1e-30", "--optimizer.weight_decay", "0"]
    train_job(tmp_path, 4, *mesh(worker=4), *same, "--train.steps", "4", "--optimizer.lr", "1e-2")
    middle = _gone_back(tmp_path, "run", 2, "again")
    assert stored(middle).tensors["model.norm.weight"].stacked
    mean = saved_tensors(middle)
    for name in (name for name in mean if name.startswith("model.")):
        mean[name] = torch.stack(of_each_worker(middle, name)).double().mean(0).float()
    for steps, workers in ((4, 2), (6, 4)):
        train_job(tmp_path, workers, *mesh(worker=workers), *same, *still, "--train.steps", str(steps), name="again")
        found = saved_tensors(tmp_path / "again" / "checkpoints" / f"step-{steps:08}")
        for name in (name for name in mean if name.startswith("model.")):
            torch.testing.assert_close(found[name], mean[name], rtol=1e-6, atol=1e-7, msg=name)
        names = [name for name in found if ".gossip.summed." in name]
        assert names and any(found[name].abs().max() > 1e-3 for name in names)
        for name in names:
            tracked = found[name.replace("summed", "tracked")]
            torch.testing.assert_close(tracked, found[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_nan_of_one_worker_stays_its_own(tmp_path: Path) -> None:
    """Its update is skipped, what it tracks stays finite, and all go on."""
    words = [*mesh(worker=2), *TRACKING, *inject_nan(2, rank=1), "--train.steps", "4"]
    found = train_job(tmp_path, 2, *words, *SKIP)
    assert_one_update_skipped(found)
    assert found.rows[2]["grad_norm_worker_1"] is None and found.rows[2]["grad_norm_worker_0"] is not None


def test_the_axis_enables_it_in_place_of_its_owner_and_not_beside_another() -> None:
    words = ["--data.path", "text", *mesh(worker=2), *words_of("ring")]
    assert [technique.name for technique in load_job(LLAMA, words, 2).techniques] == ["gossip"]
    with pytest.raises(ConfigError) as refused:
        load_job(LLAMA, [*words, "--plugins.local_steps.every", "2"], 2)
    assert str(refused.value).count("cannot be enabled together: both join the weights of mesh.worker") == 1


def test_momentum_of_nothing_has_no_effect() -> None:
    config = Gossip.Config(momentum=0.5)
    [told] = Gossip(config).no_effect(job_of().spec)
    assert told == "momentum = 0.5 is used by tracking = true alone"
    assert not list(Gossip(replace(config, tracking=True)).no_effect(job_of().spec))


def test_a_worker_alone_is_told(tmp_path: Path, capfd) -> None:
    train_job(tmp_path, 1, *words_of("ring"), "--train.steps", "2")
    said = "warning: [plugins.gossip] mesh.worker = 1, so there are no neighbors to average with; set it above 1"
    assert capfd.readouterr().out.count(said) == 1


def test_a_torus_of_a_prime_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a grid of at least 2 x 2 workers is required; set mesh.worker = 6 or 8"):
        load_job(LLAMA, ["--data.path", "text", *mesh(worker=7), *words_of("torus"), "--train.global_batch_size", "7"])


@pytest.mark.parametrize(("graph", "tracking", "sends"), [("exponential", "true", 3), ("one_peer", "false", 1)])
def test_the_planner_counts_what_a_rank_sends(graph: str, tracking: str, sends: int) -> None:
    """Against the sends of a dry run, of whole shards to each neighbor, and the memory of what is tracked."""
    job = job_of(*mesh(worker=8, tp=2), *words_of(graph, tracking=tracking), "--train.global_batch_size", "8")
    run = dry_run(job, 3)
    [sent] = [one for one in run.collectives if one.kind == "send"]
    tensors = 2 if tracking == "true" else 1
    assert (sent.axes, sent.count, sent.bytes) == ("worker", sends, tensors * 4 * run.parameters)
    [cost] = [one for one in costs_of(job).collectives if one.collective == "send"]
    assert (cost.count, cost.numel * cost.itemsize) == (sends, tensors * 4)
    prediction = Planner(CLUSTER).predict(costs_of(job), job.layout)
    per_parameter = prediction.memory[0].optimizer / prediction.memory[0].parameters
    assert per_parameter == pytest.approx(4 if tracking == "true" else 2)
