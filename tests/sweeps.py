"""Which cases of a test `make sweep` runs, and not `make test`."""

from collections.abc import Iterable
from typing import Any

import pytest


def but_sweep(cases: Iterable[Any], *swept: Any) -> list[Any]:
    """The cases as parameters of a test, those that `swept` names again marked as a sweep.

    A case is the value of one argument, or a tuple of the values of several.

    Raises:
        AssertionError: `swept` names a case that is none, or every case.
    """
    every = list(cases)
    unknown = [case for case in swept if case not in every]
    assert not unknown, f"no case of the test: {unknown}"
    assert len(swept) < len(every), "a test keeps at least one case"
    return [swept_case(case) if case in swept else case for case in every]


def sweep_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases as parameters of a test, all marked as a sweep but those that `kept` names.

    Raises:
        AssertionError: `kept` names a case that is none, or no case.
    """
    every = list(cases)
    unknown = [case for case in kept if case not in every]
    assert not unknown, f"no case of the test: {unknown}"
    return but_sweep(every, *(case for case in every if case not in kept))


def swept_case(case: Any) -> Any:
    """One case of a test, marked as a sweep."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.sweep)
