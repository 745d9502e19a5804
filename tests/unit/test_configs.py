"""Every TOML in `configs/` is a job that could start, and says what its head says."""

import json
import math
import shutil
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tomlkit

from tests.jobs import mesh
from titan.config import Job, load_job
from titan.config.schema import schema
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import as_table, options_of
from titan.contracts.sections import SECTIONS

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
MILLION = 2**20


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_loads(path: Path) -> None:
    assert load_job(path).run.name == path.stem


def test_what_is_declared_as_a_section_is_parsed_resolved_and_in_the_schema() -> None:
    job, properties = load_job(None), schema()["properties"]
    assert {"run", "train", "data"} < SECTIONS.keys()
    for name, section in SECTIONS.items():
        keys = {option.key for option in options_of(section)}
        assert type(getattr(job, name)) is section and keys <= properties[name]["properties"].keys()
        assert as_table(getattr(job, name)).keys() <= job.table[name].keys()


def _job(name: str, *words: str) -> Job:
    return load_job(ROOT / "configs" / f"{name}.toml", words)


@pytest.mark.parametrize(
    ("name", "ranks", "billions"),
    [
        ("llama7b", 64, 6.74),
        ("llama13b", 128, 13.02),
        ("llama33b", 512, 32.53),
        ("llama65b", 2048, 65.29),
        ("llama3_8b", 64, 8.03),
        ("qwen3_8b", 64, 8.19),
        ("bloom176b", 384, 176.2),
        ("gpt22b", 16, 22.1),
        ("gpt175b", 128, 174.6),
        ("gpt1t", 1024, 1008),
    ],
)
def test_ranks_and_parameters(name: str, ranks: int, billions: float) -> None:
    job = _job(name)
    assert job.layout.world_size == ranks
    assert job.spec.params / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize("name", ["llama7b", "llama13b", "llama33b", "llama65b", "llama3_8b", "qwen3_8b", "bloom176b"])
def test_these_take_four_million_tokens_a_step(name: str) -> None:
    assert _job(name).tokens_per_step == 4 * MILLION


@pytest.mark.parametrize(("name", "tp", "pp", "batch"), [("gpt175b", 4, 16, 640), ("gpt1t", 8, 64, 1600)])
def test_frontier_layouts(name: str, tp: int, pp: int, batch: int) -> None:
    pipeline = ("--plugins.pipeline.schedule", "1F1B", "--plugins.pipeline.virtual_stages", "1")
    job = _job(name, *mesh(tp=tp, pp=pp, dp_shard=2), "--train.micro_batch_size", "1", *pipeline)
    assert (job.layout.world_size, job.train.global_batch_size) == (_job(name).layout.world_size, batch)


def test_debug3d_is_the_quickstart_on_another_layout() -> None:
    job = _job("debug3d")
    assert job.layout.world_size == 8
    quickstart, debug = load_job(None).table, job.table
    for section in ("model", "tokenizer", "data", "optimizer", "lr_schedule", "loss"):
        assert debug[section] == quickstart[section]


def test_a_resolved_job_is_the_same_wherever_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    for folder in ("mine", "jobs", "earlier", "weights", "text"):
        (place / folder).mkdir(parents=True)
    elsewhere.mkdir()
    shutil.copy(ROOT / "tests" / "plugins" / "averager.py", place / "mine")
    (place / "text" / "a.txt").write_text("text")
    (tmp_path / "x.py").touch()
    (place / "jobs" / "job.toml").write_text(RELATIVE)
    registry.load_plugins()
    for name in ("plugins", "opened"):
        monkeypatch.setattr(registry, name, getattr(registry, name).copy())
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(tmp_path))
    job = load_job(Path("jobs/job.toml"))
    written = elsewhere / "config.toml"
    written.write_text(tomlkit.dumps(dict(job.table)))
    table = tomllib.loads(written.read_text())
    assert table["plugins"]["path"] == [f"{place}/mine", "~/x.py"]
    assert table["tokenizer"]["path"] == f"{place}/ranks.tiktoken"
    assert [source["path"] for source in table["data"]["mixture"]] == [[f"{place}/text", f"{place}/b*.txt"], "/c.txt"]
    assert table["validation"]["path"] == f"{place}/text"
    assert table["checkpoint"]["init_from"] == f"{place}/weights"
    assert table["checkpoint"]["resume"] == f"{place}/earlier"
    assert table["run"]["dir"] == f"{place}/runs" and table["data"]["cache"] == "~/.cache/titan"
    assert load_job(Path("jobs/job.toml"), ["--checkpoint.resume", "auto"]).table["checkpoint"]["resume"] == "auto"
    monkeypatch.chdir(elsewhere)
    again = load_job(Path("config.toml"))
    assert again.table == job.table and again.folder == place / "runs" / "job"
    assert again.validation_data.files() == [place / "text" / "a.txt"]


RELATIVE = """
[run]
name = "job"
[plugins]
path = ["../mine", "~/x.py"]
[model]
name = "averager"
[tokenizer]
name = "tiktoken"
path = "ranks.tiktoken"
pattern = "cl100k"
[data]
seq_len = 16
[[data.mixture]]
name = "text"
path = ["text", "b*.txt"]
[[data.mixture]]
name = "text"
path = "/c.txt"
[validation]
name = "text"
path = "text"
[train]
steps = 1
global_batch_size = 1
[checkpoint]
init_from = "weights"
resume = "earlier"
"""


WORDS = ["", "a", "b c", "x.y", "é😀", "'''", '"""', "\\u0041", "\n\r\t\x00\x7f\x85\u2028", "#", "[x]", "true", "1e5"]
NUMBERS = (0, -(2**63), 2**63 - 1, True, -0.0, 0.1, 5e-324, 1e22, 1.7e308, math.inf, -math.inf)


def drawn(random: Random, depth: int) -> Any:
    """A value of a TOML: a scalar, a list, a list of tables or a table."""
    kind = random.randrange(5 if depth else 2)
    if kind < 2:
        return random.choice(WORDS) + random.choice(WORDS) if kind else random.choice(NUMBERS)
    tables = [{random.choice(WORDS): drawn(random, depth - 1) for _ in range(4)} for _ in range(3)]
    values = [drawn(random, depth - 1) for _ in range(random.randrange(4))]
    return values if kind == 2 else tables[: random.randrange(4)] if kind == 3 else tables[0]


def test_what_is_written_as_toml_reads_back_equal() -> None:
    random = Random(0)
    jobs = [load_job(path).table for path in CONFIGS]
    for table in (*jobs, *({"t": drawn(random, 3), "u": drawn(random, 3)} for _ in range(300))):
        read = tomllib.loads(tomlkit.dumps(table))
        assert json.dumps(read, sort_keys=True) == json.dumps(table, sort_keys=True)  # 1 is not 1.0, nor true
