"""How long collectives of training may wait: long in the first step, in which a compiler may be at work, then short."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.jobs import LLAMA
from titan.testing.jobs import run_job, write_text
from titan.testing.ranks import run_ranks
from titan.training import trainer


def _train(folder: str) -> list[tuple[int, float, int]]:
    """Of each change: the steps done before it, its seconds, and the number of groups that it reached."""
    changed: list[tuple[str, float]] = []
    found, steps = [], []
    set_one, set_all, step = dist.distributed_c10d._set_pg_timeout, trainer.set_timeouts, trainer.step

    def note(timeout: timedelta, group: Any) -> None:
        changed.append((group.group_name, timeout.total_seconds()))
        set_one(timeout, group)

    def note_all(mesh: Any, timeout_s: float) -> None:
        changed.clear()
        set_all(mesh, timeout_s)
        assert {seconds for _, seconds in changed} == {timeout_s}
        found.append((len(steps), timeout_s, len({name for name, _ in changed})))

    def count(*args: Any) -> Any:
        steps.append(1)
        return step(*args)

    dist.distributed_c10d._set_pg_timeout, trainer.set_timeouts, trainer.step = note, note_all, count
    words = ["--mesh.dp_shard", "2", "--mesh.tp", "2", "--train.steps", "2", "--comm.init_timeout_s", "77"]
    run_job(folder, [*words, "--comm.timeout_s", "55", "--data.path", f"{folder}/text"], str(LLAMA))
    return found


def test_every_group_waits_long_until_the_first_step_is_done(tmp_path: Path) -> None:
    """Of the mesh too: PyTorch gives groups of NCCL its own default, whatever that of all ranks has."""
    write_text(tmp_path / "text")
    assert run_ranks(_train, 4, str(tmp_path), init=False) == [[(0, 77.0, 3), (1, 55.0, 3)]] * 4
