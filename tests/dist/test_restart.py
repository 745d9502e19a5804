"""Ranks start again after a dead one, on one node and on several."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.commands import free_port, launch, launched
from tests.jobs import LLAMA
from tests.signals import TEN, job
from titan import launch as command
from titan.config import load_job
from titan.ranks import launcher, process
from titan.ranks.meeting.launch_env import LOCAL, LaunchEnv
from titan.ranks.rank_processes import RankProcesses
from titan.testing.jobs import read_rows, train_job
from titan.testing.ranks import run_ranks as in_a_fresh_process


def _lives(folder: Path) -> int:
    """Those of this rank, with this one, which is noted."""
    with (folder / os.environ["RANK"]).open("a") as lives:
        lives.write("x")
        return lives.tell()


def _dies_twice(folder: Path, argv: list[str]) -> int:
    """Rank 1 is killed in the first two lives of the ranks, which meet in each."""
    dist.init_process_group("gloo")
    dist.barrier()
    if _lives(folder) < 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        return 1
    return 0


def _led(entry: Callable[..., int], folder: Path, ranks: int, restarts: int) -> tuple[int, str]:
    """The exit code, and an x for each life of each rank."""
    processes = RankProcesses(partial(entry, folder), [], LaunchEnv(1, 0, ranks, LOCAL, 0), fork=True)
    code = launcher._lead(processes, restarts, Path("logs"))
    return code, "".join(path.read_text() + " " for path in sorted(folder.iterdir()))


@pytest.mark.parametrize(
    ("restarts", "code", "lives", "lines"), [(0, 1, "x x ", 1), (1, 1, "xx xx ", 3), (2, 0, "xxx xxx ", 4)]
)
def test_a_failed_run_starts_all_ranks_again(
    restarts: int, code: int, lives: str, lines: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert in_a_fresh_process(_led, 1, _dies_twice, tmp_path, 2, restarts, init=False) == [(code, lives)]
    said = capfd.readouterr().out.splitlines()
    died = "error: rank 1 was killed by SIGKILL (out of memory?); its log: logs/rank-1.log"
    again = [f"restart {n} of {restarts}: all ranks resume from the newest checkpoint" for n in (1, 2)]
    assert [line for line in said if line in (died, *again)] == [died, again[0], died, again[1]][:lines]


def _lives_once(how: str, folder: Path, argv: list[str]) -> int:
    _lives(folder)
    if how.isdecimal():
        return int(how)
    os.kill(os.getppid(), signal.Signals[how])
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return 1


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("75", 75), ("2", 2), ("SIGINT", 1)])
def test_what_is_not_started_again(how: str, code: int, tmp_path: Path) -> None:
    entry = partial(_lives_once, how)
    assert in_a_fresh_process(_led, 1, entry, tmp_path, 1, 3, init=False) == [(code, "x ")]


def test_one_rank_that_may_start_again_is_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        launcher, "start", lambda train, words, place, job, restarts, *_, **__: 10 * place.world_size + restarts
    )
    monkeypatch.setattr(os, "environ", {"NPROC": "1", "MAX_RESTARTS": "3"})
    assert command.main([]) == 13


def test_restarts_need_a_run_that_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "NPROC": "1", "MAX_RESTARTS": "3"})
    assert command.main(["--config", str(LLAMA), "--data.path", "x", "--checkpoint.enabled", "false"]) == 2
    said = 'MAX_RESTARTS = 3: restarts need checkpoints; set [checkpoint] enabled = true and resume = "auto"\n'
    assert capsys.readouterr().err == f"error: environment: {said}"


STALE = '''
"""Text on a file system that fails once."""

import errno
from pathlib import Path

from titan.contracts import register
from titan.plugins.data.text import Text


@register
class Stale(Text):
    """Text that cannot be read at first."""

    name = "stale"

    def documents(self, file):
        once = Path(__file__).with_name("once")
        if not once.exists():
            once.touch()
            raise OSError(errno.ESTALE, "Stale file handle", str(file))
        yield from super().documents(file)
'''


def test_a_file_system_that_fails_at_the_start_is_tried_again(tmp_path: Path) -> None:
    """Rank 0 tokenizes, and the other one ends with it; the words that rank 0 says are those of any wrong file."""
    argv = job(tmp_path, "--mesh.dp_shard", "2", "--train.steps", "1", "--data.name", "stale", to="nobody", rank=2)
    (tmp_path / "plugins" / "stale.py").write_text(STALE)
    code, said = launch(argv, NPROC=2, MAX_RESTARTS=1)
    assert code == 0, said
    assert f"error: cannot tokenize into the cache {tmp_path}/cache: {tmp_path}/" in said
    assert ": Stale file handle; set data.cache to another folder" in said
    assert "restart 1 of 1" in said and sorted(read_rows(tmp_path / "run")) == [1]


def _store_of_a_third_life(folder: str) -> bool:
    job = load_job(LLAMA, ["--run.dir", folder, "--data.path", folder], 1)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
    with patch.object(dist, "init_process_group") as begin:
        process.join(job)
    begin.call_args.kwargs["store"].set("key", "")
    raw = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return bool(raw.check(["attempt 2/key"]))


def test_ranks_that_torchrun_starts_again_do_not_meet_the_dead(tmp_path: Path) -> None:
    """Its store is the same for all lives; ours is a new one each time."""
    assert in_a_fresh_process(_store_of_a_third_life, 1, str(tmp_path), init=False) == [True]


def test_two_nodes_start_again_together(tmp_path: Path) -> None:
    """The last rank, on the other node, is killed once; the run goes on from step 4 and ends on the same curve."""
    layout = ("--mesh.dp_shard", "2", "--mesh.pp", "2")
    saving = ("--checkpoint.every", "4", "--checkpoint.async", "false")
    argv = job(tmp_path, *layout, *saving, step=6, rank=3, signal="SIGKILL", once=tmp_path / "rung")
    places = {"NNODES": 2, "MASTER_ADDR": LOCAL, "MASTER_PORT": free_port(), "NPROC": 2, "MAX_RESTARTS": 2}
    with launched(argv, **places, NODE_RANK=1) as other:
        (first_code, first), (second_code, second) = launch(argv, **places, NODE_RANK=0), other.end()
    assert (first_code, second_code) == (0, 0), first + second
    assert f"error: rank 3 was killed by SIGKILL (out of memory?); its log: {tmp_path}/run/logs/rank-3.log" in first
    assert "restart 1 of 2" in first and "restart 2" not in first
    assert "step-00000004, step 4" in first
    whole = train_job(tmp_path, 4, *layout, *TEN, name="whole").rows
    rows = read_rows(tmp_path / "run")
    assert {step: row["loss"] for step, row in rows.items()} == {step: row["loss"] for step, row in whole.items()}
