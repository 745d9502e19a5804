"""What plugins from outside measure (tests/guests): on one rank what it sees, on four ranks the same."""

import json
import math
from pathlib import Path

import pytest

from tests.commands import run_titan
from tests.contract.test_guests import GUESTS
from tests.jobs import FOUR_LAYERS
from tests.sweeps import sweep_but
from titan.testing.jobs import train_job, write_text
from titan.training.metrics import KEYS

ROOT = Path(__file__).parents[2]
MEASURED = {"learned_tokens": 0.0, "layers": 0.0, "largest_gradient": 1e-4, "hidden_square": 1e-5, "z_loss": 1e-5}
"""What rows have more, and how far apart two layouts may be, relatively."""
WATCHED = ("--plugins.tally.enabled", "true", "--model.name", "watched", "--loss.z_loss", "1e-2")
MEASURING = (*GUESTS, *WATCHED, *FOUR_LAYERS)


@pytest.fixture(scope="module")
def measured_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    return train_job(tmp_path_factory.mktemp("alone"), 1, *MEASURING).rows


def test_one_rank_measures_what_it_sees(measured_alone: dict[int, dict[str, float]]) -> None:
    assert len(measured_alone) == 6
    for row in measured_alone.values():
        assert row.keys() == (KEYS - {"validation_loss", "validation_perplexity", "bytes_sent"}) | MEASURED.keys()
        assert (row["learned_tokens"], row["layers"]) == (8 * 16, 4)
        # Logits begin near 0, so log Z is near log 257 at first.
        assert 0 < row["largest_gradient"] < row["grad_norm"] and row["hidden_square"] > 0
    assert measured_alone[1]["z_loss"] == pytest.approx(1e-2 * math.log(257) ** 2, rel=0.02)


MEASURED_AT = {
    "dp 2, pp 2": ("--mesh.pp", "2"),
    "dp 2, tp 2, whole sequences": ("--mesh.tp", "2", "--plugins.tensor.sequence_parallel", "false"),
    "dp 2, cp 2": ("--mesh.cp", "2"),
    "pp 2, tp 2, stages interleaved, recomputed": (
        *("--mesh.pp", "2", "--mesh.tp", "2", "--plugins.pipeline.schedule", "Interleaved1F1B"),
        *("--plugins.activation_checkpoint.mode", "full", "--train.micro_batch_size", "2"),
    ),
}


@pytest.mark.parametrize("name", sweep_but(MEASURED_AT, "pp 2, tp 2, stages interleaved, recomputed"))
def test_four_ranks_measure_the_same(name: str, measured_alone: dict[int, dict[str, float]], tmp_path: Path) -> None:
    rows = train_job(tmp_path, 4, *MEASURING, *MEASURED_AT[name]).rows
    assert rows.keys() == measured_alone.keys()
    for step, row in rows.items():
        assert row.keys() == measured_alone[step].keys()
        for key, tolerance in MEASURED.items():
            assert row[key] == pytest.approx(measured_alone[step][key], rel=tolerance), (step, key)


def test_a_row_covers_the_steps_since_the_row_before(
    measured_alone: dict[int, dict[str, float]], tmp_path: Path
) -> None:
    rows = train_job(tmp_path, 2, *MEASURING, "--metrics.every", "3", "--mesh.dp_shard", "2").rows
    assert [row["learned_tokens"] for row in rows.values()] == [128, 2 * 128, 3 * 128]
    z_losses = [measured_alone[step]["z_loss"] for step in range(4, 7)]
    assert rows[6]["z_loss"] == pytest.approx(sum(z_losses) / 3, rel=1e-5)


def test_validation_adds_nothing_to_what_is_measured(tmp_path: Path) -> None:
    write_text(tmp_path / "more")
    validating = ("--validation.every", "1", "--validation.name", "text", "--validation.path", str(tmp_path / "more"))
    rows = train_job(tmp_path, 1, *MEASURING, *validating, "--train.steps", "3").rows
    assert [row["learned_tokens"] for row in rows.values()] == [128] * 3 and "validation_loss" in rows[3]


def test_the_command_lists_what_a_plugin_measures() -> None:
    said = run_titan(["plugins", "tally", "--path", GUESTS[1]], ROOT).stdout
    assert "row key learned_tokens   # sum: tokens with a label since the row before\n" in said
    found = json.loads(run_titan(["plugins", "cross_entropy", "--json"], ROOT).stdout)
    (measure,) = found["plugins"][0]["measures"].items()
    assert measure[0] == "z_loss" and measure[1]["join"] == "mean"


def test_without_z_loss_rows_have_no_key_for_it(tmp_path: Path) -> None:
    assert "z_loss" not in train_job(tmp_path, 1, "--train.steps", "1").rows[1]
