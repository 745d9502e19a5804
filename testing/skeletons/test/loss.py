"""Tests of the loss example: the suite of the contract, its arithmetic, and its curve under tensor parallelism."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from titan.contracts import IGNORE
from titan.testing import Check, assert_same_curve, checks, make_plugin, train_job

PLUGINS = ("--plugins.path", str(Path(__file__).with_name("example.py")))


@pytest.mark.parametrize("check", checks("example", *PLUGINS, kind="loss"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


def test_sums_over_valid_tokens() -> None:
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, 4, IGNORE], [0, IGNORE, 2]])
    objective, reported = make_plugin("example", *PLUGINS, kind="loss", smoothing=0.2).compute(logits, labels)
    flat, valid = logits[labels != IGNORE], labels[labels != IGNORE]
    torch.testing.assert_close(objective, F.cross_entropy(flat, valid, label_smoothing=0.2, reduction="sum"))
    torch.testing.assert_close(reported, F.cross_entropy(flat, valid, reduction="sum"))


def test_same_curve_where_ranks_split_the_vocabulary(tmp_path: Path) -> None:
    words = (*PLUGINS, "--loss.name", "example", "--train.steps", "4")
    one = train_job(tmp_path, 1, *words, name="one")
    assert_same_curve(one, train_job(tmp_path, 2, *words, "--mesh.tp", "2", name="two"))
