"""Asked to make room, a run saves after the same step on all ranks and ends with 75; the same command goes on."""

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.jobs import Outcome, read_rows, train_job
from tests.ranks import run_ranks
from tests.signals import end, job, launch
from tests.sweeps import swept_case
from titan import train
from titan.checkpoint.disk.folder import complete
from titan.ranks import preemption
from titan.ranks.preemption import Preemption, listening

PIPELINE = ("--mesh.dp_shard", "2", "--mesh.pp", "2")


def on_ranks(ranks: int, argv: list[str]) -> set[int]:
    """The exit codes of the ranks, without a launcher."""
    return set(run_ranks(train.main, ranks, argv, init=False, timeout=200))


def saved(folder: Path) -> list[str]:
    return [path.name for path in complete(folder / "run" / "checkpoints")]


def assert_whole(folder: Path, uninterrupted: Outcome) -> None:
    """Every step was logged once, with the very numbers of a run that nobody stopped."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = read_rows(folder / "run")
    assert sorted(rows) == sorted(uninterrupted.rows) and len(lines) == len(rows)
    for step, row in rows.items():
        for key in ("loss", "grad_norm", "tokens", "lr"):
            assert row[key] == uninterrupted.rows[step][key], (step, key)


def test_sigterm_to_the_launcher(tmp_path: Path) -> None:
    """Twice, while the checkpoints of every step are on their way to the disk."""
    saving = ("--checkpoint.every", "1", "--checkpoint.async", "true")
    argv = job(tmp_path, "--mesh.dp_shard", "2", *saving, "--run.sample", "the", to="launcher", times=2)
    code, first = end(launch(argv, NPROC=2))
    assert code == 75, first
    # It comes during step 4 of the rank that calls for it; the other one may not have begun that step.
    step = 4 if "at step 4" in first else 5
    folder = tmp_path / "run" / "checkpoints" / f"step-0000000{step}"
    said = f"preempted by SIGTERM at step {step}: checkpoint saved to {folder}; to resume, run the same command"
    assert first.splitlines()[-1] == said and "sample after" not in first
    assert saved(tmp_path) == [f"step-0000000{step - 1}", f"step-0000000{step}"]
    assert first.count("[run] sample is now sample_prompt") == 1  # by one of the launcher and its ranks
    code, second = end(launch(argv, NPROC_PER_NODE=2))
    assert code == 0 and f"step-0000000{step}, step {step}" in second and "sample after step 10" in second, second
    assert_whole(tmp_path, train_job(tmp_path, 2, "--mesh.dp_shard", "2", name="whole"))


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
    assert_whole(tmp_path, train_job(tmp_path, ranks, *layout, name="whole"))


def _leading_a_session(argv: list[str]) -> int:
    os.setsid()
    return train.main(argv)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_every_process_of_a_rank(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What Slurm does: the loader's workers get it too, and must outlive it."""
    argv = job(tmp_path, "--data.workers", "1", signal=name, to="group")
    assert run_ranks(_leading_a_session, 1, argv, init=False) == [75]
    assert f"preempted by {name} at step 5" in capfd.readouterr().out


def test_a_time_limit_that_is_over_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A step is done all the same, so that a run that is queued again and again gets on."""
    argv = job(tmp_path, *PIPELINE, "--run.max_minutes", "1e-9", "--train.steps", "3")
    for step in (1, 2):
        assert on_ranks(4, argv) == {75}
        assert f"preempted by run.max_minutes at step {step}" in capfd.readouterr().out
        assert saved(tmp_path)[-1] == f"step-0000000{step}"
    assert on_ranks(4, argv) == {0}
    assert_whole(tmp_path, train_job(tmp_path, 4, *PIPELINE, "--train.steps", "3", name="whole"))


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
    handlers = [signal.getsignal(number) for number in preemption.SIGNALS]
    with listening():
        alone = Preemption(1, max_minutes=0)
        alone.ask()
        assert alone.due() == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert alone.due() == "", "what comes after the question is for the next one"
        alone.ask()
        assert alone.due() == "SIGUSR1"
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == handlers
    alone.ask()
    assert alone.due() == ""


def test_a_thread_does_not_listen() -> None:
    def look() -> None:
        with listening():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[object] = []
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
