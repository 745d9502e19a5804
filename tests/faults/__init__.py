"""Faults planted in copies of the checkout, one at a time, to see that a test notices each.

    python -m tests.faults                        # all of them: `n of n caught`; 1 when one escapes
    python -m tests.faults --only "micro batch"   # those with these words in their names
    python -m tests.faults --list                 # names and tests, runs nothing

A fault is a small change of one file. The lists in `lists/` follow the packages. Each fault names the
narrowest tests that notice it. The same tests also run without a fault, as a test that fails anyway catches nothing.
The unit test `tests/unit/test_faults.py` checks that every fault can still be planted, without running any.
"""

from importlib import import_module
from pathlib import Path

from titan.testing.faults import Fault

_NAMES = sorted(path.stem for path in (Path(__file__).parent / "lists").glob("[a-z]*.py"))
FAULTS: tuple[Fault, ...] = tuple(
    fault for name in _NAMES for fault in import_module(f"{__name__}.lists.{name}").FAULTS
)
