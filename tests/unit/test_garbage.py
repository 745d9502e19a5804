"""When the training loop collects garbage."""

import gc

from titan.training import trainer


class _Knot:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


def test_what_lives_long_is_looked_at_once_and_young_garbage_always() -> None:
    gc.disable()
    gc.unfreeze()  # as in a run that begins
    try:
        trainer._collect_garbage()
        frozen = gc.get_freeze_count()
        knot = _Knot()
        gc.collect(0)  # it outlives one collection, as what a step holds may
        del knot
        trainer._collect_garbage()
        assert frozen > 0 and gc.get_freeze_count() == frozen
        assert not any(isinstance(one, _Knot) for one in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.enable()
