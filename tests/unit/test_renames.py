"""Former names of keys, values and flags: they work, are warned of once, and stand in nothing that titan writes."""

import importlib
import json
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import titan.commands
from tests.commands import run_titan
from titan import cli
from titan.checkpoint.resume import Changes, compare
from titan.config import load_job
from titan.config.renames import renewed_job, renewed_keys
from titan.config.sections import declared_tables, table_at
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import Where, option, options_of, parse
from titan.errors import ConfigError
from titan.planner.search.space import load_base
from titan.terminal import warn_once

RELEASED = Path(__file__).parents[1] / "released" / "26471e7"

JOB = """
[model]
name = "gpt"
n_layers = 1
dim = 8
n_heads = 2
vocab_size = 300
max_seq_len = 16
[tokenizer]
name = "byte"
[train]
steps = 2
global_batch_size = 2
"""
DATA = "[data]\nseq_len = 16\n"

KEYS: tuple[tuple[str, str, str, str, Any], ...] = (
    ("run", "", "sample", "sample_prompt", "The"),
    ("checkpoint", "", "keep", "keep_latest", 3),
    ("checkpoint", "", "new_data", "reset_data", True),
    ("lr_schedule", "cosine", "min_ratio", "min_lr_factor", 0.2),
    ("lr_schedule", "linear", "min_ratio", "min_lr_factor", 0.2),
    ("lr_schedule", "wsd", "min_ratio", "min_lr_factor", 0.2),
    ("lr_schedule", "wsd", "shape", "decay_type", "sqrt"),
    ("data", "", "part", "split", "train"),
)
"""Table, the plugin that it names, the former key, the present one, a value."""

VALUES = (
    ("data", "packing", "stream", "concat"),
    ("data", "packing", "isolate", "document_mask"),
    ("data", "split", "held_out", "validation"),
    ("checkpoint", "resume", "must", "required"),
    ("plugins.activation_checkpoint", "mode", "every", "every_n"),
)
"""Table, key, the former value, the present one."""

FLAGS = (
    ("plan", "--exact", "--dry-run"),
    ("plan", "--model-only", "--formulas"),
    ("plan", "--clusters", "--list-clusters"),
    ("plan", "--write", "--output"),
    ("tune", "--write", "--output"),
    ("doctor", "--save", "--output"),
    ("data", "--out", "--output"),
    ("convert", "--to", "--output"),
)


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_WARNED", "")


def written(path: Path, text: str, job: str = JOB + DATA) -> Path:
    """A file with a job's tables and, in or after them, those of `text`."""
    head, _, body = text.partition("\n")
    path.write_text(job.replace(head, text.rstrip(), 1) if head in job else job + head + "\n" + body)
    return path


def toml(value: Any) -> str:
    return json.dumps(value)


@pytest.mark.parametrize(("table", "plugin", "former", "key", "value"), KEYS)
def test_a_former_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, plugin: str, former: str, key: str, value: Any
) -> None:  # fmt: skip
    name = f'name = "{plugin}"\n' if plugin else ""
    file = written(tmp_path / "mine.toml", f"[{table}]\n{name}{former} = {toml(value)}\n")
    found = load_job(file).table[table]
    assert found[key] == value and former not in found
    assert capsys.readouterr().err == f"warning: [{table}] {former} is now {key} ({file})\n"
    words = [f"--{table}.{former}={value if isinstance(value, str) else toml(value)}"]
    written(file, f"[{table}]\n{name}")
    assert load_job(file, words).table[table] == found
    assert capsys.readouterr().err == f"warning: [{table}] {former} is now {key} (command line)\n"


@pytest.mark.parametrize(("table", "key", "former", "value"), VALUES)
def test_a_former_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, key: str, former: str, value: str
) -> None:  # fmt: skip
    file = written(tmp_path / "mine.toml", f'[{table}]\n{key} = "{former}"\n')
    assert table_at(load_job(file).table, (*table.split("."), key)) == value
    assert capsys.readouterr().err == f'warning: [{table}] {key} = "{former}" is now "{value}" ({file})\n'
    job = load_job(written(tmp_path / "plain.toml", "[run]\n"), [f"--{table}.{key}", former])
    assert table_at(job.table, (*table.split("."), key)) == value
    assert capsys.readouterr().err == f'warning: [{table}] {key} = "{former}" is now "{value}" (command line)\n'


def test_a_former_key_with_a_former_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "mine.toml", '[validation]\nname = "stdlib"\npart = "held_out"\n')
    job = load_job(file, ["--validation.every=1"])
    assert job.validation_data is not None and job.validation_data.config.split == "validation"
    line = f'warning: [validation] part = "held_out" is now split = "validation" ({file})\n'
    assert capsys.readouterr().err == line


def test_an_entry_of_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = written(tmp_path / "base.toml", '[[data.mixture]]\nname = "stdlib"\npart = "held_out"\nweight = 2\n')
    file = tmp_path / "mine.toml"
    file.write_text('base = "base.toml"\n')
    job = load_job(file)
    assert [source.plugin.config.split for source in job.sources] == ["validation"]
    line = f'warning: [data.mixture.0] part = "held_out" is now split = "validation" ({base})\n'
    assert capsys.readouterr().err == line


def test_the_upper_file_counts_under_either_name(tmp_path: Path) -> None:
    for below, above in (("keep = 3", "keep_latest = 4"), ("keep_latest = 3", "keep = 4")):
        written(tmp_path / "base.toml", f"[checkpoint]\n{below}\n")
        file = tmp_path / "mine.toml"
        file.write_text(f'base = "base.toml"\n[checkpoint]\n{above}\n')
        assert load_job(file).checkpoint.keep_latest == 4
        for name in ("keep", "keep_latest"):
            assert load_job(file, [f"--checkpoint.{name}=5"]).checkpoint.keep_latest == 5


def test_both_names_in_one_place_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "mine.toml", "[checkpoint]\nkeep = 3\nkeep_latest = 4\n")
    what = "[checkpoint] keep: is the former name of keep_latest, and both are given; delete keep"
    with pytest.raises(ConfigError) as caught:
        load_job(file)
    assert str(caught.value) == f"{file}: {what}"
    with pytest.raises(ConfigError, match=r"^command line: \[checkpoint\] keep: is the former name of"):
        load_job(None, ["--checkpoint.keep_latest=3", "--checkpoint.keep=4"])


def test_a_wrong_value_under_a_former_key_is_a_fault_of_the_present_one(tmp_path: Path) -> None:
    file = written(tmp_path / "mine.toml", "[checkpoint]\nkeep = -1\n")
    with pytest.raises(ConfigError) as caught:
        load_job(file)
    assert str(caught.value) == f"{file}: [checkpoint] keep_latest = -1: must be at least 0"


def test_a_line_is_said_once_on_one_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        load_job(None, ["--run.sample", "a"])
    assert capsys.readouterr().err.count("sample_prompt") == 1
    words = ["config", "--config", "debug", "--run.sample", "a", "--checkpoint.keep", "1"]
    said = run_titan(words, Path.cwd()).stderr
    assert said == "warning: [checkpoint] keep is now keep_latest (command line)\n"  # the rest was said here
    for variable in ("RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(variable, "1")
        warn_once(f"of {variable}")
        monkeypatch.delenv(variable)
    assert capsys.readouterr().err == ""


def former_names(job: Mapping[str, Any]) -> Iterator[str]:
    for path, config in declared_tables(job):
        here = table_at(job, path)
        yield from (o.spec.formerly for o in options_of(config) if o.spec.formerly in here)
        yield from (o.key for o in options_of(config) if str(here.get(o.key)) in o.spec.former_values)


def test_what_titan_config_prints_has_present_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lr_schedule.name", "wsd", "--lr_schedule.shape", "sqrt", "--data.part", "held_out"]
    assert (
        cli.main(["config", "--config", str(RELEASED / "config.toml"), "--data.name", "stdlib", *words, "--json"]) == 0
    )
    out, err = capsys.readouterr()
    assert err.count("warning: ") == 7
    assert list(former_names(json.loads(out))) == []
    assert json.loads(out)["lr_schedule"]["decay_type"] == "sqrt"


def test_a_checkpoint_of_before_is_of_the_same_job() -> None:
    state = json.loads((RELEASED / "checkpoints" / "step-00000004" / "state.json").read_text())
    now = load_job(RELEASED / "config.toml").table
    assert len(list(former_names(state["rest"]["config"]))) == 5
    assert compare(state["rest"], now, state["rest"]["data"]["fingerprint"]) == Changes()


def test_dotted_keys_keep_their_order() -> None:
    keys = {"mesh.tp": 2, "plugins.activation_checkpoint.enabled": True, "plugins.activation_checkpoint.mode": "every",
            "plugins.activation_checkpoint.every": 2}  # fmt: skip
    load_job(None)  # loads the plugins
    found = renewed_keys(keys)
    assert list(found) == list(keys) and found["plugins.activation_checkpoint.mode"] == "every_n"
    assert renewed_job({"plugins": 3, "data": {"mixture": 3}, "run": {"sample": "a"}})["run"] == {"sample_prompt": "a"}


PLUGIN = '''
from dataclasses import dataclass
from titan.contracts import Technique, option, register

@dataclass(frozen=True, kw_only=True)
class Config:
    level: int = option(0, "how much", formerly="amount")
    kind: str = option("soft", "how", former_values={"gentle": "soft", "rough": "hard"})

@register
class Shaker(Technique):
    """Does nothing."""

    name = "shaker"
    Config = Config
    phase = "convert"
'''


def test_a_plugin_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_job(None)
    monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))
    monkeypatch.setattr(registry, "_opened", set(registry._opened))
    (tmp_path / "shaker.py").write_text(PLUGIN)
    words = ["--plugins.path", str(tmp_path), "--plugins.shaker.amount=3", "--plugins.shaker.kind", "rough"]
    assert load_job(None, words).table["plugins"]["shaker"] == {"enabled": True, "level": 3, "kind": "hard"}
    assert capsys.readouterr().err.splitlines() == [
        "warning: [plugins.shaker] amount is now level (command line)",
        'warning: [plugins.shaker] kind = "rough" is now "hard" (command line)',
    ]
    base = load_base(None, words)
    assert {"plugins.shaker.level", "plugins.shaker.kind"} <= base.fixed
    assert {"--plugins.shaker.level=3", "--plugins.shaker.kind=hard"} <= set(base.overrides)


def test_a_former_key_belongs_to_one_option() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        level: int = option(0, "how much", formerly="kind")
        kind: str = option("", "how")

    with pytest.raises(TypeError, match="kind is a key, or a former key, of two options"):
        options_of(Twice)


def test_a_table_that_is_no_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Link:
        gain: float = option(1.0, "share", formerly="gb_s")
        mode: Literal["a", "b"] = option("a", "which", former_values={"x": "b"})

    link, faults = parse(Link, {"gb_s": 2, "mode": "x"}, Where("links.0", "c.toml"))
    assert link == Link(gain=2.0, mode="b") and not faults
    assert capsys.readouterr().err.splitlines() == [
        "warning: [links.0] gb_s is now gain (c.toml)", 'warning: [links.0] mode = "x" is now "b" (c.toml)',
    ]  # fmt: skip


def test_all_former_flags_are_known_here() -> None:
    names = [module.name for module in pkgutil.iter_modules(titan.commands.__path__)]
    modules = {name: importlib.import_module(f"titan.commands.{name}") for name in names}
    found = {(name, *pair) for name, module in modules.items() for pair in getattr(module, "FORMER_FLAGS", {}).items()}
    assert found == set(FLAGS)


@pytest.mark.parametrize(("command", "former", "flag"), FLAGS)
def test_a_former_flag(capsys: pytest.CaptureFixture[str], command: str, former: str, flag: str) -> None:
    whole = [command, "train-tokenizer"] if command == "data" else [command]
    with pytest.raises(SystemExit):
        cli.main([*whole, "--help"])
    words = capsys.readouterr().out.replace("[", " ").replace("]", " ").split()
    assert flag in words and former not in words
    assert cli.main([*whole, former, flag]) == 2
    what = f"{former} is the former name of {flag}, and both are given; delete {former}"
    assert capsys.readouterr().err == f"error: command line: {what}\n"


def test_a_former_flag_does_what_the_present_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--clusters"]) == 0
    out, err = capsys.readouterr()
    assert err == "warning: --clusters is now --list-clusters\n"
    assert cli.main(["plan", "--list-clusters"]) == 0
    assert capsys.readouterr() == (out, "")
    (tmp_path / "text.txt").write_text("a word and a word and a word")
    words = ["data", "train-tokenizer", "--data", "text", "--path", str(tmp_path), "--size", "260"]
    assert cli.main([*words, f"--out={tmp_path / 'ranks'}"]) == 0
    assert "warning: --out is now --output\n" in capsys.readouterr().err
    assert (tmp_path / "ranks").is_file()
