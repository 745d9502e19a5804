"""`titan data`, as a user calls it."""

import json
from pathlib import Path

import pytest

from tests.jobs import LLAMA
from tests.unit.test_data_shards import DOCUMENTS, write
from titan import cli
from titan.data.tokens.bytepairs import read_ranks


def test_inspect_shows_a_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.bin", DOCUMENTS)
    assert cli.main(["data", "inspect", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["tokens"], shown["documents"], shown["largest_id"], shown["bytes_per_token"]) == (12, 3, 9, 2)
    assert shown["first_document"] == [1, 2, 3, 0]
    assert cli.main(["data", "inspect", str(path)]) == 0
    assert "tokens           12\n" in capsys.readouterr().out


def test_inspect_refuses_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.bin", DOCUMENTS)
    path.write_bytes(path.read_bytes()[:-8])
    assert cli.main(["data", "inspect", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "a.bin is cut short" in captured.err


def test_train_tokenizer_writes_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rustbpe")
    (tmp_path / "a.txt").write_text("one two three four five six seven\n" * 20)
    out = tmp_path / "new" / "ranks"
    words = ["data", "train-tokenizer", "--data", "text", "--path", str(tmp_path), "--size", "270"]
    words += ["--output", str(out)]
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ranks": 270, "file": str(out)}
    assert len(read_ranks(out)) == 270


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "txt"], "--data txt: unknown dataset (did you mean 'text'?)"),
        (["--data", "text"], "[data] path: missing"),
        (["--data", "shards", "--path", "FILE"], "--data shards: this dataset holds tokens"),
        (["--size", "100"], "--size 100: must be at least 257"),
        (["--data.field", "x"], "--data.field: overrides need --config"),
    ],
)
def test_train_tokenizer_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    path = write(tmp_path / "a.bin", DOCUMENTS)
    words = [str(path) if word == "FILE" else word for word in words]
    assert cli.main(["data", "train-tokenizer", "--output", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err


def test_prepare_tokenizes_a_jobs_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"text of {name}\n")
    sources = "".join(f'[[data.mixture]]\nname = "text"\npath = "{tmp_path}/{name}.txt"\n' for name in "ab")
    job = tmp_path / "job.toml"
    job.write_text(f'base = "{LLAMA}"\n[data]\nseq_len = 8\ncache = "{tmp_path}/cache"\n{sources}')
    assert cli.main(["data", "prepare", "--config", str(job), "--data.workers", "0", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["tokens"], shown["documents"], len(shown["files"])) == (22, 2, 2)
    assert all(Path(file).is_file() for file in shown["files"])
