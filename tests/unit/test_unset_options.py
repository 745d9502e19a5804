"""Options that a job leaves unset: the usual value where the job is within the limit of memory, else the frugal one."""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.planned import CLUSTER, TOML, job_of, predicted, small_cluster
from titan.cli import main
from titan.config import Job, load_job
from titan.config.changes import compare
from titan.contracts.planner import PACKAGE
from titan.errors import PluginError
from titan.planner.machine.cluster import MEMORY_LIMIT, DeviceMemory
from titan.planner.search import unset_options
from titan.planner.search.unset_options import settle
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB, peak_bytes
from titan.planner.trainer_api import persistent_gib
from titan.training.foresight import choose, predictor

SHARDED = ("--mesh.dp_shard", "4", "--train.global_batch_size", "16", "--train.micro_batch_size", "2")
PIPED = ("--mesh.pp", "2", "--mesh.dp_shard", "2", "--train.global_batch_size", "8", "--train.micro_batch_size", "1")
SPLIT = (*PIPED, "--plugins.pipeline.schedule", "ZBVZeroBubble")


def needs(*words: str) -> float:
    """GiB per rank."""
    job = job_of(*words)
    return peak_bytes(costs_of(job), job.layout, CLUSTER.memory) / GIB


def with_limit(gib: float) -> DeviceMemory:
    """A device with this limit for what is planned."""
    return CLUSTER.memory._replace(gib=gib / MEMORY_LIMIT)


def too_small(*words: str) -> DeviceMemory:
    """A device that the job fits into, but with too little memory left."""
    memory, gib = with_limit(0.99 * needs(*words)), needs(*words)
    assert memory.limit_gib < gib < memory.gib
    return memory


def stage(job: Job) -> int | None:
    return next(t.config.zero_stage for t in job.techniques if hasattr(t.config, "zero_stage"))


@pytest.mark.parametrize("words", [SHARDED, PIPED, SPLIT])
def test_the_estimate_is_the_planners(words: tuple[str, ...]) -> None:
    assert needs(*words) == pytest.approx(predicted(*words).peak_gib, rel=1e-12)


@pytest.mark.parametrize(("words", "usual"), [(SHARDED, 1), ((*SHARDED[:4], "--train.micro_batch_size", "4"), 2)])
def test_what_fits_keeps_the_usual_value(words: tuple[str, ...], usual: int) -> None:
    job = job_of(*words)
    settled, (sentence,) = settle(job, with_limit(1.01 * needs(*words)))
    assert settled is job and stage(job) is None
    assert f"zero_stage is not set, so zero_stage = {usual}: the job needs" in sentence


@pytest.mark.parametrize("words", [SHARDED, PIPED])
def test_what_does_not_fit_gets_the_frugal_value(words: tuple[str, ...]) -> None:
    settled, (sentence,) = settle(job_of(*words), too_small(*words))
    assert stage(settled) == 3 and settled.table["plugins"]["fsdp"]["zero_stage"] == 3
    assert peak_bytes(costs_of(settled), settled.layout, CLUSTER.memory) / GIB < needs(*words)
    assert "zero_stage is not set, so zero_stage = 3: otherwise the job needs" in sentence
    assert [t.name for t in settled.techniques] == [t.name for t in job_of(*words).techniques]
    assert "zero_stage" not in job_of(*words).table["plugins"]["fsdp"]


def test_it_is_said_that_the_frugal_value_does_not_fit_either() -> None:
    fewest = needs(*SHARDED, "--plugins.fsdp.zero_stage", "3")
    _, (fits,) = settle(job_of(*SHARDED), with_limit(1.001 * fewest))
    assert fits.endswith(" GiB") and "too" not in fits
    settled, (sentence,) = settle(job_of(*SHARDED), with_limit(0.999 * fewest))
    assert stage(settled) == 3
    assert sentence.endswith(f" GiB; with it the job needs {fewest:.1f} GiB, which exceeds the limit too")


@pytest.mark.parametrize("given", [1, 2, 3])
def test_a_set_value_stays(given: int) -> None:
    words = (*SHARDED, "--plugins.fsdp.zero_stage", str(given))
    job = job_of(*words)
    assert settle(job, too_small(*words)) == (job, [])


def test_where_memory_decides_nothing_the_usual_value_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on GPUs asks for the estimate too, and must train whatever a model states."""
    job, bare, split = job_of(*SHARDED), job_of(*SHARDED), job_of(*SPLIT)
    vars(bare)["spec"] = replace(bare.spec, layer_ops=())

    def kept(job: Job, memory: DeviceMemory | None) -> str:
        settled, (sentence,) = settle(job, memory)
        assert settled is job
        return sentence.partition("zero_stage = 1: ")[2]

    small = too_small(*SHARDED)
    assert kept(job, None) == "the memory of the device is not known"
    assert "but zero_stage = 3 is refused: " in kept(split, too_small(*SPLIT))
    assert kept(bare, small).startswith("memory cannot be predicted (")
    monkeypatch.setattr(unset_options, "costs_of", lambda job: replace(costs_of(job), stages=()))
    assert kept(job, small).startswith("memory cannot be predicted (ValueError: ")


def test_a_checkpoint_resumes_with_either_value() -> None:
    job = job_of(*SHARDED)
    frugal, _ = settle(job, too_small(*SHARDED))
    for saved, now in ((frugal, job), (job, frugal)):
        assert compare({"config": dict(saved.table)}, now.table, "").said == ()


def test_a_model_that_no_memory_here_holds_is_refused_before_it_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.name=text", f"--data.path={tmp_path}", "--tokenizer.name=byte", f"--run.dir={tmp_path}"]
    layout = [f"--mesh.{axis}={degree}" for axis, degree in (("pp", 1), ("ep", 1), ("dp_shard", 1))]
    assert main(["train", "--config", "mixtral8x7b", *layout, *words, "--run.device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    what = r"weights and the optimizer's state take \d+(\.\d)? GiB in the host's memory, but MemTotal of"
    assert re.match(rf"error: {what} /proc/meminfo = .* GiB; shard over more ranks, use more nodes, or offload", said)


def test_stages_of_a_node_are_counted_as_they_are() -> None:
    """Half of the ranks hold the embeddings, which are most of this model."""
    words = ["--mesh.pp", "2", "--model.vocab_size", "50000"]
    [first, last] = [device for device, _ in persistent_gib(job_of(*words))]
    [whole] = [device for device, _ in persistent_gib(job_of(*words[2:]))]
    assert first + last == pytest.approx(whole, rel=0.02) and 0 < first < whole


def test_plan_and_config_say_what_was_chosen(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    words = ["--config", str(TOML), *SHARDED, "--cluster", small_cluster(tmp_path, too_small(*SHARDED).gib)]
    assert main(["plan", *words]) == 0
    chosen = capsys.readouterr().out.splitlines()[-1]
    assert chosen.startswith("[plugins.fsdp] zero_stage is not set, so zero_stage = 3: otherwise the job needs ")
    assert main(["plan", *words, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["unset_options"] == [chosen] and planned["fits"]
    assert main(["config", *words]) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out)["plugins"]["fsdp"]["zero_stage"] == 3 and chosen in err.splitlines()


def test_without_a_planner_options_have_their_usual_values(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(*SHARDED)
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    values, (sentence,) = choose(job, 80.0)
    assert values == {}
    assert sentence.endswith("so zero_stage = 1: titan.planner is not installed, which would choose by memory")
    assert predictor(job, Mock())("h100") is None


RUN = """
import sys
from titan.train import main
code = main(sys.argv[1:])
print(code, [name for name in sys.modules if name.startswith("titan.planner")])
"""


@pytest.mark.sweep
def test_a_run_that_leaves_nothing_to_the_planner_imports_no_file_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 500)
    words = ["--config", "debug", "--train.steps=1", "--data.name=text", f"--data.path={tmp_path}/a.txt"]
    words += ["--tokenizer.name=byte", f"--run.dir={tmp_path}", f"--data.cache={tmp_path}/cache"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


CHOOSY = '''
"""A technique from outside with an option that memory decides."""

from dataclasses import dataclass

from titan.contracts import Technique, option, register


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options."""

    chunks: int | None = option(None, "chunks")


@register
class Choosy(Technique):
    """Uses more chunks in less memory."""

    name = "choosy"
    Config = Config
    phase = "materialise"

    def unset_options(self, job):
        return [{"chunks": 1}, {"chunks": 8}]
'''


@pytest.mark.parametrize("key", ["chunks", "chunk"])
def test_a_technique_from_outside_chooses_too(key: str, tmp_path: Path) -> None:
    (tmp_path / "choosy.py").write_text(CHOOSY.replace('{"chunks"', f'{{"{key}"'))
    job = load_job(TOML, ["--plugins.path", str(tmp_path), "--plugins.choosy.enabled", "true"])
    if key == "chunk":
        with pytest.raises(PluginError, match=r"names 'chunk', which is no option of it \(did you mean 'chunks'\?\)"):
            settle(job, None)
        return
    settled, (sentence,) = settle(job, DeviceMemory(1e-6))
    assert settled.table["plugins"]["choosy"]["chunks"] == settled.techniques[-1].config.chunks == 8
    assert sentence.startswith("[plugins.choosy] chunks is not set, so chunks = 8: otherwise")
