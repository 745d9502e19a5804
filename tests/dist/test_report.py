"""An error that all ranks raise alike is printed once, and is not lost if the rank that was to print it cannot."""

import hashlib
import os
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from tests.commands import free_port
from titan import log
from titan.errors import ConfigError, DivergedError, RankFailedError
from titan.ranks import failure, process
from titan.ranks.meeting.launch_env import LOCAL, LaunchEnv
from titan.ranks.meeting.store import await_port, shared_store
from titan.ranks.rank_processes import RankProcesses
from titan.testing.ranks import run_ranks


def reports(folder: Path, port: int = 0, text: str = "no such text") -> None:
    """On a rank: refuse the job with these words, in which {} is the rank. port: rank 0 serves the store there."""
    rank = int(os.environ["RANK"])
    if port:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
        os.environ["MASTER_PORT"] = str(port)
    log.set_up(rank, folder)
    failure.report(ConfigError(text.format(rank)), rank)
    process.leave()


def printed(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().out.splitlines() if "error: " in line]


@pytest.mark.parametrize("how", ["joined", "before they join", "tasks of srun"])
def test_what_all_raise_is_printed_by_rank_0(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of tasks of srun rank 0 serves the store, and stays until the others have asked."""
    run_ranks(reports, 4, tmp_path, free_port() if how == "tasks of srun" else 0, init=how == "joined")
    assert printed(capfd) == ["error: no such text"]
    logs = [path.read_text() for path in sorted(tmp_path.glob("rank-*.log"))]
    assert len(logs) == 4 and all("error: no such text" in text for text in logs)


def test_what_each_raises_for_itself_is_printed_by_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(reports, 3, tmp_path, 0, "no GPU {}")
    assert sorted(printed(capfd)) == ["error: no GPU 0", "rank 1: error: no GPU 1", "rank 2: error: no GPU 2"]


def no_rank_0(folder: Path, port: int) -> None:
    failure.ANSWER_S = 0.5
    if os.environ["RANK"] != "0":
        reports(folder, port)


def test_without_rank_0_each_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(no_rank_0, 3, tmp_path, free_port(), init=False)
    assert sorted(printed(capfd)) == ["rank 1: error: no such text", "rank 2: error: no such text"]


def unread(folder: Path) -> None:
    """Nobody reads what rank 0 prints."""
    if os.environ["RANK"] == "0":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    reports(folder)


def test_a_rank_that_nobody_reads_leaves_it_to_another(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(unread, 3, tmp_path)
    [line] = printed(capfd)
    assert line in ("rank 1: error: no such text", "rank 2: error: no such text")


def dies(folder: Path) -> None:
    """Rank 0 asks, and is gone before it prints."""
    failure.ANSWER_S = 2.0
    if os.environ["RANK"] == "0":
        facts = failure._facts(shared_store())
        assert failure._first_to(facts, f"printer {hashlib.sha256(b'no such text').hexdigest()}", 0) == 0
    dist.barrier()
    if os.environ["RANK"] != "0":
        reports(folder)


def test_a_rank_that_dies_before_it_prints_loses_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(dies, 2, tmp_path)
    assert printed(capfd) == ["rank 1: error: no such text"]


def joins_late(folder: Path, port: int) -> str:
    """Rank 0 refuses the job; rank 1, on another machine, does not."""
    if os.environ["RANK"] == "0":
        reports(folder, port)
        return ""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    os.environ["MASTER_PORT"] = str(port)
    await_port(LOCAL, port, time.monotonic() + 20.0)
    with pytest.raises(RankFailedError) as failed:
        process.enter(process.here("cpu"), timeout_s=20.0)
    failure.report(failed.value, 1)
    process.leave()
    return str(failed.value)


def test_a_rank_that_joins_hears_that_another_has_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = "rank 0 failed before all ranks of the run had met"
    assert run_ranks(joins_late, 2, tmp_path, free_port(), init=False) == ["", said]
    assert printed(capfd) == ["error: no such text", f"rank 1: error: {said}"]


def _refuses(argv: list[str]) -> int:
    failure.report(ConfigError("no such text" if argv == ["alike"] else f"no GPU {os.environ['RANK']}"), 1)
    return 2


def _unforeseen(argv: list[str]) -> int:
    if os.environ["RANK"] == "1":
        failure.tell(KeyError("planted"), 1)
    return 1


def _led(argv: list[str]) -> int | None:
    ranks = RankProcesses(_refuses if argv else _unforeseen, argv, LaunchEnv(1, 0, 2, LOCAL, 0), fork=True)
    ranks.lead()
    return ranks.explained


def test_the_launcher_knows_of_what_has_been_printed() -> None:
    assert run_ranks(_led, 1, ["alike"], init=False) == [1]
    assert run_ranks(_led, 1, [], init=False) == [None], "a stack trace; the log has what went before it"


def _refused() -> NoReturn:
    raise ConnectionRefusedError


def test_which_deaths_a_run_outlives(capfd: pytest.CaptureFixture[str]) -> None:
    """Of whole workers, once all have begun; also told by another node when nobody serves the store any more."""
    store, runs = HashStore(), failure.Expendable()
    runs.start(store)
    assert not runs.lose([2], "rank 2 was killed")  # before the first step
    failure.begin(store, [[rank, rank + 1] for rank in (2, 4, 6, 8)])
    assert not runs.lose([1], "rank 1 was killed") and not runs.lose([1, 2], "node 0 is gone")
    assert failure._first_to(failure._facts(store), failure._FIRST, 3) == 3
    assert runs.lose([2], "rank 2 was killed") and runs.lost == {2, 3} and runs.lose([3], "its mate")
    assert failure.first(store) is None, "what fails now would be said to miss rank 3"
    for rank, error in ((4, DivergedError("nan")), (6, RankFailedError("rank 0 is gone"))):
        failure._facts(store).set(f"kind {rank}", failure._kind(error))
    assert not runs.lose([4], "rank 4 failed") and runs.lose([6], "rank 6 failed")
    runs.stop()
    assert runs.lose([9], "rank 9 was killed") and not runs.lose([0], "rank 0 was killed")
    assert capfd.readouterr().err.splitlines() == [
        "warning: rank 2 was killed; the run goes on without its worker, ranks 2, 3",
        "warning: rank 9 was killed; the run goes on without its worker, ranks 8, 9",
    ]
    asked = []
    runs.start(None, lambda limit_s: asked.append(limit_s) or _refused())
    runs.connect()
    runs.connect()
    assert len(asked) == 1 and not runs.lose([2], "rank 2 was killed"), "another node serves no store any more"
    runs.start(None, lambda limit_s: store)
    runs.connect()
    assert 2 in runs and 0 not in runs
    runs.start(HashStore())
    assert not runs.lost and not runs.lose([2], "rank 2 was killed")
