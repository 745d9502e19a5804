"""Every TOML in `configs/` dry-runs, first rank and last, with its own widths, techniques and ranks.

One layer a stage and the fewest micro batches that fill the pipeline: what more of them would show is more of the same.
"""

from pathlib import Path

import pytest

from tests.sweeps import sweep_but
from titan.config import Job, load_job
from titan.dryrun import dry_run

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
NAMES = ("debug3d", "diloco7b", "gpt22b", "llama3_8b_128k", "llama7b", "mixtral8x7b", "quickstart")
KEPT = [path for path in CONFIGS if path.stem in NAMES]
"""One of each model and of each kind of layout; the others are larger or recombine these."""


def _short(path: Path) -> Job:
    job = load_job(path)
    stages = job.layout.degree_of("layers")
    each = next((t.config.stages_per_rank for t in job.techniques if hasattr(t.config, "stages_per_rank")), 1)
    batch = job.micro_batch * job.batch_ranks * stages * min(each, 2)  # DualPipeV needs one for each of its stages
    words = ["--model.n_layers", f"{stages * each}", "--train.global_batch_size", f"{batch}"]
    if any(getattr(t.config, "split_points", None) for t in job.techniques):
        words += ["--plugins.pipeline.split_points", ""]
    return load_job(path, [*words, "--train.micro_batch_size", f"{job.micro_batch}"])


# The plugin that wraps ignores this warning, and says why; pytest starts each test with filters of its own.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("path", sweep_but(CONFIGS, *KEPT), ids=lambda path: path.stem)
def test_first_and_last_rank(path: Path) -> None:
    job = _short(path)
    last = job.layout.world_size - 1
    for rank in {0, last}:
        run = dry_run(job, rank)
        assert 4 * run.parameters <= run.steady["parameters"] < 4.4 * run.parameters  # uneven shards are padded
        assert run.steady["optimizer"] >= 8 * run.parameters
        assert run.peak_bytes > run.steady_bytes
        assert (run.total_flops.recompute > 0) and run.total_flops.backward == 2 * run.total_flops.forward
