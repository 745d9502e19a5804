"""A run that is asked to stop while it waits: before it trains, and for data."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.commands import launch
from tests.dist.test_data_processes import Silent
from tests.jobs import LLAMA
from tests.signals import job
from titan.checkpoint.disk.folder import step_folder
from titan.config import load_job
from titan.data import open as data
from titan.data.samples import loader
from titan.ranks import launcher, process, rank_processes
from titan.ranks.meeting import signals
from titan.ranks.meeting.launch_env import LOCAL, LaunchEnv
from titan.ranks.meeting.same_job import Statement
from titan.testing.jobs import read_rows
from titan.testing.ranks import run_ranks
from titan.training import build, trainer

SLOW = '''
"""Text that takes for ever to read, until a signal comes; the next time it is there at once."""

import os
import signal
from pathlib import Path

from titan.contracts import Document, register
from titan.plugins.data.text import Text


@register
class Slow(Text):
    """Text that cannot be read at first."""

    name = "slow"

    def documents(self, file):
        once = Path(__file__).with_name("once")
        if not once.exists():
            once.touch()
            os.kill(os.getppid() if os.environ.get("WORLD_SIZE") else os.getpid(), signal.SIGUSR1)
            while True:
                yield Document("more and more", "")
        yield from super().documents(file)
'''


def test_a_process_ends_after_native_code_that_it_has_left_behind() -> None:
    """What such a thread raises while Python ends, aborts the process, whatever its exit code was to be."""
    program = """
        import os, sys, time
        from titan.ranks.meeting.store import in_time

        def connect() -> None:
            time.sleep(0.5)
            os.write(1, b"connected\\n")

        try:
            in_time(connect, 0)
        except TimeoutError:
            print("late", flush=True)
            sys.exit(3)
    """
    process = subprocess.run([sys.executable, "-c", dedent(program)], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (process.returncode, process.stdout) == (3, "late\nconnected\n")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_before_the_first_step_ends_the_run_at_once(ranks: int, tmp_path: Path) -> None:
    """Rank 0 reads text, the other waits for it; the same command trains after that."""
    argv = _words(tmp_path, "--mesh.dp_shard", str(ranks), "--train.steps", "1", "--data.name", "slow")
    (tmp_path / "plugins" / "slow.py").write_text(SLOW)
    code, said = launch(argv, NPROC=ranks)
    assert code == 75, said
    assert "preempted by SIGUSR1 before training began; to go on, run the same command" in said
    assert launch(argv, NPROC=ranks)[0] == 0 and sorted(read_rows(tmp_path / "run")) == [1]


def _words(folder: Path, *more: str) -> list[str]:
    return job(folder, "--checkpoint.every", "2", *more, to="nobody", rank=9)


class SilentFrom(Silent):
    """The samples of a run, of which none comes from number `since` on."""

    def __init__(self, samples: Any, since: int, whom: int) -> None:
        super().__init__(since, lambda: os.kill(whom, signal.SIGUSR1))
        self._samples, self.fingerprint = samples, samples.fingerprint

    def __getitem__(self, g: int) -> Any:
        super().__getitem__(g)
        return self._samples[g]


def _trains_until_data_stop(folder: Path) -> tuple[str, int, bool]:
    loader.PATIENCE_S = 0.1
    made = data.Loader

    def silent(samples: Any, **more: Any) -> loader.Loader:
        return made(SilentFrom(samples, 3 * more["global_batch"], os.getpid()), **more)

    data.Loader = silent  # type: ignore[assignment,misc]
    with signals.listening():
        job_ = load_job(LLAMA, _words(folder)[2:], 1)
        run = build.build(job_, process.join(job_))
        asked = trainer.train(run)
    return asked, run.step, step_folder(job_.folder / "checkpoints", 3).is_dir()


def test_the_only_rank_saves_when_data_do_not_come(tmp_path: Path) -> None:
    assert run_ranks(_trains_until_data_stop, 1, tmp_path, init=False) == [("SIGUSR1", 3, True)]


def _launched(argv: list[str]) -> int:
    from titan.train import main

    rank_processes.GRACE_S, loader.PATIENCE_S = 0.5, 0.1
    made = data.Loader

    def silent(samples: Any, **more: Any) -> loader.Loader:
        since = 2 * more["global_batch"] + more["global_batch"] // 2  # the first sample of rank 1 in step 3
        late = os.environ["RANK"] == "1"
        return made(SilentFrom(samples, since, os.getppid()) if late else samples, **more)

    data.Loader = silent  # type: ignore[assignment,misc]
    return launcher.start(main, argv, LaunchEnv(1, 0, 2, LOCAL, 0), Statement(), fork_with=("titan.train",))


def test_one_of_two_ranks_ends_the_run_when_its_data_do_not_come(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other one waits for it in the step, and is ended; Slurm may run the job again."""
    argv = _words(tmp_path, "--mesh.dp_shard", "2", "--checkpoint.async", "false")
    assert run_ranks(_launched, 1, argv, init=False) == [75]
    said = "preempted by SIGUSR1 while waiting for data, before step 3; to resume from the newest checkpoint, run"
    assert said in capfd.readouterr().out
    state = json.loads((step_folder(tmp_path / "run" / "checkpoints", 2) / "state.json").read_text())
    assert state["step"] == 2
