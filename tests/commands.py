"""Commands of titan in tests, each in a process forked from a server that has torch warm (`titan.testing.ranks`).

What differs from a command that is typed: nothing is imported anew, which takes two seconds and more for each process.
Tests of what a start imports, of scripts and of how a process ends start the real command.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import torch

from titan.ranks.meeting import rendezvous
from titan.testing.ranks import fork, live_no_longer_than_the_test

TIMEOUT_S = 250.0


def free_port() -> int:
    """A port that nobody has: for launchers and ranks that are told where to meet."""
    with rendezvous.listen(0) as listening:
        return int(listening.getsockname()[1])


def run_titan(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_S,
    module: str = "titan.cli",
    typed: str = "",
) -> subprocess.CompletedProcess[str]:
    """`titan WORDS` in `folder`, with these variables over those of the test; its exit code, stdout and stderr.

    module: whose `main` is called with the words.  typed: on its stdin, which ends after that.

    Raises:
        TimeoutExpired: it had not ended after `timeout` seconds; then it is killed, and its ranks die with it.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="command-") as place:
        stdin, *outputs = (Path(place, name) for name in ("stdin", "stdout", "stderr"))
        stdin.write_text(typed)
        process = fork(_be_the_command, module, list(words), folder, variables, stdin, outputs)
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

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it has said since. All that write to its stderr have ended then."""
        said = self.stderr.read()
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode, said


@contextmanager
def launched(words: Sequence[str], **environment: object) -> Iterator[Launched]:
    """`titan.launch` with these words and variables, for the length of a block; its stdout is lost.

    It is killed at the end of the block, or after `TIMEOUT_S`; its ranks die with it.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in environment.items()}}
    inbox, outbox = multiprocessing.Pipe(duplex=False)
    process = fork(_be_launched, list(words), variables, outbox)
    outbox.close()
    limit = threading.Timer(TIMEOUT_S, process.kill)
    limit.start()
    try:
        with inbox, open(inbox.fileno(), closefd=False) as stderr:
            yield Launched(process, stderr)
    finally:
        limit.cancel()
        process.kill()
        process.join()


def launch(words: Sequence[str], **environment: object) -> tuple[int, str]:
    """The exit code of `titan.launch` with these words and variables, and what it has said on stderr."""
    with launched(words, **environment) as command:
        return command.end()


def _be_launched(words: list[str], variables: dict[str, str], stderr: Connection) -> None:
    live_no_longer_than_the_test()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    _call_main("titan.launch", words, variables)


def _be_the_command(
    module: str, words: list[str], folder: Path, variables: dict[str, str], stdin: Path, outputs: list[Path]
) -> None:
    live_no_longer_than_the_test()
    with stdin.open() as file:
        os.dup2(file.fileno(), 0)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put another one in its place
    for number, output in enumerate(outputs, start=1):
        with output.open("w") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    _call_main(module, words, variables)


def _call_main(module: str, words: list[str], variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.argv = ["titan", *words]
    sys.exit(import_module(module).main(words))
