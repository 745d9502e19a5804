"""Which steps that are not finite end a run, where techniques expect some."""

import math

import pytest
import torch

from titan.contracts.base.layout import Layout
from titan.contracts.base.mesh import Mesh
from titan.errors import DivergedError
from titan.training.gradients import Counts, NonfiniteGuard

NOT, EXPECTED = torch.tensor(False), torch.tensor(True)


def _guard(limit: int, *made: str, before: Counts | None = None) -> NonfiniteGuard:
    mesh = Mesh(Layout((), {}), torch.device("cpu"), 0)
    return NonfiniteGuard(limit, before or Counts(), mesh, known=["all is scaled"], made=made)


def _look(guard: NonfiniteGuard, step: int, norm: float, *expected: torch.Tensor) -> bool:
    guard.look(step, torch.tensor(5.0), torch.tensor(norm), expected)
    return bool(guard.updates)


def test_an_expected_step_is_dropped_and_counted_but_ends_nothing() -> None:
    guard = _guard(1)
    assert [_look(guard, step, math.inf, NOT, EXPECTED) for step in (1, 2)] == [False, False]
    assert _look(guard, 3, 1.0, NOT, EXPECTED)
    assert guard.check().dropped == 2
    assert not _look(guard, 4, math.inf, NOT, NOT)
    with pytest.raises(DivergedError, match=r"^step 4 gave loss 5 and .* nan; .* skipped; all is scaled; set"):
        guard.check()


def test_an_update_made_before_it_is_judged_is_not_called_skipped() -> None:
    guard = _guard(1, "updates come early; switch it off")
    assert not _look(guard, 7, math.nan, NOT)
    said = r"^step 7 gave .* nan; its update was made all the same; updates come early; switch it off; all is scaled$"
    with pytest.raises(DivergedError, match=said):
        guard.check()


def test_expected_steps_are_none_of_those_in_a_row_and_do_not_part_them() -> None:
    guard = _guard(2)
    assert not _look(guard, 1, math.nan, NOT)
    assert not _look(guard, 2, math.nan, EXPECTED)
    assert guard.check().dropped == 2
    assert not _look(guard, 3, math.nan, NOT)
    with pytest.raises(DivergedError, match="2 steps in a row, the last of them step 3 gave"):
        guard.check()
    again = _guard(2)
    for step, norm in enumerate((math.nan, 1.0, math.nan), 1):
        _look(again, step, norm, NOT)
    assert again.check().dropped == 2


def test_tokens_of_updates_that_are_made_are_counted() -> None:
    guard = _guard(9, before=Counts(dropped=2, valid_tokens=2**40 + 1))
    for step, (norm, tokens) in enumerate(((1.0, 5), (math.nan, 7), (2.0, 0), (3.0, 11)), 1):
        _look(guard, step, norm)
        guard.count(torch.tensor(tokens))
    assert guard.check() == Counts(dropped=3, valid_tokens=2**40 + 1 + 16)
