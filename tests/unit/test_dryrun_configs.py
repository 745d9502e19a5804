"""Every TOML in `configs/` dry-runs, first rank and last, with its own widths, techniques and ranks.

One layer a stage and the fewest micro batches that fill the pipeline: what more of them would show is more of the same.
"""

from pathlib import Path

import pytest

from tests.sweeps import but_sweep
from titan.config import Job, load_job
from titan.planner.dryrun import dry_run

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
LARGEST = [
    path for path in CONFIGS if path.stem in ("gpt175b", "gpt1t", "llama33b", "qwen3_8b", "mixtral8x7b", "llama13b")
]


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
@pytest.mark.parametrize("path", but_sweep(CONFIGS, *LARGEST), ids=lambda path: path.stem)
def test_first_and_last_rank(path: Path) -> None:
    job = _short(path)
    last = job.layout.world_size - 1
    for rank in {0, last}:
        run = dry_run(job, rank)
        assert 4 * run.parameters <= run.steady["parameters"] < 4.4 * run.parameters  # uneven shards are padded
        assert run.steady["optimizer"] >= 8 * run.parameters
        assert run.peak_bytes > run.steady_bytes
        total, head = run.total_flops, run.flops.get(job.spec.head[-1])
        early = 2 * head.forward // 3 if head else 0  # the loss makes the gradients of the head in forward
        assert total.recompute > 0 and total.backward + early == 2 * (total.forward - early)
