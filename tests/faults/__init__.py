"""Faults planted in copies of the checkout, one at a time, to see that a test notices each.

    python -m tests.faults                        # all of them: `n of n caught`; 1 when one escapes
    python -m tests.faults --only "micro batch"   # those with these words in their names
    python -m tests.faults --list                 # names and tests, runs nothing

A fault is a small change of one file. The lists in `lists/` follow the packages. Each fault names the
narrowest tests that notice it. The same tests also run without a fault, as a test that fails anyway catches nothing.
The unit test `tests/unit/test_faults.py` checks that every fault can still be planted, without running any.
"""

from tests.faults.lists import (
    checkpoint,
    context,
    cpu_attention,
    data,
    experts,
    inputs,
    meeting,
    model,
    offload,
    parallel,
    planner,
    profile,
    run,
    tokenizers,
    training,
    updates,
    workers,
)
from titan.testing.faults import Fault

FAULTS: tuple[Fault, ...] = (
    *training.FAULTS, *model.FAULTS, *parallel.FAULTS, *context.FAULTS, *experts.FAULTS, *workers.FAULTS,
    *data.FAULTS, *checkpoint.FAULTS, *run.FAULTS, *meeting.FAULTS, *inputs.FAULTS, *tokenizers.FAULTS,
    *planner.FAULTS, *offload.FAULTS, *cpu_attention.FAULTS, *updates.FAULTS, *profile.FAULTS,
)  # fmt: skip
