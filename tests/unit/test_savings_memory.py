"""Memory that the planner predicts for the jobs whose savings `bench.savings` measures, against their dry runs."""

import pytest

from bench.savings import CONFIG, TABLES, recompute
from tests.sweeps import sweep_but
from titan.config import load_job
from titan.planner.dryrun import dry_run
from titan.planner.machine import cluster
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner

# What the plugin says to this warning, pytest takes back before each test.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

EAGER = {(table, job): (*shared, *own) for table, (shared, jobs) in TABLES.items() for job, own in jobs.items()}
EAGER = {names: words for names, words in EAGER.items() if not set(recompute("budget")) <= set(words)}
"""(table, job) -> its words. A budget is spent by a compiler, which a dry run leaves out."""
EAGER["few tokens", "muon"] = (*TABLES["few tokens"][0], "--optimizer.name", "muon")  # its update needs the most

FAST = (
    ("loss, 32,000 words", "in chunks"),
    ("float32", "activation_checkpoint, every second"),
    ("float32", "activation_checkpoint, full"),
    ("float32", "offload, activations"),
    ("few tokens", "update_in_backward"),
    ("few tokens", "muon"),
    ("optimizers", "muon"),
)


@pytest.mark.parametrize(("table", "job"), sweep_but(EAGER, *FAST))
def test_predicted_memory_is_that_of_the_dry_run(table: str, job: str) -> None:
    words = EAGER[table, job]
    if "float8" in job or "mxfp8" in job:
        pytest.importorskip("torchao")
    planned = load_job(CONFIG, [*words, "--plugins.compile.enabled", "false"], 1)  # a dry run does not compile
    (memory,) = Planner(cluster.load("h100")).draft(costs_of(planned), planned.layout).memory()
    exact = dry_run(load_job(CONFIG, words, 1), 0)
    assert memory.allocated == pytest.approx(exact.peak_bytes, rel=0.03)
