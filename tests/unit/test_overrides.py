"""What the command line says: which of its words are overrides, and that they win, a preset included."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import LLAMA
from titan import cli
from titan.config import load_job, said_of
from titan.config.tables import QUICKSTART
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
        (
            ["config", "--config", "configs/debug.toml", "train.steps=3"],
            "train.steps=3: expected --table.key value; --config configs/debug.toml names the file",
        ),
        (
            ["config", "--steps", "3"],
            "--steps: expected --table.key value (did you mean --train.steps or "
            "--lr_schedule.decay_steps or --lr_schedule.warmup_steps?)",
        ),
        (["config", "--lr=1"], "--lr=1: expected --table.key value (did you mean --optimizer.lr?)"),
        (
            ["train", "--global-batch-size", "8"],
            "--global-batch-size: expected --table.key value (did you mean --train.global_batch_size?)",
        ),
        (["train", "mine.toml"], "mine.toml: expected --table.key value (did you mean --config mine.toml?)"),
        (["train", "--train.steps", ""], "[train] steps = '': must be an integer"),
        (["train", "--plugins.compile.enabld", "1"], "[plugins.compile] enabld: unknown key (did you mean 'enabled'?)"),
        (["generate", "--chekpoint", "x"], "--chekpoint: expected --table.key value (did you mean --checkpoint?)"),
        (["data", "prepare", "--confg", "x"], "--confg: titan data takes no such argument (did you mean --config?)"),
        (["convert", "--form", "x"], "--form: expected --table.key value (did you mean --format?)"),
        (["train", "debug"], "debug: expected --table.key value (did you mean --config debug?)"),
        (["plan", "--output", "x.toml", "--cluster", "h100"], "--output: no layout is searched; add --search"),
        (
            ["config", "--checkpoint.enabled", "false", "--checkpoint.resume", "required"],
            "[checkpoint] resume = 'required': but checkpoints are off; set enabled = true",
        ),
        (["config", "--checkpoint.keep", "3"], "[checkpoint] keep: unknown key (did you mean 'keep_latest'?)"),
        (["data", "train-tokenizer", "--out=x"], "--out=x: titan data takes no such argument (did you mean --output?)"),
        (["--versoin"], "--versoin: titan takes no such argument (did you mean --version?)"),
        (["plan", "--outptu=x.toml"], "--outptu=x.toml: expected --table.key value (did you mean --output?)"),
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
    assert said_of(job) == [
        f"[model] preset = '7b' ({job}) overrides what files below it set: {SMALL.removeprefix('n_layers = 2, ')}"
    ]
    assert load_job(job, ["--model.dim", "8192"]).model.config.dim == 8192
    assert said_of(LLAMA) == said_of(None, ["--train.steps", "3"]) == []


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
    ],
)
def test_what_argparse_refuses_is_said_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2 and capsys.readouterr().err == f"{said}\n"


@pytest.mark.parametrize(
    ("of_the_file", "words", "said"),
    [
        ("", ["--model.n_heads", "3"], r"^command line: \[model\]: dim 32 over n_heads 3"),
        ("", ["--data.seq_len", "64"], r"^command line: \[data\] seq_len = 64"),
        ("[model]\nn_heads = 3\n", [], r"^/.*/job\.toml: \[model\]: dim 32 over n_heads 3"),
    ],
)
def test_a_fault_of_the_command_line_is_not_said_of_the_file(
    of_the_file: str, words: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(f'base = "{LLAMA}"\n{of_the_file}')
    with pytest.raises(ConfigError, match=said):
        load_job(tmp_path / "job.toml", ["--data.path", "x", *words], 1)


def test_a_layout_of_the_command_line_that_does_not_fit_is_its_fault() -> None:
    with pytest.raises(ConfigError, match=r"^command line: \[plugins\.tensor\]: .*mesh\.tp = 3"):
        load_job(LLAMA, ["--data.path", "x", "--mesh.tp", "3"], 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.max_seq_len", "7"], "[data] seq_len = 32: must be at most the model's max_seq_len, 7"),
        (["--mesh.pp", "-1"], "[mesh] dp_shard = -1: only one axis can take all remaining ranks, and pp already does"),
        (["--mesh.dp_shard", "3"], "[train] global_batch_size = 8: must be divisible by the 3 data-parallel ranks"),
        (["--validation.every", "3"], "[validation] name: missing, for validation.every = 3; name a dataset ("),
    ],
)
def test_a_key_of_the_command_line_that_another_tables_fault_names(words: list[str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f'base = "{LLAMA}"\n[train]\nglobal_batch_size = 8\n[data]\nseq_len = 32\npath = "x"\n')
    with pytest.raises(ConfigError, match=re.escape(f"command line: {said}")):
        load_job(file, words)
    with pytest.raises(ConfigError, match=r"job\.toml: \[data\] seq_len = 7"):  # the file's own fault stays its own
        file.write_text(file.read_text().replace("seq_len = 32", "seq_len = 7000"))
        load_job(file, ["--train.steps", "3", "--data.shuffle", "false"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.name", "text", "--data.path", "README.md"], "[data] name is set on the command line"),
        (["--data.mixture", '[{name = "text", path = "README.md"}]'], "[data] mixture is set on the command line"),
        (["--data.name", "text", "--data.path", "README.md", "--validation.every", "0"], ""),
        (["--data.name", "stdlib", "--validation.name", "text", "--validation.path", "README.md"], ""),
        (["--data.seq_len", "64"], ""),
    ],
)
def test_data_of_ones_own_with_the_validation_of_the_quickstart_is_told(words: list[str], said: str) -> None:
    whose = f"[validation] name = 'stdlib' ({QUICKSTART})"
    then = "to validate on text of one's own, set validation.name and its path too; for none, validation.every = 0"
    told = [f"validation is on other text than training: {whose}, while {said}; {then}"] if said else []
    assert said_of(None, words) == told


@pytest.mark.parametrize("ranks", [0, -8])
def test_a_number_of_ranks_that_is_none(ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"command line: --world-size {ranks}: must be at least 1"):
        load_job(LLAMA, [], ranks)
