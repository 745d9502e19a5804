"""Workers at their own pace: nothing joins them between meetings, and a signal stops all of them after one step."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.contract.test_guests import GUESTS
from tests.jobs import LLAMA, SAVING, mesh, stored
from tests.signals import job
from tests.sweeps import swept_case
from titan import train
from titan.checkpoint.disk.folder import complete
from titan.config import load_job
from titan.contracts.base.mesh import Mesh
from titan.errors import PluginError
from titan.ranks.meeting.signals import listening
from titan.ranks.meeting.store import shared_store
from titan.testing.jobs import read_rows, train_job
from titan.testing.ranks import run_ranks
from titan.training.pace import PacedPreemption

STROLL = "--plugins.strollers.head_start"
BATCH = ("--train.global_batch_size", "6")


@pytest.mark.parametrize(("ranks", "words"), [(2, mesh(stroller=2)), swept_case((4, mesh(stroller=2, dp_shard=2)))])
def test_nothing_joins_workers_between_meetings(ranks: int, words: list[str], tmp_path: Path) -> None:
    """The first does four steps, with a row of each, before the second begins; both meet at a save and at the end."""
    measuring = ("--plugins.tally.enabled", "true")
    run = train_job(tmp_path, ranks, *GUESTS, *SAVING, *words, *measuring, STROLL, "4", "--train.steps", "6")
    assert sorted(run.rows) == [1, 2, 3, 4, 5, 6] and {row["layers"] for row in run.rows.values()} == {2}
    assert all("loss_stroller_0" not in row for row in run.rows.values())
    for step in (4, 6):
        path = tmp_path / "run" / "checkpoints" / f"step-{step:08}"
        assert stored(path).tensors["model.norm.weight"].shape[0] == 2


def _summed_by_those_that_remain() -> tuple[int, int, list[int], float, str]:
    """Of 3 workers of 2 ranks the last is lost: what remains, and a sum over workers with the name of its group."""
    layout = load_job(LLAMA, ["--data.path", "text", *mesh(stroller=3, tp=2), *GUESTS, *BATCH], 6).layout
    mesh_of_run, rank = Mesh(layout, torch.device("cpu"), dist.get_rank()), dist.get_rank()
    dist.barrier()  # a rank that leaves while another still connects to a third one breaks that one's group
    if rank >= 4:
        return (-1, -1, [], 0.0, "")
    mesh_of_run.spare([2])
    with pytest.raises(PluginError, match="worker 0 cannot be spared: there are 3, from 0"):
        mesh_of_run.spare([0])
    ranks = mesh_of_run.lose(mesh_of_run.spared)
    total = mesh_of_run.sum(torch.tensor([float(rank)]), "own").item()
    return mesh_of_run.worker, mesh_of_run.workers, ranks, total, mesh_of_run.group(layout.worker_axis).group_name


def test_workers_that_remain_meet_each_at_its_place() -> None:
    found = run_ranks(_summed_by_those_that_remain, 6, timeout=60)
    everyone, (even, odd) = [0, 1, 2, 3], [name for *_, name in found[:2]]
    assert even != odd  # PyTorch would take one for the other
    assert found[:4] == [
        (0, 2, everyone, 2.0, even),
        (0, 2, everyone, 4.0, odd),
        (1, 2, everyone, 2.0, even),
        (1, 2, everyone, 4.0, odd),
    ]


def _stopped_after(ahead: int) -> int:
    """The first worker does `ahead` steps, then the other is sent a signal in its first; the last step of each."""
    rank = dist.get_rank()
    alone = [dist.new_group([number]) for number in range(2)][rank]
    store, mesh_of_run = shared_store(), SimpleNamespace(apart=False)
    with listening():
        question = PacedPreemption(mesh_of_run, alone, store, 0, max_minutes=0)
        if rank == 1:
            dist.barrier()
        for step in range(1, 20):
            question.ask()
            if rank == 1 and step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if question.due():
                break
            if rank == 0 and step == ahead:
                dist.barrier()
                dist.barrier()  # until the other has stopped
    if rank == 1:
        dist.barrier()
    return step


def test_workers_stop_after_the_last_step_that_one_has_promised() -> None:
    assert run_ranks(_stopped_after, 2, 5) == [6, 6]


@pytest.mark.parametrize(("ranks", "words", "rank"), [(2, (), 0), swept_case((4, ("--mesh.tp", "2"), 1))])
def test_a_signal_stops_all_after_one_step(ranks: int, words: tuple[str, ...], rank: int, tmp_path: Path) -> None:
    """Heard by a rank of the first worker before its step 3, when the other has not begun: promised are five steps.

    The other may make more of them, and promise more, before it hears of it; both stop after the same one.
    """
    argv = job(tmp_path, "--mesh.stroller", "2", *words, STROLL, "3", rank=rank, step=3)
    argv[argv.index("--plugins.path") + 1] = f'["{tmp_path}/plugins", "{GUESTS[1]}"]'
    assert run_ranks(train.main, ranks, argv, init=False, timeout=60) == [75] * ranks
    [kept] = complete(tmp_path / "run" / "checkpoints")
    step = max(read_rows(tmp_path / "run"))
    assert kept.name == f"step-{step:08}" and 5 <= step < 10
    assert run_ranks(train.main, ranks, argv, init=False, timeout=60) == [0] * ranks
