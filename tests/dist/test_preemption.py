"""Asked to make room, a run saves after the same step on all ranks and ends with 75; the same command goes on."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.commands import launch
from tests.signals import TEN, job
from tests.sweeps import swept_case
from titan import train
from titan.checkpoint.disk.folder import complete
from titan.ranks import preemption
from titan.ranks.meeting import signals
from titan.ranks.meeting.signals import listening
from titan.ranks.preemption import Preemption
from titan.testing.jobs import Outcome, differences, read_rows, train_job
from titan.testing.ranks import run_ranks

PIPELINE = ("--mesh.dp_shard", "2", "--mesh.pp", "2")


def on_ranks(ranks: int, argv: list[str]) -> set[int]:
    """The exit codes of the ranks, without a launcher."""
    return set(run_ranks(train.main, ranks, argv, init=False, timeout=200))


def saved(folder: Path) -> list[str]:
    return [path.name for path in complete(folder / "run" / "checkpoints")]


def assert_whole(folder: Path, uninterrupted: Outcome) -> None:
    """Every step was logged once, with the very numbers of a run that nobody stopped."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    run, exact = Outcome(read_rows(folder / "run"), {}), dict.fromkeys(("loss", "grad_norm", "lr"), 0.0)
    assert differences(uninterrupted, run, rows_only=exact) == [] and len(lines) == len(run.rows)


def test_sigterm_to_the_launcher(tmp_path: Path) -> None:
    """Twice, while the checkpoints of every step are on their way to the disk."""
    saving = ("--checkpoint.every", "1", "--checkpoint.async", "true")
    argv = job(tmp_path, "--mesh.dp_shard", "2", *saving, "--run.sample_prompt", "the", to="launcher", times=2)
    code, first = launch(argv, NPROC=2)
    assert code == 75, first
    # It comes during step 4 of the rank that calls for it; the other one may not have begun that step.
    step = 4 if "at step 4" in first else 5
    folder = tmp_path / "run" / "checkpoints" / f"step-0000000{step}"
    said = f"preempted by SIGTERM at step {step}: checkpoint saved to {folder}; to resume, run the same command"
    assert first.splitlines()[-1] == said and "sample after" not in first
    assert saved(tmp_path) == [f"step-0000000{step - 1}", f"step-0000000{step}"]
    code, second = launch(argv, NPROC_PER_NODE=2)
    assert code == 0 and f"step-0000000{step}, step {step}" in second and "sample after step 10" in second, second
    assert_whole(tmp_path, train_job(tmp_path, 2, "--mesh.dp_shard", "2", *TEN, name="whole"))


@pytest.mark.parametrize(
    ("layout", "ranks", "rank", "name"),
    [((), 1, 0, "SIGTERM"), (("--mesh.tp", "2"), 2, 1, "SIGUSR1"), swept_case((PIPELINE, 4, 2, "SIGTERM"))],
    ids=["one", "tp", "pp"],
)
def test_a_signal_to_one_rank(
    layout: tuple[str, ...], ranks: int, rank: int, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = job(tmp_path, *layout, rank=rank, signal=name)
    assert on_ranks(ranks, argv) == {75}
    assert f"preempted by {name} at step 5" in capfd.readouterr().out
    assert saved(tmp_path) == ["step-00000005"]
    assert on_ranks(ranks, argv) == {0}
    assert_whole(tmp_path, train_job(tmp_path, ranks, *layout, *TEN, name="whole"))


def _leading_a_session(argv: list[str]) -> int:
    os.setsid()
    return train.main(argv)


@pytest.mark.parametrize("name", [swept_case("SIGTERM"), "SIGUSR1"])
def test_a_signal_to_every_process_of_a_rank(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What Slurm does: the loader's workers get it too, and must outlive it."""
    argv = job(tmp_path, "--data.workers", "2", signal=name, to="group")
    assert run_ranks(_leading_a_session, 1, argv, init=False) == [75]
    said = capfd.readouterr().out
    assert "data: loaded by 2 processes per rank" in said and f"preempted by {name} at step 5" in said


def test_a_time_limit_that_is_over_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A step is done all the same, so that a run that is queued again and again gets on."""
    argv = job(tmp_path, "--mesh.pp", "2", "--run.max_minutes", "1e-9", "--train.steps", "3")
    for step in (1, 2):
        assert on_ranks(2, argv) == {75}
        assert f"preempted by run.max_minutes at step {step}" in capfd.readouterr().out
        assert saved(tmp_path)[-1] == f"step-0000000{step}"
    assert on_ranks(2, argv) == {0}
    assert_whole(tmp_path, train_job(tmp_path, 2, "--mesh.pp", "2", *TEN, "--train.steps", "3", name="whole"))


def test_a_time_limit_that_is_never_reached(tmp_path: Path) -> None:
    assert on_ranks(1, job(tmp_path, "--run.max_minutes", "1000")) == {0}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--checkpoint.enabled", "false"), "nothing was saved, because [checkpoint] enabled = false"),
        (("--checkpoint.resume", "never"), "to resume, run the same command with --checkpoint.resume auto"),
    ],
)
def test_no_75_when_the_same_command_would_not_get_on(
    more: tuple[str, ...], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert on_ranks(2, job(tmp_path, "--mesh.dp_shard", "2", *more, rank=1)) == {1}
    printed = capfd.readouterr().out
    assert "error: preempted by SIGTERM at step 5" in printed and said in printed


def test_a_run_that_is_done_is_not_preempted_but_brief(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = job(tmp_path, "--mesh.dp_shard", "2", "--run.sample_prompt", "the", rank=1, step=10)
    assert on_ranks(2, argv) == {0}
    assert saved(tmp_path) == ["step-00000010"]
    assert "sample after" not in capfd.readouterr().out


def test_signals_are_noted_while_somebody_listens() -> None:
    handlers = [signal.getsignal(number) for number in signals.SIGNALS]
    with listening():
        alone = Preemption(1, max_minutes=0)
        alone.ask()
        assert alone.due() == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert alone.due() == "", "what comes after the question is for the next one"
        alone.ask()
        assert alone.due() == "SIGUSR1"
    assert [signal.getsignal(number) for number in signals.SIGNALS] == handlers
    alone.ask()
    assert alone.due() == ""


def test_a_signal_that_has_waited_is_noted() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # other threads do not block it
    with listening():
        assert signals.heard() == {signal.SIGUSR1}


def _ends_beside_a_thread() -> None:
    done = threading.Event()
    threading.Thread(target=done.wait).start()
    with listening():
        signals.hear_no_more()
    os.kill(os.getpid(), signal.SIGTERM)
    done.set()


def test_a_process_that_ends_hears_signals_on_no_thread() -> None:
    run_ranks(_ends_beside_a_thread, 1, init=False)


@pytest.mark.parametrize("ranks", [swept_case(1), 2])
def test_signals_after_the_save_do_not_change_the_exit_code(ranks: int, tmp_path: Path) -> None:
    """To the launcher, which passes them on, until all are gone; the real one, as an interpreter takes long to end."""
    words = job(tmp_path, "--mesh.dp_shard", str(ranks), to="rank")
    command = [sys.executable, "-P", "-m", "titan.launch", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NPROC": str(ranks)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    while not any("preempted by" in line for line in said):
        said.append(process.stderr.readline())
        assert said[-1], said
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
    process.stderr.close()
    assert process.returncode == 75, said


class _Clock:
    """A rank's clock, which moves when it is told to, and the steps that asked all ranks since it is in force."""

    def __init__(self) -> None:
        self.now, self.step, self.asked = 0.0, 0, []  # type: float, int, list[int]
        preemption.time = SimpleNamespace(monotonic=lambda: self.now)  # type: ignore[attr-defined]
        self._all_reduce = dist.all_reduce
        dist.all_reduce = self._counting

    def _counting(self, tensor: Any, *how: Any, **more: Any) -> Any:
        if tensor.numel() == 2 and not tensor.is_floating_point():
            self.asked.append(self.step)
        return self._all_reduce(tensor, *how, **more)


def _stopped(lengths: list[float], sent_in: int, steps: int) -> tuple[list[int], int]:
    """Steps of `lengths`[rank] seconds, and a signal to the last rank in one of them: who asked, and the last step."""
    clock, rank = _Clock(), dist.get_rank()
    with listening():
        question = Preemption(len(lengths), max_minutes=0)
        for clock.step in range(1, steps + 1):
            question.ask()
            if clock.step == sent_in and rank == len(lengths) - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            clock.now += lengths[rank]
            if question.due():
                break
    return clock.asked, clock.step


@pytest.mark.parametrize(
    ("lengths", "sent_in", "asked", "last"),
    [
        ([2.0, 0.9], 20, list(range(1, 22)), 21),  # the slowest rank counts
        ([0.3, 0.1], 14, [*range(1, 11), 12, 15], 15),  # three steps of 0.3 s fit into a second
        ([0.02, 0.04], 27, [*range(1, 11), 12, 16, 24, 40], 40),  # at most twice as many as before
        ([1e-4, 1e-6], 133, [*range(1, 11), 12, 16, 24, 40, 65, 90, 115, 140], 140),  # at most 25
    ],
    ids=["long steps", "short", "shorter", "shortest"],
)
def test_ranks_with_clocks_of_their_own_ask_in_the_same_steps(
    lengths: list[float], sent_in: int, asked: list[int], last: int
) -> None:
    """And stop after the same one: the next, or within two seconds of the slowest rank's clock."""
    assert run_ranks(_stopped, 2, lengths, sent_in, 400) == [(asked, last)] * 2
    assert last == sent_in + 1 or (last - sent_in + 1) * max(lengths) <= 2 * preemption.INTERVAL_S


def _asking_steps(argv: list[str]) -> list[int]:
    clock = _Clock()
    begun = Preemption.ask

    def ask(self: Preemption, *, now: bool = False) -> None:
        clock.step, clock.now = clock.step + 1, clock.now + 1e-3
        begun(self, now=now)

    Preemption.ask = ask  # type: ignore[method-assign]
    assert train.main(argv) == 0
    return clock.asked


def test_steps_that_validate_or_save_ask_and_so_do_the_steps_after_them(tmp_path: Path) -> None:
    """Saves end steps 14 and 28, validations 20 and 30; after the end, a question of its own."""
    validated = ("--validation.every", "20", "--validation.name", "text", "--validation.path", f"{tmp_path}/text")
    argv = job(tmp_path, "--mesh.dp_shard", "2", "--train.steps", "30", "--checkpoint.every", "14", *validated)
    asked = [*range(1, 11), 12, 14, 15, 20, 21, 28, 29, 30, 31]
    assert run_ranks(_asking_steps, 2, argv, init=False, timeout=200) == [asked] * 2


def _handler() -> object:
    with listening():
        return signal.getsignal(signal.SIGTERM)


def test_a_thread_does_not_listen() -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(_handler).result() == signal.getsignal(signal.SIGTERM) != _handler()
