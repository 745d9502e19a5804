"""The technique: the suite of the contract, and the curve of one process at layouts with its axis."""

from pathlib import Path

import pytest

from titan.testing import Check, assert_caught, assert_same_curve, checks, one_rank, train_job

PACKAGE = Path(__file__).parents[1]


@pytest.mark.parametrize("check", checks("crew"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize("degrees", [{"crew": 2}, {"crew": 2, "dp_shard": 2}, {"crew": 2, "pp": 2}], ids=str)
def test_same_curve_as_one_process(degrees: dict[str, int], tmp_path: Path) -> None:
    words = [word for axis, degree in degrees.items() for word in (f"--mesh.{axis}", str(degree))]
    assert_same_curve(one_rank(), train_job(tmp_path, 2 ** len(degrees), *words))


def test_a_gradient_that_is_not_summed_is_noticed() -> None:
    test = "tests/test_crew.py::test_same_curve_as_one_process"
    summed = "dist.all_reduce(shard_of(gradient), group=self._group)"
    assert_caught(PACKAGE, "src/titan_example/crew.py::Crew.after_backward", summed, "shard_of(gradient)", test)
