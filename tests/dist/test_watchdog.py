"""What hangs ends, and after how long: with a sentence, the stacks of every rank, and their last collectives."""

import os
import re
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.jobs import LLAMA
from tests.sweeps import swept_case
from titan.checkpoint import storage
from titan.errors import EXIT_FAILED
from titan.ranks import launcher, rank_processes, watchdog
from titan.ranks.meeting.launch_env import LOCAL, LaunchEnv
from titan.ranks.meeting.same_job import Statement
from titan.testing.jobs import run_job, write_text
from titan.testing.ranks import RankError, run_ranks
from titan.training import trainer

TEST_PLUGINS = Path(__file__).parents[1] / "plugins"


def _words(folder: Path, *words: str) -> list[str]:
    if not (folder / "text").exists():
        write_text(folder / "text")
    return ["--run.name", "run", "--data.path", str(folder / "text"), "--mesh.dp_shard", "2", *words]


def _hung_disk(*_: object) -> None:
    threading.Event().wait()


def _with_a_hung_disk(operation: str, folder: Path, words: list[str]) -> None:
    """On one rank of a job: rank 1 never comes back from `operation`, rank 0 waits for it."""
    watchdog.LINGER_S = 2.0
    if os.environ["RANK"] == "1":
        setattr(storage, operation, _hung_disk)
    run_job(str(folder), words, str(LLAMA))


def _log(folder: Path, rank: int) -> str:
    return (folder / "run" / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.parametrize(
    ("operation", "asynchronous", "said"),
    [
        ("write", "true", "saving step 2 to"),
        swept_case(("write", "false", "saving step 2 to")),
        swept_case(("read", "true", "loading the checkpoint")),
    ],
    ids=["save in the background", "save", "load"],
)
def test_a_hung_checkpoint_shows_every_rank(
    operation: str, asynchronous: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saving = ("--checkpoint.enabled", "true", "--checkpoint.every", "2", "--checkpoint.async", asynchronous)
    words = _words(tmp_path, *saving, "--train.steps", "2")
    if operation == "read":
        run_ranks(run_job, 2, str(tmp_path), words, str(LLAMA), init=False)
    words += ["--comm.checkpoint_timeout_s", "2", "--train.steps", "9"]
    with pytest.raises(RankError, match="ended with exit code 1"):
        run_ranks(_with_a_hung_disk, 2, operation, tmp_path, words, init=False)
    printed = capfd.readouterr().out
    for rank in range(2):
        log = _log(tmp_path, rank)
        for text in (printed, log):
            assert f"the stacks of rank {rank} follow, and are in {tmp_path}/run/logs/rank-{rank}.log" in text, text
        assert said in log and "took longer than 2 s ([comm] checkpoint_timeout_s)" in log
    assert "in _hung_disk" in _log(tmp_path, 1) and "in _hung_disk" not in _log(tmp_path, 0)
    assert f"in {operation}" in _log(tmp_path, 0), "rank 0 waits for the other in the middle of it"


def _late(folder: Path) -> None:
    watchdog.LINGER_S = 3.0
    rank = dist.get_rank()
    with watchdog.limit(1 + rank, "[a] b", f"waiting on rank {rank}"):
        _hung_disk()


def test_a_rank_whose_limit_ends_later_shows_its_stacks_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="rank 0 of 2 ended with exit code 1"):
        run_ranks(_late, 2, tmp_path)
    printed = capfd.readouterr().out
    assert "waiting on rank 0 took longer than 1 s ([a] b)" in printed
    assert "waiting on rank 1 took longer than 2 s ([a] b)" in printed and printed.count("in _hung_disk") == 2


def test_what_ends_in_time_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with watchdog.limit(600, "[a] b", "nothing"):
        assert threading.active_count() == before + 1
    for timer in [thread for thread in threading.enumerate() if thread.name == "watchdog"]:
        timer.join(10)
    assert threading.active_count() == before
    assert capfd.readouterr().err == ""


LOST = "Connection (closed|reset) by peer"
"""What Gloo says of a rank that is gone: reset where the rank left something unread."""


def _launched(argv: list[str]) -> int:
    from titan.train import main

    rank_processes.GRACE_S = 0.5
    return launcher.start(main, argv, LaunchEnv(1, 0, 2, LOCAL, 0), Statement())


def _printed_by_a_failure(folder: Path, plugin: str, capfd: pytest.CaptureFixture[str], *more: str) -> str:
    """What a launcher and its two ranks print, of which a test's plugin ends one."""
    place = ("--config", str(LLAMA), "--run.dir", str(folder), "--data.cache", f"{folder}/cache")
    own = ("--plugins.path", str(TEST_PLUGINS / f"{plugin}.py"), f"--plugins.{plugin}.enabled", "true")
    assert run_ranks(_launched, 1, _words(folder, *place, *own, *more), init=False) == [EXIT_FAILED]
    return capfd.readouterr().out


def test_a_rank_that_hangs_in_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed = _printed_by_a_failure(tmp_path, "hang", capfd, "--comm.timeout_s", "2")
    assert "Timed out waiting 2000ms" in printed
    hung = printed.partition("rank 1 did not exit within 0.5 s of another rank's failure; killing it. Stacks:")[2]
    assert "in _wait_for_nobody" in hung and "in before_step" in hung, printed
    recording = tmp_path / "run" / "logs" / "flight-gloo-rank-0"
    assert f"the last collectives of rank 0 are in {recording}" in printed
    assert "torchfrtrace --allow-incomplete-ranks --prefix flight-gloo-rank- " in printed


def test_the_rank_that_failed_first_is_shown_and_its_peers_say_whom_they_miss(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    printed = _printed_by_a_failure(tmp_path, "raise_in_hook", capfd)
    first = printed.partition("rank 1 failed:\nTraceback (most recent call last):")[2].partition("rank 0")[0]
    assert "raise_in_hook.py" in first and first.rstrip().endswith("ValueError: thrown in a hook"), printed
    assert f"rank 0 cannot continue without rank 1; its own stack trace is in {tmp_path}/run/logs/rank-0.log" in printed
    assert printed.count("Traceback") == 1 and not re.search(LOST, printed), printed
    assert "error: rank 1 failed with exit code 1" in printed
    assert "ValueError: thrown in a hook" in _log(tmp_path, 1) and re.search(LOST, _log(tmp_path, 0))


def _one_stays_away(logs: Path) -> None:
    rank = int(os.environ["RANK"])
    watchdog.record_collectives(rank, logs, nccl=False)
    dist.init_process_group("gloo")
    dist.barrier()
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.barrier(group, async_op=True)
    watchdog.keep_recording()
    dist.barrier()


def test_the_flight_recording_names_who_stayed_away(tmp_path: Path) -> None:
    run_ranks(_one_stays_away, 2, tmp_path, init=False)
    reader = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "--allow-incomplete-ranks"]
    reader += ["--prefix", "flight-gloo-rank-", str(tmp_path)]
    done = subprocess.run(reader, capture_output=True, text=True, check=True, timeout=100)
    told = done.stdout + done.stderr
    assert "collective: gloo:barrier" in told and "missing ranks: {1}" in told and "_one_stays_away" in told, told


def _nccl_environment(logs: Path) -> tuple[dict[str, str], str]:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "7"
    watchdog.record_collectives(3, logs, nccl=True)
    told = {name: value for name, value in os.environ.items() if name.startswith(("TORCH_FR", "TORCH_NCCL"))}
    return told, watchdog.recorder()


def test_nccl_is_told_where_to_write(tmp_path: Path) -> None:
    [(told, recorder)] = run_ranks(_nccl_environment, 1, tmp_path, init=False)
    own = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight-nccl-rank-"}
    assert told == {"TORCH_FR_BUFFER_SIZE": "7", **own}
    assert f"to {tmp_path}/flight-nccl-rank-N when" in recorder and "torchfrtrace" in recorder


def _asked() -> int:
    watchdog.answer_to_quit()
    os.kill(os.getpid(), signal.SIGQUIT)
    return 5


def test_a_rank_shows_its_stacks_when_asked_and_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(_asked, 1, init=False) == [5]
    assert "in _asked" in capfd.readouterr().out


def _train(folder: str) -> list[tuple[int, float, int]]:
    """Of each change: the steps done before it, its seconds, and the number of groups that it reached."""
    found, steps = [], []
    set_all, step = trainer.set_timeouts, trainer.step

    def note_all(mesh: Any, timeout_s: float) -> None:
        set_all(mesh, timeout_s)
        groups = {group.group_name: group for group in (dist.group.WORLD, *(group for _, group in mesh.groups()))}
        timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in groups.values()}
        assert timeouts == {timedelta(seconds=timeout_s)}
        found.append((len(steps), timeout_s, len(groups)))

    def count(*args: Any) -> Any:
        steps.append(1)
        return step(*args)

    trainer.set_timeouts, trainer.step = note_all, count
    words = ["--mesh.dp_shard", "2", "--mesh.tp", "2", "--train.steps", "2", "--comm.init_timeout_s", "77"]
    run_job(folder, [*words, "--comm.timeout_s", "55", "--data.path", f"{folder}/text"], str(LLAMA))
    return found


def test_every_group_waits_long_until_the_first_step_is_done(tmp_path: Path) -> None:
    """Of the mesh too: PyTorch gives groups of NCCL its own default, whatever that of all ranks has."""
    write_text(tmp_path / "text")
    assert run_ranks(_train, 4, str(tmp_path), init=False) == [[(0, 77.0, 3), (1, 55.0, 3)]] * 4
