"""What a plugin's tests need, away from titan's repository: nothing else has to be imported from titan to test one.

    from titan.testing import assert_same_curve, checks, one_rank, train_job

train_job, one_rank: train a tiny job on gloo ranks of this machine, in processes forked from one that has torch warm.
assert_same_curve: two runs agree within the tolerances of docs/correctness.md.
checks, check_plugin: the suite of the contract for one plugin, by its name.
make_plugin: an instance of a plugin, to test its arithmetic.
assert_caught: a test fails where a line of the plugin is replaced by a wrong one.
run_ranks: call a function on ranks with a process group.

Jobs need no file: the model, the tokenizer and the text are tiny and built in. Only `assert_caught` needs pytest.
"""

from titan.testing.contract import Check, check_plugin, checks, make_plugin
from titan.testing.faults import assert_caught
from titan.testing.jobs import JOB, Outcome, assert_same_curve, differences, one_rank, saved_tensors, train_job
from titan.testing.ranks import RankError, run_ranks

__all__ = [
    "JOB",
    "Check",
    "Outcome",
    "RankError",
    "assert_caught",
    "assert_same_curve",
    "check_plugin",
    "checks",
    "differences",
    "make_plugin",
    "one_rank",
    "run_ranks",
    "saved_tensors",
    "train_job",
]
