"""An optimizer from outside that treats matrices in a way of their own: one curve at every layout."""

from pathlib import Path

import pytest

from tests.contract.test_guests import GUESTS, STACKED
from tests.jobs import GPT, LLAMA, SAVING, mesh
from tests.sweeps import sweep_but
from titan.testing.jobs import assert_same_curve, train_job

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
