"""Ranks with weights, and state, of their own, and an optimizer around the optimizer: by techniques from outside."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.contract.test_guests import GUESTS
from tests.dist.test_nonfinite import SKIP, TEST_PLUGINS, inject_nan
from tests.jobs import SAVING, THREE_STEPS, mesh, stored
from tests.sweeps import swept_case
from titan.testing.jobs import assert_same_curve, saved_tensors, train_job
from titan.testing.ranks import RankError

EACH = (*GUESTS, *SAVING, "--checkpoint.every", "1", "--checkpoint.keep_latest", "0")
LOOKAHEAD = ("--plugins.lookahead.every", "2")


def saved(folder: Path, step: int, name: str = "run") -> dict[str, Tensor]:
    """The tensors of a checkpoint, of ranks' own their mean."""
    return saved_tensors(folder / name / "checkpoints" / f"step-{step:08}")


def test_weights_of_their_own_at_any_layout_inside(tmp_path: Path) -> None:
    words = [*GUESTS, *THREE_STEPS, *mesh(colony=2)]
    one = train_job(tmp_path, 2, *words, name="one")
    many = train_job(tmp_path, 8, *words, *mesh(dp_shard=2, pp=2), name="many")
    assert_same_curve(one, many)
    row = one.rows[3]
    assert row["loss_colony_0"] != row["loss_colony_1"]
    assert row["loss"] == pytest.approx((row["loss_colony_0"] + row["loss_colony_1"]) / 2, rel=1e-12)


def test_weights_of_their_own_are_saved_stacked_and_come_back(tmp_path: Path) -> None:
    """Each to its own, at another layout inside; the mean to another number of them."""
    words = [*EACH, "--train.steps", "4"]
    whole = train_job(tmp_path, 2, *words, *mesh(colony=2))
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08}")
    assert stored(tmp_path / "run" / "checkpoints" / "step-00000002").tensors["model.norm.weight"].shape[0] == 2
    again = train_job(tmp_path, 4, *words, *mesh(colony=2, tp=2))
    assert_same_curve(whole, again)

    mean = saved(tmp_path, 3)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    still = ["--optimizer.lr", "1e-30", "--optimizer.weight_decay", "0"]
    train_job(tmp_path, 4, *words, *mesh(colony=4), *still)
    for name, tensor in saved(tmp_path, 4).items():
        if name.startswith("model."):
            torch.testing.assert_close(tensor, mean[name], rtol=1e-6, atol=1e-8, msg=name)


def test_state_of_a_ranks_own_keeps_its_sum(tmp_path: Path) -> None:
    """Rank r adds r + 1 at each step: 2 ranks have 3 and 6 after three; 4 begin with a share of 9, and one with all."""
    steps = "rest.techniques.colony.steps.norm.weight"
    on = ("--plugins.colony.enabled", "true", *EACH)
    means = [
        (2, mesh(dp_replicate=2), 4.5),
        (4, mesh(dp_replicate=2, dp_shard=2), (3 + 1 + 6 + 2) / 2),
        (4, mesh(dp_replicate=4), (12 + 1 + 2 + 3 + 4) / 4),
        (1, [], 22 + 1),
        (2, mesh(dp_replicate=2), (23 + 1 + 2) / 2),
    ]
    for step, (ranks, words, mean) in enumerate(means, start=3):
        train_job(tmp_path, ranks, *on, *words, "--train.steps", str(step))
        assert float(saved(tmp_path, step)[steps].mean()) == pytest.approx(mean)
    entry = stored(tmp_path / "run" / "checkpoints" / "step-00000003").tensors[steps]
    assert entry.stacked and entry.shape[0] == 2


def test_state_of_a_ranks_own_switched_on_late(tmp_path: Path) -> None:
    words = [*EACH, *mesh(dp_replicate=2)]
    train_job(tmp_path, 2, *words, "--train.steps", "2")
    train_job(tmp_path, 2, *words, "--plugins.colony.enabled", "true", "--train.steps", "3")
    assert float(saved(tmp_path, 3)["rest.techniques.colony.steps.norm.weight"].mean()) == pytest.approx(1.5)


def test_state_of_a_ranks_own_beside_workers_is_refused(tmp_path: Path) -> None:
    said = r"techniques\.colony\.steps\S* is each rank's own along mesh\.dp_replicate = 2, and mesh\.colony = 2 gives"
    with pytest.raises(RankError, match=said):
        train_job(tmp_path, 4, *EACH, *mesh(colony=2, dp_replicate=2), "--train.steps", "3")


def test_workers_have_numbers_of_their_own_in_the_optimizers_state(tmp_path: Path) -> None:
    """A worker that has skipped an update is one behind, also after a resume."""
    both = ["--plugins.path", f"{GUESTS[1]},{TEST_PLUGINS[1]}"]
    words = [*inject_nan(2, rank=1), *EACH, *both, *LOOKAHEAD, *mesh(colony=2), *SKIP]
    for step in (3, 4):
        train_job(tmp_path, 2, *words, "--train.steps", str(step))
        state = json.loads((tmp_path / "run" / "checkpoints" / f"step-{step:08}" / "state.json").read_text())
        assert [state["values"][f"{worker}.norm.weight.fast_steps"] for worker in (0, 1)] == [step, step - 1]


def test_two_axes_with_weights_of_their_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"mesh\.\w+ and mesh\.\w+ would both|and mesh\.worker would both have weights"):
        train_job(tmp_path, 4, *GUESTS, *mesh(colony=2, worker=2))


@pytest.mark.parametrize("words", [mesh(dp_shard=2), swept_case(mesh(tp=2)), swept_case(mesh(pp=2))], ids=str)
def test_an_optimizer_around_the_optimizer(words: list[str], one_rank, tmp_path: Path) -> None:
    """One curve at any layout and through a resume, with the slow weights in the checkpoint."""
    one = one_rank(*GUESTS, *LOOKAHEAD)
    train_job(tmp_path, 2, *words, *GUESTS, *LOOKAHEAD, *SAVING, "--train.steps", "3")
    many = train_job(tmp_path, 1, *GUESTS, *LOOKAHEAD, *SAVING)
    assert "optimizer.norm.weight.slow" in saved(tmp_path, 6)
    assert_same_curve(one, many)
