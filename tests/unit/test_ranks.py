"""The harness that every test with ranks stands on: `titan.testing.ranks`."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titan.testing.ranks import RankError, run_ranks


def _identity() -> tuple[int, int, str, int]:
    environment = ",".join(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return dist.get_rank(), dist.get_world_size(), environment, torch.get_num_threads()


def _sum(start: torch.Tensor) -> torch.Tensor:
    value = start + dist.get_rank()
    dist.all_reduce(value)
    return value


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"planted on {rank}")
    dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", file=sys.stderr)
        os._exit(7)
    dist.barrier()


def _wait_for_nobody() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def _init_from_environment() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    value = torch.tensor(dist.get_rank())
    dist.all_reduce(value)
    return int(value)


def _say(word: str) -> str:
    print(word, dist.get_rank())
    return str(Path.cwd())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_by_rank(world_size: int) -> None:
    expected = [(rank, world_size, f"{rank},{world_size},{rank}", 1) for rank in range(world_size)]
    assert run_ranks(_identity, world_size) == expected


@pytest.mark.parametrize("world_size", [4, 8])
def test_ranks_reduce_tensors_of_the_test(world_size: int) -> None:
    views = torch.arange(6.0).reshape(2, 3).T
    expected = views * world_size + sum(range(world_size))
    for result in run_ranks(_sum, world_size, start=views):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize("rank", [0, 2])
def test_first_failure_is_raised_and_its_peers_do_not_wait(rank: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=f"(?s)^rank {rank} of 3 raised.*_raise_on.*ValueError: planted on {rank}"):
        run_ranks(_raise_on, 3, rank, timeout=60)
    assert time.monotonic() - start < 30


def test_death_is_told_with_exit_code_and_last_words() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 of 2 ended with exit code 7.*last words"):
        run_ranks(_die_on, 2, 1)


def test_hang_ends_in_time_with_the_stack_of_who_hangs() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)^rank 1 did not end within 0.5 s.*in _wait_for_nobody"):
        run_ranks(_wait_for_nobody, 2, timeout=0.5)
    assert time.monotonic() - start < 30


def test_function_may_initialize_the_group_itself() -> None:
    assert [run_ranks(_init_from_environment, 2, init=False) for _ in range(2)] == [[1, 1], [1, 1]]


def test_ranks_stand_where_the_test_stands_and_are_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_ranks(_say, 2, "hello") == [str(tmp_path)] * 2
    assert capfd.readouterr().out == "--- rank 0\nhello 0\n--- rank 1\nhello 1\n"


@pytest.mark.sweep
def test_the_server_of_ranks_does_not_ask_for_gpus() -> None:
    """Whoever has asked CUDA for its devices can use none in a process that it forks."""
    code = """
import torch
asked = []
torch.cuda.is_available = lambda: asked.append("is_available")
torch.cuda.device_count = lambda: asked.append("device_count") or 0
torch._C._ensureCUDADeviceGuardSet = lambda: asked.append("a guard of devices")
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")  # as in a build for CUDA
import titan.testing.warm
assert not asked, asked
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
