"""The model: the suite of the contract, one curve at every layout, and its arithmetic."""

from pathlib import Path

import pytest
import torch

from titan.testing import Check, assert_same_curve, checks, make_plugin, one_rank, train_job

WORDS = ("--model.name", "shift", "--data.packing", "document_mask")


@pytest.mark.parametrize("check", checks("shift", *WORDS, kind="model"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize("axes", [("tp",), ("tp", "pp"), ("crew",)], ids=" x ".join)
def test_same_curve_at_other_layouts(axes: tuple[str, ...], tmp_path: Path) -> None:
    degrees = [word for axis in axes for word in (f"--mesh.{axis}", "2")]
    assert_same_curve(one_rank(*WORDS), train_job(tmp_path, 2 ** len(axes), *WORDS, *degrees))


def test_a_position_sees_itself_and_the_one_before_it_in_its_document() -> None:
    mix = make_plugin("shift", kind="model", dim=3).build().layers["0"].mix
    torch.manual_seed(0)
    up, down, x = torch.randn(12, 3), torch.randn(3, 12), torch.randn(1, 4, 3)
    mix.load_state_dict({"up.weight": up, "down.weight": down})
    documents = torch.tensor([[0, 0, 1, 1]])
    pairs = torch.stack([x[0, 0], x[0, 0] + x[0, 1], x[0, 2], x[0, 2] + x[0, 3]]) / 2
    torch.testing.assert_close(mix(x, documents)[0], torch.nn.functional.gelu(pairs @ up.T) @ down.T)
