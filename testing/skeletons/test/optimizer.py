"""Tests of the optimizer example: the suite of the contract, and its arithmetic."""

from pathlib import Path

import pytest
import torch

from titan.contracts import NamedParameter
from titan.testing import Check, checks, make_plugin

PLUGINS = ("--plugins.path", str(Path(__file__).with_name("example.py")))


@pytest.mark.parametrize("check", checks("example", *PLUGINS, kind="optimizer"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


def test_two_steps_by_hand() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    plugin = make_plugin("example", *PLUGINS, kind="optimizer", lr=0.1, momentum=0.5)
    optimizer = plugin.build([NamedParameter("weight", weight, "matrix", True)])
    for _ in range(2):
        weight.grad = torch.ones(2)
        optimizer.step()
    velocities = 1.0 + (0.5 * 1.0 + 1.0)
    torch.testing.assert_close(weight.data, torch.full((2,), -0.1 * velocities))
