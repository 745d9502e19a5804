"""Tests of the tokenizer example: the suite of the contract, its ids, and a run with them."""

from pathlib import Path

import pytest

from titan.testing import Check, checks, make_plugin, train_job

PLUGINS = ("--plugins.path", str(Path(__file__).with_name("example.py")))


@pytest.mark.parametrize("check", checks("example", *PLUGINS, kind="tokenizer"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


def test_ids() -> None:
    tokenizer = make_plugin("example", *PLUGINS, kind="tokenizer")
    assert tokenizer.encode("Az") == [0x4, 0x1, 0x7, 0xA]
    assert tokenizer.decode([0x4, 0x1, tokenizer.end, 0x7]) == "A"


def test_a_run_uses_it(tmp_path: Path) -> None:
    words = ("--tokenizer.name", "example", "--model.vocab_size", "17", "--train.steps", "3")
    assert len(train_job(tmp_path, 1, *PLUGINS, *words).loss) == 3
