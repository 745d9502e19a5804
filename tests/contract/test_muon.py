"""An optimizer from outside that treats matrices in a way of their own: one curve at every layout."""

from pathlib import Path

import pytest

from tests.jobs import CONFIGS, GPT, LLAMA, SAVING, mesh
from tests.sweeps import swept_case
from titan.testing.jobs import assert_same_curve, train_job

GUESTS = str(Path(__file__).parents[1] / "guests")
LAYOUTS = {
    "fsdp x tp": ("--mesh.tp", "2"),
    "fsdp x pp": ("--mesh.pp", "2"),
    "tp x pp": ("--mesh.tp", "2", "--mesh.pp", "2"),
}
MUON = ("--plugins.path", GUESTS, "--optimizer.name", "whole_muon")


@pytest.mark.parametrize(
    ("layout", "config", "lr"),
    [
        ("tp x pp", LLAMA, "3e-3"),
        swept_case(("tp x pp", GPT, "3e-4")),
        swept_case(("fsdp x tp", LLAMA, "3e-3")),
        swept_case(("fsdp x pp", GPT, "3e-4")),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_muon_has_one_curve_on_shards_slices_and_stages(layout: str, config: Path, lr: str, tmp_path: Path) -> None:
    words = (*MUON, "--optimizer.lr", lr)
    alone = train_job(tmp_path / "1", 1, *words, config=config)
    assert_same_curve(alone, train_job(tmp_path / "4", 4, *words, *LAYOUTS[layout], config=config))


@pytest.mark.sweep
def test_muon_resumes_on_another_layout(tmp_path: Path) -> None:
    alone = train_job(tmp_path, 1, *MUON, name="alone")
    train_job(tmp_path, 4, *MUON, *SAVING, *LAYOUTS["fsdp x tp"], "--train.steps", "4")
    assert_same_curve(alone, train_job(tmp_path, 4, *MUON, *SAVING, *LAYOUTS["fsdp x pp"]))


def test_muon_takes_each_matrix_of_a_stack(tmp_path: Path) -> None:
    config = CONFIGS / "stacked.toml"
    alone = train_job(tmp_path / "1", 1, *MUON, config=config)
    assert_same_curve(alone, train_job(tmp_path / "4", 4, *MUON, *mesh(dp_shard=4, spread=2), config=config))
