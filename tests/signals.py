"""Tiny jobs as commands, in which one rank sends a signal at a chosen step (tests/plugins/send_signal.py)."""

import shutil
from pathlib import Path

from tests.jobs import LLAMA
from titan.testing.jobs import write_text

TEN = ("--train.steps", "10")
"""Steps enough for a signal, a save and a resume."""

TEST_PLUGIN = Path(__file__).parent / "plugins" / "send_signal.py"


def job(folder: Path, *more: str, **signal: object) -> list[str]:
    """The arguments of a job of 10 steps that keeps its state under `folder`/run; `signal`: options, else it is off."""
    if not (folder / "text").exists():
        write_text(folder / "text")
        (folder / "plugins").mkdir()
        shutil.copy(TEST_PLUGIN, folder / "plugins")
    options = [word for key, value in signal.items() for word in (f"--plugins.send_signal.{key}", str(value))]
    own = ["--config", str(LLAMA), "--run.dir", str(folder), "--run.name", "run", "--checkpoint.enabled", "true"]
    paths = {"data.cache": "cache", "data.path": "text", "plugins.path": "plugins"}
    own += [word for key, name in paths.items() for word in (f"--{key}", f"{folder}/{name}")]
    return [*own, *TEN, *options, *more]
