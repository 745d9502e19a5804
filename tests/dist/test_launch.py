"""The launcher: ranks meet, signals reach them once, and how they end becomes the run's exit code."""

import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.sweeps import swept_case
from titan import launch
from titan.ranks import failure, rank_processes
from titan.ranks.launcher import verdict
from titan.ranks.meeting import signals
from titan.ranks.meeting.launch_env import LOCAL, LaunchEnv
from titan.ranks.meeting.store import shared_store
from titan.ranks.preemption import Preemption
from titan.ranks.rank_processes import Ended, Entry, RankProcesses
from titan.testing.ranks import run_ranks as in_a_fresh_process


def _children(entry: Entry, ranks: int, fork: bool = True) -> RankProcesses:
    return RankProcesses(entry, ["--a.b", "1"], LaunchEnv(1, 0, ranks, LOCAL, 0), fork)


def _ends(entry: Entry, ranks: int, fork: bool = True) -> list[tuple[int, int]]:
    """(rank, exit code), in the order in which they end."""
    return [(end.rank, end.code) for end in _children(entry, ranks, fork).lead()]


def _sum_of_ranks(argv: list[str]) -> int:
    """Meets the others as a rank does; its exit code is the sum of all ranks' numbers."""
    assert argv == ["--a.b", "1"]
    dist.init_process_group("gloo")
    number = torch.tensor(dist.get_rank())
    dist.all_reduce(number)
    dist.destroy_process_group()
    return int(number)


@pytest.mark.parametrize(("ranks", "fork", "total"), [(4, True, 6), (2, False, 1)], ids=["forked", "spawned"])
def test_ranks_meet(ranks: int, fork: bool, total: int) -> None:
    [ended] = in_a_fresh_process(_ends, 1, _sum_of_ranks, ranks, fork, init=False)
    assert sorted(ended) == [(rank, total) for rank in range(ranks)]


def _one_is_killed() -> list[tuple[int, int]]:
    def entry(argv: list[str]) -> int:
        dist.init_process_group("gloo")
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.barrier()
        except RuntimeError:
            return 1
        return 0

    return _ends(entry, 3)


def test_peers_of_a_killed_rank_end_too() -> None:
    [ended] = in_a_fresh_process(_one_is_killed, 1, init=False)
    assert sorted(ended) == [(0, 1), (1, 1), (2, -signal.SIGKILL)]


def _terminated() -> list[Ended]:
    def entry(argv: list[str]) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        signal.sigwait({signal.SIGTERM})
        dist.barrier()
        return 1 if signal.SIGTERM in signal.sigpending() else 75

    before = signal.getsignal(signal.SIGINT)
    processes = _children(entry, 3)
    with processes.hearing():
        ended = processes.lead()
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "it ends now, whatever comes"
    assert processes.heard == {signal.SIGTERM}
    return ended


def test_a_signal_reaches_every_rank_once() -> None:
    [ended] = in_a_fresh_process(_terminated, 1, init=False)
    assert sorted((end.rank, end.code) for end in ended) == [(rank, 75) for rank in range(3)]


def _one_is_terminated() -> set[int]:
    def entry(argv: list[str]) -> int:
        dist.init_process_group("gloo")
        question = Preemption(2, max_minutes=0)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
        question.ask()
        return 75 if question.due() == "SIGTERM" and signals.heard() >= {signal.SIGTERM} else 1

    processes = _children(entry, 2)
    assert [ended.code for ended in processes.lead()] == [75, 75]
    return processes.heard


def test_a_signal_to_one_rank_is_heard_of() -> None:
    """By its peers, which stop with it, and by the launcher, which may have the scheduler run the job again."""
    assert in_a_fresh_process(_one_is_terminated, 1, init=False) == [{signal.SIGUSR1, signal.SIGTERM}]


def _the_first_to_fail_ends_last() -> list[tuple[int, int]]:
    """Rank 0 fails for want of rank 1, and is gone before rank 1 is."""

    def entry(argv: list[str]) -> int:
        dist.init_process_group("gloo")
        store = shared_store()
        if dist.get_rank() == 1:
            failure.tell(ValueError("the cause"), 1)
            rank_0 = os.pidfd_open(int(store.get("process of rank 0")))
            store.set("rank 1 failed", "")
            select.select([rank_0], [], [])
        else:
            store.set("process of rank 0", str(os.getpid()))
            store.wait(["rank 1 failed"])
        return 1

    return _ends(entry, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd_open")
def test_the_first_to_fail_is_named_whoever_ends_first() -> None:
    assert in_a_fresh_process(_the_first_to_fail_ends_last, 1, init=False) == [[(1, 1), (0, 1)]]


def _is_asked_to_stop(argv: list[str]) -> int:
    while not signals.heard():  # the launcher passes the signal on once all ranks are there
        os.sched_yield()
    question = Preemption(1, max_minutes=0)
    question.ask()
    return 75 if question.due() == "SIGTERM" else 1


def _terminated_at_the_start(fork: bool) -> list[Ended]:
    processes = _children(_is_asked_to_stop, 1, fork)
    with processes.hearing():
        os.kill(os.getpid(), signal.SIGTERM)
        return processes.lead()


@pytest.mark.parametrize("fork", [True, swept_case(False)], ids=["forked", "spawned"])
def test_a_signal_before_a_rank_is_awake_is_noted(fork: bool) -> None:
    assert in_a_fresh_process(_terminated_at_the_start, 1, fork, init=False) == [[Ended(0, 75)]]


def _one_outlives() -> tuple[list[tuple[int, int]], bool]:
    reading, writing = os.pipe()

    def entry(argv: list[str]) -> int:
        if os.environ["RANK"] == "0":
            return 1
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})  # it is asked for its stacks first
        signal.pause()
        return 0

    rank_processes.GRACE_S = 0.1
    ended = _ends(entry, 2)
    os.close(writing)
    return ended, os.read(reading, 1) == b""


def test_a_rank_that_outlives_a_failed_one_is_killed() -> None:
    assert in_a_fresh_process(_one_outlives, 1, init=False) == [([(0, 1)], True)], "all are gone"


IMMORTAL = """
import os, signal, sys
from multiprocessing.process import BaseProcess
from titan.ranks import rank_processes, launcher
from titan.ranks.rank_processes import RankProcesses
from titan.ranks.meeting.launch_env import LOCAL, LaunchEnv

def entry(argv):
    if os.environ["RANK"] == "0":
        return 2
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
    while True:
        signal.pause()

BaseProcess.kill = lambda process: None
rank_processes.GRACE_S = rank_processes.KILLED_S = 0.1
print(os.getpid())
sys.exit(launcher._lead(RankProcesses(entry, [], LaunchEnv(1, 0, 2, LOCAL, 0), fork=True), restarts=3, logs=None))
"""


def test_a_rank_that_survives_sigkill_keeps_nobody() -> None:
    """As in an uninterruptible wait for a file; here SIGKILL is not sent, and the rank ends with its launcher."""
    done = subprocess.run([sys.executable, "-c", IMMORTAL], capture_output=True, text=True, timeout=120, check=False)
    said = r"error: rank 1, process \d+, still exists 0\.1 s after SIGKILL: S \(sleeping\)\. It may still write"
    assert done.returncode == 1 and re.search(said, done.stderr), done.stderr
    assert "restart" not in done.stderr


def test_a_rank_that_survives_elsewhere_is_known_to_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = RankProcesses(_sum_of_ranks, [], LaunchEnv(2, 0, 1, LOCAL, 1), fork=True)
    monkeypatch.setattr(processes.nodes, "hear", lambda node: {"ended": [(1, 1)], "heard": [], "stuck": [1]})
    assert processes._hear(1) and processes.stuck == {1}


def _orphans() -> bytes:
    reading, writing = os.pipe()

    def entry(argv: list[str]) -> int:
        os.write(writing, b"r")
        signal.pause()
        return 0

    launcher = multiprocessing.get_context("fork").Process(target=_ends, args=(entry, 2))
    launcher.start()
    heard = os.read(reading, 1) + os.read(reading, 1)
    launcher.kill()
    os.close(writing)
    return heard + os.read(reading, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent death signal")
def test_no_rank_outlives_its_launcher() -> None:
    assert in_a_fresh_process(_orphans, 1, init=False) == [b"rr"]


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ([Ended(0, 0), Ended(1, 0)], 0),
        ([Ended(0, 75), Ended(1, 75)], 75),
        ([Ended(0, 75), Ended(1, 1)], 1),
        ([Ended(1, 2), Ended(0, 1)], 2),
        ([Ended(1, -9), Ended(0, 1)], 1),
        ([Ended(0, 7)], 1),
    ],
)
def test_exit_codes(ended: list[Ended], code: int) -> None:
    assert verdict(ended, set(), [], Path("logs")) == code


KILLED = "error: rank {0} was killed by SIGKILL (out of memory?); its log: x/rank-{0}.log\n"
FAILED = "error: rank {0} failed with exit code 1; its log: x/rank-{0}.log\n"


@pytest.mark.parametrize(
    ("ended", "more", "said"),
    [
        ([Ended(1, 1), Ended(3, -9)], {}, KILLED.format(3)),
        ([Ended(0, -11)], {}, "error: rank 0 was killed by SIGSEGV; its log: x/rank-0.log\n"),
        ([Ended(2, 1), Ended(0, -6)], {}, FAILED.format(2)),
        ([Ended(0, 1), Ended(1, 1)], {}, ""),
        ([Ended(1, 1), Ended(0, 1)], {"explained": 1}, ""),  # it has printed its error
        ([Ended(1, 1), Ended(2, 1)], {"explained": 2}, FAILED.format(1)),
        ([Ended(1, 1), Ended(0, -9)], {"explained": 1}, KILLED.format(0)),  # which explains more
        ([Ended(1, 1), Ended(0, 1)], {"heard": {signal.SIGINT}}, ""),  # Ctrl-C
    ],
)
def test_says_which_rank_is_the_cause(
    ended: list[Ended], more: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verdict(ended, **{"heard": set(), "lost": [], "logs": Path("x"), **more}) == 1
    assert capsys.readouterr().err == said


def test_a_lost_node_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict([Ended(0, 0)], set(), [2], Path("logs")) == 1
    assert capsys.readouterr().err == "error: the launcher of node 2 no longer responds\n"


def test_one_rank_trains_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.train.main", lambda words: 40 + len(words))
    monkeypatch.setattr(os, "environ", {"NPROC": "1"})
    assert launch.main(["--config", "x"]) == 42


def test_a_task_of_srun_becomes_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "MASTER_ADDR": "h"}
    monkeypatch.setattr("titan.train.main", lambda words: int(env["RANK"]))
    monkeypatch.setattr(os, "environ", env)
    assert launch.main([]) == 1
    assert env["WORLD_SIZE"] == "2"


def test_a_wrong_environment_is_said_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPROC", "none")
    assert launch.main([]) == 2
    assert capsys.readouterr().err == "error: environment: NPROC = 'none': must be an integer of at least 1\n"


def _an_expendable_rank_hangs() -> tuple[list[Ended], int]:
    def entry(argv: list[str]) -> int:
        if os.environ["RANK"] == "1":
            signal.pause()
        failure._ask(lambda store: failure.begin(store, [[1]]), None)
        return 0

    rank_processes.GRACE_S = 0.1
    children = _children(entry, 2)
    ended = children.lead()
    return ended, verdict(ended, children.heard, children.missed, None)


def test_a_rank_that_the_run_can_lose_is_not_waited_for() -> None:
    """All others have ended, and well: a worker that has failed may hang as it leaves its dead mates."""
    assert in_a_fresh_process(_an_expendable_rank_hangs, 1, init=False, timeout=60) == [([Ended(0, 0)], 0)]
