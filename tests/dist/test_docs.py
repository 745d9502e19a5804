"""Every command that README, CONTRIBUTING and docs/*.md show is run, with the complete plugins that they show.

Training commands run as written, but for one step and in folders of the test's; `LESS` shortens others. A line that is
nothing but a command of titan runs in a warm process (`tests.commands`); what else a line holds, a shell does. The
first `./run_train.sh` is the script itself; with arguments it is `titan train`, which it starts.
"""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_titan
from tests.sweeps import swept_case
from titan.contracts import Dataset, Loss, LrSchedule, Model, Optimizer, Technique, Tokenizer, Tracker
from titan.testing import assert_same_curve, train_job
from titan.testing.commands.skeleton import skeleton

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

SHORT = re.compile(r"--config (configs/debug\.toml|debug) ")
"""A run that takes seconds as it is."""

NEW = re.compile(r"titan plugins new ([a-z]\w*) --kind ([a-z]\w*)")

LESS = {
    "configs/llama65b.toml": ("--search", "--search --mesh.tp 8 --mesh.pp 4"),
    "NPROC=8 titan doctor --output": ("--output", "--seconds 0.1 --output"),
    "--run.max_minutes 0.2": ("max_minutes 0.2", "max_minutes 0.1"),
}
"""A part of a command -> a word of it, and what stands for that word: fewer layouts, seconds, minutes."""

NOT_RUN = {
    "make test": "this is it",
    "make sweep": "CI runs it after this",
    "make check": "CI runs it beside this",
    "make format": "changes files",
    "make bench": "measures; CI machines are noisy",
    "python -m bench": "the same",
    "python -m tests.faults": "takes half an hour; tests/unit/test_faults.py plants one",
    "python -m tests.fuzz": "takes half an hour; a sample of it is a test of its own",
    "python -m pytest test_": "tests/contract/test_skeletons.py runs them in its sweep",
    "titan train --plugins.path heavyball.py": "tests/contract/test_installed.py follows that page in its sweep",
    "titan train --train.steps 50 --run.name adamw": "the same",
    "NPROC=2 titan train --plugins.path heavyball.py": "the same",
    "NPROC=2 configs/launch/torchrun.sh": "tests/dist/test_torchrun.py starts it in its sweep",
    "NPROC=2 titan tune": "tests/dist/test_tune.py tunes in its sweep",
    "python -m venv other": "for another PyTorch, which CI does not install",
    "other/bin/": "the same",
    "python=$(scripts/python.sh float8 dev)": "of the command below it",
    "$python -m bench.gpu": "needs a GPU; the sweep of tests/unit/test_bench_gpu.py rehearses it",
    "python -m bench.gpu": "the same",
    "scripts/gpu_bundle.sh": "downloads wheels",
    "scripts/gpu_call.sh": "needs what that makes, and a GPU",
}

SWEEP = {
    "titan plan --config configs/gpt175b.toml --cluster mi250x-frontier --study": "tests/unit/test_studies.py",
    "NPROC=4 titan train --config debug --run.name primer": "a model of README trains on four ranks",
    "titan generate --checkpoint runs/primer": "reads what that has trained",
    "NPROC=4 titan train --config configs/debug.toml --run.name profiled": "shown by tests/dist/test_profile.py",
    "titan train --config configs/debug.toml --run.name limited": "takes its minutes; tests/dist/test_preemption.py",
    "titan train --config configs/debug.toml --run.name untrusted": "shown by tests/unit/test_untrusted_checkpoints.py",
    "python -m tests.malicious_checkpoints": "the same",
    "titan checkpoint verify runs/untrusted": "the same",
    "titan train --config debug --run.name average": "the README's plugin trains",
    "NPROC=4 titan train --config debug --run.name average": "goes on from what that has trained",
    "NPROC=8 ./run_train.sh": "eight ranks train in tests/dist/test_parity.py",
    "NPROC=8 titan doctor": "measures; shown by tests/dist/test_doctor.py",
    "titan plan --config quickstart --cluster here.toml": "reads what the doctor has measured",
    "titan plan --config configs/llama65b.toml --search --world-size 256": "tests/unit/test_big_configs.py searches",
    "titan plan --config configs/llama65b.toml --cluster h100 --world-size 512 --search": "the same",
    "NPROC=2 titan train --config configs/debug.toml --run.name hung": "shown by tests/dist/test_watchdog.py",
    "titan train --data.name text --data.path README.md": "the first command on another text",
    "NPROC=2 MAX_RESTARTS=1 titan train": "shown by tests/dist/test_restart.py",
    "titan train --config configs/debug.toml --run.name slow": "shown by tests/dist/test_watchdog.py",
    "titan train --config configs/debug.toml --run.name nan": "shown by tests/dist/test_nonfinite.py",
}
"""Commands that take many seconds, and why `make test` can do without; none that is left needs their files."""


def commands() -> list[str]:
    """Lines of all ```sh blocks, without comments, each once."""
    blocks = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)]
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    shown = dict.fromkeys(re.sub(r"\s+# .*", "", line) for line in lines if line and not line.startswith("#"))
    return [line for line in shown if not any(line.startswith(known) for known in NOT_RUN)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader's: README and CHANGELOG beside, the plugin of README saved where README says."""
    place = tmp_path_factory.mktemp("reader")
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, place)
    (place / "my_plugins").mkdir()
    (plugin,) = re.findall(r"```python\n([^`]*class .*?)```", (ROOT / "README.md").read_text(), re.S)
    (place / "my_plugins" / "signum.py").write_text(plugin)
    complete = r"`(my_plugins/\w+\.py)`:\n\n```python\n(.*?)```"
    for text in (page.read_text() for page in PAGES):
        for name, code in re.findall(complete, text, re.S):
            (place / name).write_text(code)
        for name, kind in NEW.findall(text):
            (place / f"{name}.py").write_text(skeleton("plugin", kind, name))
    for name in ("bench", "configs", "tests", "run_train.sh"):
        (place / name).symlink_to(ROOT / name)
    return place


@pytest.mark.parametrize(
    "command", [swept_case(line) if line.startswith(tuple(SWEEP)) else line for line in commands()]
)
def test_command(command: str, place: Path, tmp_path: Path) -> None:
    place = tmp_path if NEW.match(command) else place
    run, fails, _ = command.partition(' || echo "exit code $?"')
    for part, (word, shorter) in LESS.items():
        run = run.replace(word, shorter) if part in run else run
    if not SHORT.search(run) and ("run_train.sh" in run or "titan train" in run):
        run += " --train.steps 1 --run.dir runs --checkpoint.every 1000"
    if any(word in run for word in ("--data", "run_train.sh", "titan train", "titan tune", "data prepare")):
        run += " --data.cache cache"
    done = _done(run, place)
    assert (done.returncode != 0) == bool(fails), f"{run}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _done(run: str, place: Path) -> "subprocess.CompletedProcess[str]":
    environment = {"TITAN_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    line = run.replace("./run_train.sh --config", "titan train --config")
    if command := re.fullmatch(r"((?:\w+=\w+ )*)titan ([^|&;<>$`]+)", line):
        variables = dict(word.split("=", 1) for word in command[1].split())
        return run_titan(shlex.split(command[2]), place, {**environment, **variables})
    run = run.replace("./run_train.sh", str(ROOT / "run_train.sh"))
    run = re.sub(r"(^|\s)titan ", rf"\1{sys.executable} -P -m titan.cli ", run)
    run = re.sub(r"^python ", f"{sys.executable} ", run)
    environment = {**os.environ, **environment}
    return subprocess.run(run, shell=True, cwd=place, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_new_plugin_is_shown_as_it_is_written(page: Path) -> None:
    written = r"`titan plugins new (\w+) --kind (\w+)`[^`]*`\w+\.py`[^`]*```python\n(.*?)```"
    shown = re.findall(written, page.read_text(), re.S)
    assert len(shown) == (page.stem in ("plugins", "plugin_model", "plugin_technique"))
    for name, kind, code in shown:
        assert code == skeleton("plugin", kind, name), f"{page.name}: copy the file that the command writes"


def test_there_are_commands() -> None:
    assert len(commands()) >= 8
    assert all(any(line.startswith(known) for line in commands()) for known in SWEEP)
    assert all(any(part in line and word in line for line in commands()) for part, (word, _) in LESS.items())


def test_pages_point_at_files_that_exist() -> None:
    for page in (*PAGES, *(ROOT / "docs").glob("*/*.md")):
        named = r"`((?:titan|plugins|configs|docs|tests|bench|scripts|examples)/[\w./]+\.\w+)`"
        for name in re.findall(named, page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_parallelism_that_is_shown_keeps_the_curve(place: Path, one_rank, tmp_path: Path) -> None:
    words = ("--plugins.path", str(place / "my_plugins" / "my_dp.py"), "--mesh.my_dp", "2")
    assert_same_curve(one_rank(), train_job(tmp_path, 2, *words))


@pytest.mark.parametrize("contract", [Dataset, Loss, LrSchedule, Model, Optimizer, Technique, Tokenizer, Tracker])
def test_the_tables_of_hooks_are_complete(contract: type) -> None:
    page = (ROOT / "docs" / "plugin_technique.md").read_text()
    rows = [line for line in page.partition("## Hooks")[2].splitlines() if line[:1] == "|"]
    hooks = {name for name in vars(contract) if name[0] != "_" and inspect.isroutine(getattr(contract, name))}
    assert hooks <= set(re.findall(r"\w+", " ".join(rows)))
