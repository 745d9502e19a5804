"""The optimizer: the suite of the contract, and two steps by hand."""

from pathlib import Path

import pytest
import torch

from titan.contracts import NamedParameter
from titan.testing import Check, checks, make_plugin


@pytest.mark.parametrize("check", checks("nesterov"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


def test_two_steps_by_hand() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    named = [NamedParameter(str(decays), weight, "matrix", decays) for weight, decays in zip(weights, (True, False))]
    optimizer = make_plugin("nesterov", lr=0.1, momentum=0.5, weight_decay=0.2).build(named)
    expected, momenta = [1.0, 1.0], [0.0, 0.0]
    for _ in range(2):
        for at, decay in enumerate((0.2, 0.0)):
            gradient = 1.0 + decay * expected[at]
            momenta[at] = 0.5 * momenta[at] + gradient
            expected[at] -= 0.1 * (gradient + 0.5 * momenta[at])
            weights[at].grad = torch.ones(2)
        optimizer.step()
    for weight, value in zip(weights, expected):
        torch.testing.assert_close(weight.data, torch.full((2,), value))
