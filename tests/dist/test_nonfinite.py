"""NaN and inf in a run: the update is dropped on every rank alike, counted, and ends the run when it should."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import steps_in
from tests.jobs import SAVING, mesh
from tests.sweeps import swept_case
from titan.testing.jobs import assert_same_curve, saved_tensors, train_job
from titan.testing.ranks import RankError

TEST_PLUGINS = ("--plugins.path", str(Path(__file__).parents[1] / "plugins"))


def inject_nan(*steps: int, what: str = "gradient", rank: int = 0) -> list[str]:
    own = {"steps": ",".join(map(str, steps)), "what": what, "rank": rank}
    words = [word for key, value in own.items() for word in (f"--plugins.inject_nan.{key}", str(value))]
    return [*TEST_PLUGINS, *words]


SKIP = ("--train.non_finite", "skip")


@pytest.mark.parametrize("what", ["gradient", "loss"])
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        swept_case((mesh(dp_shard=2), 2)),
        (mesh(dp_replicate=2), 2),
        (mesh(pp=2), 2),
        swept_case((mesh(dp_shard=2, tp=2), 4)),
    ],
)
def test_skip_at_any_layout(layout: list[str], ranks: int, what: str, tmp_path: Path) -> None:
    one = train_job(tmp_path, 1, *inject_nan(2, 5, what=what), *SKIP, name="one")
    many = train_job(tmp_path, ranks, *layout, *inject_nan(2, 5, what=what, rank=ranks - 1), *SKIP, name="many")
    key = "grad_norm" if what == "gradient" else "loss"
    for outcome in (one, many):
        assert [step for step, row in outcome.rows.items() if row[key] is None] == [2, 5]
        assert outcome.rows[6]["skipped_updates"] == 2
        batches = [(row["tokens"] // (8 * 16), row["valid_tokens"] // (8 * 16)) for row in outcome.rows.values()]
        assert batches == [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (6, 4)], "all, and those learnt from"
        assert all(weight.isfinite().all() for weight in outcome.weights.values())
        for row in outcome.rows.values():
            row["loss"], row["grad_norm"] = row["loss"] or 0.0, row["grad_norm"] or 0.0
    assert_same_curve(one, many)


def test_a_skipped_update_changes_nothing(tmp_path: Path) -> None:
    words = (*SAVING, "--checkpoint.every", "1", "--checkpoint.keep_latest", "0", "--train.steps", "3")
    train_job(tmp_path, 1, *inject_nan(3), *SKIP, *words)
    before, after = (saved_tensors(tmp_path / "run" / "checkpoints" / f"step-0000000{step}") for step in (2, 3))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("rest."))


@pytest.mark.parametrize(("what", "logged"), [("gradient", 1), ("loss", 1), ("loss", 10)])
def test_stop_names_the_step_and_saves_nothing_of_it(what: str, logged: int, tmp_path: Path) -> None:
    words = (*SAVING, "--checkpoint.every", "2", "--metrics.every", str(logged))
    with pytest.raises(RankError, match=r"step 4 gave loss .* its update was skipped"):
        train_job(tmp_path, 2, *mesh(dp_shard=2), *inject_nan(4, what=what, rank=1), *words)
    assert steps_in(tmp_path / "run" / "checkpoints") == [2]


def test_too_many_in_a_row(tmp_path: Path) -> None:
    limit = ("--train.non_finite_limit", "3")
    outcome = train_job(tmp_path, 1, *inject_nan(2, 3, 5, 6), *SKIP, *limit, name="few")
    assert outcome.rows[6]["skipped_updates"] == 4
    with pytest.raises(RankError, match="3 steps in a row, the last of them step 6 gave"):
        train_job(tmp_path, 1, *inject_nan(4, 5, 6), *SKIP, *limit, name="many")


def test_the_count_outlives_the_process(tmp_path: Path) -> None:
    words = (*inject_nan(2), *SKIP, *SAVING)
    train_job(tmp_path, 1, *words, "--train.steps", "4")
    row = train_job(tmp_path, 1, *words).rows[6]
    assert (row["skipped_updates"], row["valid_tokens"]) == (1, 5 * 8 * 16)


def test_an_optimizer_that_cannot_skip_by_itself(tmp_path: Path) -> None:
    words = ("--model.name", "llama", "--optimizer.name", "heavyball", "--optimizer.lr", "0.05", *TEST_PLUGINS)
    one = train_job(tmp_path, 1, *words, *inject_nan(2), *SKIP, name="one")
    assert all(weight.isfinite().all() for weight in one.weights.values())
    assert one.rows[6]["skipped_updates"] == 1
