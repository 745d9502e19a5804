"""The curve of transformers' own models in a bare loop, and titan's from the same weights, on one rank and on many."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.sweeps import sweep_but
from tests.transformers_curve import CASES, CLIP, Reference, runs
from titan.testing.jobs import assert_same_curve


@pytest.fixture(scope="module")
def references(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """`references(case)`: the case trained by the bare loop, once."""

    @cache
    def make(case: str) -> Reference:
        return Reference(case, tmp_path_factory.mktemp(case))

    return make


KEPT = [
    *((case, "one rank") for case in CASES),
    ("llama", "dp_shard 2, tp 2"),
    ("gpt2", "dp_shard 2, pp 2"),
    ("mixtral", "dp_shard 4, ep 4"),
]
VARIANTS = ("-tied", "-untied", "-uncapped", "-in-turn", "-normalized")
SWEPT = [
    (case, ("dp_shard 2, tp 2", "dp_shard 2, pp 2")[at % 2])
    for at, case in enumerate(CASES)
    if not case.endswith(VARIANTS)
]
"""One layout of each family: other tests compare each of titan's models with itself on one rank at many more."""


@pytest.mark.parametrize(("case", "layout"), sweep_but([run for run in runs() if run in KEPT + SWEPT], *KEPT))
def test_same_curve(case: str, layout: str, references: Callable[[str], Reference]) -> None:
    reference = references(case)
    norms = reference.outcome.grad_norm
    assert min(norms) < CLIP < max(norms), "clipping is to scale some steps and to leave others"
    assert_same_curve(reference.outcome, reference.titan(layout))
