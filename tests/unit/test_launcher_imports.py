"""What a launcher has imported when it starts its ranks: what forked ranks need, or only what checks a job."""

import subprocess
import sys

import pytest

from tests.sweeps import sweep_but

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
TRAINER = {"titan.train", "titan.training.build", "titan.inference.generation"}


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


@pytest.mark.parametrize("command", ["titan.train", "titan.cli", "bench.loss"])
def test_how_threads_wait_is_set_before_torch_is_imported(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's library reads it when torch loads it, once."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    run = [sys.executable, "-c", AT_TORCH, command]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "10000\n"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "7\n"
