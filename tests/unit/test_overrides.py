"""What the command line says: which of its words are overrides, and that they win, a preset included."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import LLAMA
from titan import cli
from titan.config import load_job, said_twice
from titan.errors import ConfigError

SMALL = "n_layers = 2, dim = 32, n_heads = 4, n_kv_heads = 2, ffn_dim = 48, vocab_size = 257, max_seq_len = 32"


def resolved(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    code = cli.main(["config", "--json", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out), err


@pytest.mark.parametrize(
    "words",
    [
        ["--train.steps", "5", "--mesh.dp_shard", "-1"],
        ["--mesh.dp_shard", "-1", "--train.steps=5"],
        ["configs/debug.toml", "--train.steps", "5"],
        ["--train.steps", "5", "configs/debug.toml"],
    ],
)
def test_the_value_of_an_override_is_no_file(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    table, _ = resolved(capsys, *words)
    assert table["train"]["steps"] == 5
    assert table["run"]["name"] == ("debug" if "configs/debug.toml" in words else "quickstart")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config", "--trainsteps", "5"], "--trainsteps: expected --table.key value"),
        (["config", "--train.steps"], "--train.steps: needs a value"),
        (["plugins", "--train.steps", "5"], "--train.steps: titan plugins takes no such argument"),
        (["config", "--train.steps", "--json"], "--train.steps: needs a value"),
    ],
)
def test_what_is_no_override_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"error: command line: {said}\n"


def test_a_preset_of_the_command_line_wins_over_sizes_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(LLAMA), "--data.path", "tests", "--model.preset", "7b"]
    table, err = resolved(capsys, *words)
    assert (table["model"]["n_layers"], table["model"]["dim"], "n_kv_heads" in table["model"]) == (32, 4096, False)
    assert err == f"[model] preset = '7b' (command line) overrides what files below it set: {SMALL}\n"
    assert cli.main(["plan", "--json", "--tokens", "1e9", *words]) == 0
    out, again = capsys.readouterr()
    assert [stage["layers"] for stage in json.loads(out)["stages"]] == [[list(range(32))]]
    assert again == err


@pytest.mark.parametrize("first", [True, False])
def test_keys_beside_a_preset_win_over_it(first: bool, capsys: pytest.CaptureFixture[str]) -> None:
    preset, key = ["--model.preset", "7b"], ["--model.n_layers", "2"]
    words = [*key, *preset] if first else [*preset, *key]
    table, _ = resolved(capsys, "--config", str(LLAMA), "--data.path", "tests", *words)
    assert (table["model"]["n_layers"], table["model"]["dim"]) == (2, 4096)


def test_a_preset_of_a_file_wins_over_its_base_and_not_over_its_own_keys(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f'base = "{LLAMA}"\n[data]\npath = "x"\n[model]\nn_layers = 6\npreset = "7b"\n')
    config = load_job(job).model.config
    assert (config.n_layers, config.dim, config.n_kv_heads) == (6, 4096, None)
    assert said_twice(job) == [
        f"[model] preset = '7b' ({job}) overrides what files below it set: {SMALL.removeprefix('n_layers = 2, ')}"
    ]
    assert load_job(job, ["--model.dim", "8192"]).model.config.dim == 8192
    assert said_twice(LLAMA) == said_twice(None, ["--train.steps", "3"]) == []


def test_a_mixture_and_the_dataset_of_a_file_below(tmp_path: Path) -> None:
    """The upper one counts; in one file they are refused together."""
    (tmp_path / "one.toml").write_text(f'base = "{LLAMA}"\n[data]\nname = "text"\npath = "t"\n')
    entries = '[[data.mixture]]\nname = "text"\npath = "a"\n[[data.mixture]]\nname = "jsonl"\npath = "b"\nweight = 2\n'
    (tmp_path / "many.toml").write_text(f'base = "one.toml"\n{entries}')
    many = load_job(tmp_path / "many.toml").table["data"]
    assert [entry["name"] for entry in many["mixture"]] == ["text", "jsonl"] and "name" not in many
    again = load_job(tmp_path / "many.toml", ["--data.name", "text", "--data.path", "c"]).table["data"]
    assert again["name"] == "text" and "mixture" not in again
    (tmp_path / "both.toml").write_text(f'base = "one.toml"\n[data]\nname = "text"\n{entries}')
    with pytest.raises(ConfigError, match=r"\[data\] name: cannot stand beside a mixture"):
        load_job(tmp_path / "both.toml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "titan: error: unknown command 'trian' (did you mean 'train'?); see titan --help"),
        (["plan", "--top", "x"], "titan plan: error: argument --top: invalid int value: 'x'; see titan plan --help"),
        (["plan", "--exac"], "error: command line: --exac: expected --table.key value (did you mean --dry-run?)"),
        (["plugins", "--jsn"], "error: command line: --jsn: titan plugins takes no such argument (did you mean --json"),
    ],
)  # fmt: skip
def test_what_argparse_refuses_is_said_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(words)
    except SystemExit as end:
        code = end.code
    [line] = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith(said)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--model.n_heads", "3", "command line: [model]: dim 32 over n_heads 3"),
        ("--data.seq_len", "64", "command line: [data] seq_len = 64"),
        ("--data.path", "x", f"{LLAMA}: [model]: dim 32 over n_heads 3"),
    ],
)
def test_a_fault_of_the_command_line_is_not_said_of_the_file(flag: str, value: str, said: str, tmp_path: Path) -> None:
    file = LLAMA
    if flag == "--data.path":
        file = tmp_path / "job.toml"
        file.write_text(f'base = "{LLAMA}"\n[model]\nn_heads = 3\n')
    with pytest.raises(ConfigError, match=re.escape(said.replace(str(LLAMA), str(file)))):
        load_job(file, ["--data.path", "x", flag, value], 1)


def test_a_layout_of_the_command_line_that_does_not_fit_is_its_fault() -> None:
    with pytest.raises(ConfigError, match=r"^command line: \[plugins\.tensor\]: .*mesh\.tp = 3"):
        load_job(LLAMA, ["--data.path", "x", "--mesh.tp", "3"], 3)


@pytest.mark.parametrize("ranks", [0, -8])
def test_a_number_of_ranks_that_is_none(ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"command line: --world-size {ranks}: must be at least 1"):
        load_job(LLAMA, [], ranks)
