"""Commands of titan in tests, each in a process forked from a server that has torch warm (`titan.testing.ranks`).

What differs from a command that is typed: nothing is imported anew, which takes two seconds and more for each process.
Tests of what a start imports, of scripts and of signals to a process group start the real command.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

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
