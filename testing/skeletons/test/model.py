"""Tests of the model example: the suite of the contract, one curve at every layout, and its arithmetic."""

from pathlib import Path

import pytest
import torch

from titan.testing import Check, assert_same_curve, checks, make_plugin, one_rank, train_job

PLUGINS = ("--plugins.path", str(Path(__file__).with_name("example.py")))
WORDS = (*PLUGINS, "--model.name", "example")


@pytest.mark.parametrize("check", checks("example", *PLUGINS, kind="model"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("tp", "pp")], ids=" x ".join)
def test_same_curve_at_other_layouts(axes: tuple[str, ...], tmp_path: Path) -> None:
    degrees = [word for axis in axes for word in (f"--mesh.{axis}", "2")]
    assert_same_curve(one_rank(*WORDS), train_job(tmp_path, 2 ** len(axes), *WORDS, *degrees))


def test_feed_forward() -> None:
    model = make_plugin("example", *PLUGINS, kind="model", n_layers=1, dim=4, n_heads=2, n_kv_heads=2, ffn_dim=3)
    ffn = model.build().layers["0"].ffn
    torch.manual_seed(0)
    up, down, x = torch.randn(3, 4), torch.randn(4, 3), torch.randn(1, 2, 4)
    ffn.load_state_dict({"up.weight": up, "down.weight": down})
    torch.testing.assert_close(ffn(x), (x @ up.T).clamp(min=0) ** 2 @ down.T)
