"""When the training loop collects garbage, and what the search leaves frozen."""

import gc

import pytest

from tests.planned import CLUSTER, TOML
from titan.planner.search.best_first import search
from titan.planner.search.space import load_base
from titan.planner.step.predict import Planner
from titan.training import trainer


class _Knot:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


def test_what_lives_long_is_looked_at_once_and_young_garbage_always() -> None:
    gc.disable()
    gc.unfreeze()  # as in a run that begins
    try:
        trainer.collect_garbage()
        frozen = gc.get_freeze_count()
        knot = _Knot()
        gc.collect(0)  # it outlives one collection, as what a step holds may
        del knot
        trainer.collect_garbage()
        assert frozen > 0 and gc.get_freeze_count() == frozen
        assert not any(isinstance(one, _Knot) for one in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize("frozen", [True, False])
def test_what_the_caller_of_a_search_froze_stays_so(frozen: bool) -> None:
    base = load_base(TOML, ["--train.global_batch_size=8"])
    if not frozen:
        gc.unfreeze()
    search(base.job, Planner(CLUSTER), [base.space(1, 0)])
    assert (gc.get_freeze_count() > 0) == frozen
