"""Commands of titan in tests, each in a process forked from a server that has torch warm (`titan.testing.ranks`).

What differs from a command that is typed: nothing is imported anew, which takes two seconds and more for each process.
Tests of what a start imports, of scripts and of signals to a process group start the real command.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import torch

from titan.testing.ranks import fork, live_no_longer_than_the_test

TIMEOUT_S = 250.0


def run_titan(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_S,
    module: str = "titan.cli",
) -> subprocess.CompletedProcess[str]:
    """`titan WORDS` in `folder`, with these variables over those of the test; its exit code, stdout and stderr.

    module: whose `main` is called with the words.

    Raises:
        TimeoutExpired: it had not ended after `timeout` seconds; then it is killed, and its ranks die with it.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="command-") as place:
        outputs = [Path(place, name) for name in ("stdout", "stderr")]
        process = fork(_be_the_command, module, list(words), folder, variables, outputs)
        try:
            process.join(timeout)
            said = [path.read_text(errors="replace") if path.exists() else "" for path in outputs]
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(["titan", *words], timeout, *said)
            return subprocess.CompletedProcess(["titan", *words], process.exitcode, *said)
        finally:
            process.kill()
            process.join()


@dataclass
class Launched:
    """A command under way, in a process forked from the warm server. stderr: its words, as they come."""

    process: BaseProcess
    stderr: TextIO

    def end(self, timeout: float = TIMEOUT_S) -> tuple[int, str]:
        """Its exit code, and what it has said since. All that write to its stderr have ended then."""
        watch = threading.Timer(timeout, self.process.kill)
        watch.start()
        with self.stderr:
            said = self.stderr.read()
        self.process.join()
        watch.cancel()
        assert self.process.exitcode is not None
        return self.process.exitcode, said


def launch(words: Sequence[str], **environment: object) -> Launched:
    """`titan.launch` with these words and variables, started; its stdout is lost, and it has no terminal."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in environment.items()}}
    with tempfile.TemporaryDirectory(prefix="command-") as place:
        said = Path(place, "stderr")
        os.mkfifo(said)
        outputs = [Path(os.devnull), said]
        process = fork(_be_the_command, "titan.launch", list(words), Path.cwd(), variables, outputs)
        return Launched(process, said.open())


def _be_the_command(
    module: str, words: list[str], folder: Path, variables: dict[str, str], outputs: list[Path]
) -> None:
    live_no_longer_than_the_test()
    for number, output in enumerate(outputs, start=1):
        with output.open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.argv = ["titan", *words]
    sys.exit(import_module(module).main(words))
