"""Commands of titan in processes that have imported nothing but `titan.cli`, as every command does first.

`tests.commands` forks commands from a server that has torch, the plugins and the compiler warm: there, a module that a
command forgets to import, or imports without need, is not seen.
"""

import importlib.metadata
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import titan.commands
from tests.sweeps import sweep_but
from titan import cli
from titan.testing.jobs import train_job

ROOT = Path(__file__).parents[2]
DEBUG = ["--config", str(ROOT / "configs" / "debug.toml")]
TRAINED = ["--checkpoint", "run"]
BYTES = ["--data.name", "text", "--data.path", "text", "--tokenizer.name", "byte"]
BUILDS = {"convert", "eval", "generate"}
"""Commands that build a model."""

COMMANDS = {
    "checkpoint": (["verify", "run"], 0, "verified"),
    "config": ([*DEBUG, "--json"], 0, '"n_layers": 4'),
    "convert": (["--from", "run", "--format", "hf", "--output", "hf"], 0, "21 tensors"),
    "data": (["prepare", *DEBUG, *BYTES], 0, "tokens         13,678"),
    "doctor": (["--seconds", "0.1"], 0, "matrix products, float32"),
    "eval": ([*TRAINED, "--data", "text", "--path", "text"], 0, "perplexity"),
    "generate": ([*TRAINED, "--prompt", "a", "--max-new-tokens", "2"], 0, "a"),
    "plan": ([*DEBUG, "--search", "--world-size", "2"], 0, "1 pruned by lower bound"),
    "plugins": (["fsdp"], 0, "technique fsdp"),
    "tune": ([*DEBUG, "--cluster", "a100-80gb", "--trials", "1", "--timeout", "0.01"], 1, "trials failed (1 timeout)"),
}
"""Command -> its words, its exit code, and a part of what it prints, in a folder with a run and its text. The trial of
`tune` is killed as it starts."""

ONE_AFTER_THE_OTHER = """
import json, os, sys, traceback
from pathlib import Path
from titan import cli

codes = {}
for name, words in json.loads(sys.argv[1]).items():
    if not (process := os.fork()):
        break
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
else:
    print(json.dumps(codes))
    sys.exit()
with open(f"{name}.txt", "w") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
try:
    code = cli.main([name, *words])
except BaseException:
    code = traceback.print_exc()
Path(f"{name}.modules").write_text(" ".join(sys.modules))
sys.stdout.flush()
os._exit(99 if code is None else code)  # an end without cleaning up saves half a second per command
"""


class Ran(NamedTuple):
    """A command's exit code, what it printed, and the modules that it had imported at its end."""

    code: int
    printed: str
    modules: set[str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    folder = tmp_path_factory.mktemp("cold")
    train_job(folder, 1, "--train.steps", "1", "--checkpoint.enabled", "true")
    words = json.dumps({name: words for name, (words, _, _) in COMMANDS.items()})
    program = [sys.executable, "-c", ONE_AFTER_THE_OTHER, words]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    texts = {file.name: file.read_text() for name in codes for file in folder.glob(f"{name}.*")}
    return {
        name: Ran(code, texts[f"{name}.txt"], set(texts[f"{name}.modules"].split())) for name, code in codes.items()
    }


@pytest.mark.skipif(sys.platform != "linux", reason="forks after torch is imported")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_what_it_uses_and_no_more(command: str, ran: dict[str, Ran]) -> None:
    _, code, printed = COMMANDS[command]
    assert ran[command].code == code and printed in ran[command].printed, ran[command].printed
    assert "Traceback" not in ran[command].printed
    if command not in BUILDS:
        assert not ran[command].modules & (COMPILER | TRAINER)


def test_every_command_is_started() -> None:
    brought = {entry.name for entry in importlib.metadata.entry_points(group=cli.ENTRY_POINTS)}
    assert set(COMMANDS) == {*brought, *(module.name for module in pkgutil.iter_modules(titan.commands.__path__))}


UNTIL_RANKS_START = """
import pickle, sys
from titan import cli, launch
from titan.ranks import launcher
from titan.ranks.rank_processes import RankProcesses

def lead(ranks):
    pickle.dumps((ranks.entry, ranks.argv))  # as a spawned rank is sent them
    print(ranks.fork, *sys.modules)
    return []

launcher.launch_env.gpus = lambda: {gpus}
RankProcesses.lead = lead
words = ["--config", "configs/debug.toml", "--mesh.dp_shard", "2"]
{main}
"""
MAINS = {"titan train": 'cli.main(["train", *words])', "run_train.sh": "launch.main(words)"}
COMPILER = {"torch._dynamo", "torch._inductor", "torch.distributed.pipelining", "triton"}
"""Takes a second to import; plugins that need it import it where they use it."""
TRAINER = {"titan.train", "titan.training.build"}


def imported(main: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, set[str]]:
    """Whether ranks are to be forked, and the modules of the launcher at that moment."""
    monkeypatch.setenv("NPROC", "2")
    program = UNTIL_RANKS_START.format(gpus=gpus, main=MAINS[main])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    fork, *modules = done.stdout.split()
    return fork == "True", set(modules)


@pytest.mark.parametrize("main", sweep_but(MAINS, "run_train.sh"))
def test_a_launcher_that_spawns_imports_neither_compiler_nor_trainer(
    main: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, modules = imported(main, 1, monkeypatch)
    assert not fork and not modules & (COMPILER | TRAINER), modules & (COMPILER | TRAINER)
    plugins = {"titan.plugins.models.llama", "titan.plugins.parallel.pipeline"}
    assert plugins <= modules, "the job has been checked"


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
def test_a_launcher_that_forks_imports_what_its_ranks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, modules = imported("titan train", 0, monkeypatch)
    assert fork and modules >= TRAINER | {"torch._dynamo"}


AT_TORCH = """
import importlib, os, sys

class Look:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()

sys.meta_path.insert(0, Look())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("command", ["titan.train", "titan.commands.config", "bench.loss"])
def test_how_threads_wait_is_set_before_torch_is_imported(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's library reads it when torch loads it, once."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    run = [sys.executable, "-c", AT_TORCH, command]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "10000\n"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "7\n"
