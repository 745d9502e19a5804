"""Weights and their tokenizer stay together: a checkpoint keeps its files, and another one is refused."""

import json
from pathlib import Path

import pytest

from bench.mutations import reseal
from tests.jobs import LLAMA, SAVING
from titan import cli
from titan.data.tokens import identity
from titan.data.tokens.bytepairs import write_ranks
from titan.testing.jobs import train_job

VOCAB = ("--model.vocab_size", "300")


def ranks(path: Path, *, backwards: bool = False) -> Path:
    """A rank file of all bytes and a few pairs; backwards: the same tokens, the bytes in the opposite order."""
    path.parent.mkdir(exist_ok=True)
    order = range(255, -1, -1) if backwards else range(256)
    tokens = [*(bytes([byte]) for byte in order), b"th", b"the", b" the", b"on", b"er"]
    write_ranks(path, {token: rank for rank, token in enumerate(tokens)})
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose rank file has been changed since."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("one two three four five " * 200)
    file = ranks(folder / "tokens" / "my ranks.tiktoken")
    train_job(folder, 1, *SAVING, *VOCAB, *words(file))
    ranks(file, backwards=True)
    return folder


def words(file: Path) -> tuple[str, ...]:
    return ("--tokenizer.name", "bpe", "--tokenizer.path", str(file))


def call(capsys: pytest.CaptureFixture[str], *command: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(list(map(str, command)))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def evaluated(capsys: pytest.CaptureFixture[str], run: Path, *more: object) -> tuple[int, str, str]:
    found = run / "text" / "a.txt"
    return call(capsys, "eval", "--checkpoint", run / "run", "--data", "text", "--path", found, "--json", *more)


def test_a_checkpoint_is_used_with_its_own_tokenizer(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, original = run / "tokens" / "my ranks.tiktoken", ranks(tmp_path / "ranks.tiktoken")
    monkeypatch.chdir(tmp_path)
    code, out, _ = evaluated(capsys, run)
    loss = json.loads(out)["loss"]
    assert code == 0 and evaluated(capsys, run, *words(original)) == (0, out, ""), "the same tokens elsewhere"
    code, out, err = evaluated(capsys, run, *words(changed))
    assert code == 2 and out == "" and "set checkpoint.change_tokenizer = true" in err
    assert err.count("'bpe' with fingerprint ") == 2
    code, out, err = evaluated(capsys, run, *words(changed), "--checkpoint.change_tokenizer", "true")
    assert code == 0 and json.loads(out)["loss"] > loss + 0.1 and "is not the tokenizer of the weights in" in err
    code, _, err = evaluated(capsys, run, "--tokenizer.name", "byte")
    assert code == 2 and "'byte' with fingerprint utf-8 bytes, 256 is not the tokenizer" in err

    convert = ("convert", "--from", run / "run", "--format", "titan", "--output")
    assert call(capsys, *convert, tmp_path / "copy")[0] == 0
    (kept,) = (tmp_path / "copy").rglob("tokenizer")
    assert [file.name for file in kept.iterdir()] == ["my ranks.tiktoken"]
    assert (kept / "my ranks.tiktoken").read_bytes() == original.read_bytes()


def test_a_new_run_needs_the_tokenizer_of_its_weights(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, original = run / "tokens" / "my ranks.tiktoken", ranks(tmp_path / "ranks.tiktoken")
    assert call(capsys, "convert", "--from", run / "run", "--format", "hf", "--output", tmp_path / "hf")[0] == 0
    data = ("--data.path", run / "text", "--data.cache", tmp_path / "cache", "--run.dir", tmp_path, "--train.steps", 1)
    train = ("train", "--config", LLAMA, *data, *VOCAB, "--checkpoint.enabled", "false", "--checkpoint.init_from")
    for weights in (run / "run", tmp_path / "hf"):
        assert call(capsys, *train, weights, *words(original))[0] == 0
        code, _, err = call(capsys, *train, weights, *words(changed))
        assert code == 2 and f"is not the tokenizer of the weights in {weights}" in err
    assert call(capsys, *train, tmp_path / "hf", *words(changed), "--checkpoint.change_tokenizer", "true")[0] == 0

    saved = (*train[:-3], "--checkpoint.init_from", tmp_path / "hf", *words(original), *SAVING, "--run.name", "gone")
    assert call(capsys, *saved)[0] == 0
    (tmp_path / "hf").rename(tmp_path / "elsewhere")
    assert call(capsys, *saved, "--train.steps", 2)[0] == 0, "goes on without the folder it began with"


def test_weights_of_the_built_in_ranks_do_not_take_a_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A default is a tokenizer too; and so is one that cannot encode what the other can."""
    data = ("--data.path", run / "text", "--data.cache", tmp_path / "cache", "--run.dir", tmp_path, "--run.name", "run")
    train = ("train", "--config", LLAMA, *data, "--train.steps", 1, "--model.vocab_size", 4097, *SAVING)
    assert call(capsys, *train, "--tokenizer.name", "bpe")[0] == 0
    read = ("generate", "--checkpoint", tmp_path / "run", "--prompt", "one", "--max-new-tokens", 1)
    assert call(capsys, *read)[0] == 0
    code, _, err = call(capsys, *read, *words(ranks(tmp_path / "ranks.tiktoken")))
    assert code == 2 and err.count("'bpe' with fingerprint ") == 2
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert not (checkpoint / "tokenizer").exists()
    state = json.loads((checkpoint / "state.json").read_text())
    state["rest"]["tokenizer"]["fingerprint"] = "0" * 64
    (checkpoint / "state.json").write_text(json.dumps(state))
    reseal(checkpoint)
    code, _, err = call(capsys, *read)
    assert code == 2 and "fingerprint 0000000000000000, whose plugin has changed since" in err
    state["rest"]["tokenizer"]["name"] = state["rest"]["config"]["tokenizer"]["name"] = "gone"
    (checkpoint / "state.json").write_text(json.dumps(state))
    reseal(checkpoint)
    code, _, err = call(capsys, *read, "--tokenizer.name", "byte")
    assert code == 2 and "'gone' with fingerprint 0000000000000000; use that one" in err


def test_names_of_files_may_begin_with_a_dot(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ranks(tmp_path / ".ranks")
    made = ("convert", "--from", run / "run", "--format", "titan", "--output", tmp_path / "copy", *words(file))
    assert call(capsys, *made)[0] == 0
    file.unlink()
    read = ("eval", "--data", "text", "--path", run / "text", "--json", "--checkpoint")
    ours, theirs = (json.loads(call(capsys, *read, at)[1]) for at in (run / "run", tmp_path / "copy"))
    assert {**ours, "checkpoint": theirs["checkpoint"]} == theirs


def test_a_resume_names_the_tokenizer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = run / "tokens" / "my ranks.tiktoken"
    data = ("--data.path", run / "text", "--data.cache", run / "cache", "--run.dir", run, "--run.name", "run")
    train = ("train", "--config", LLAMA, *data, *VOCAB, *SAVING, *words(changed), "--train.steps", 9)
    code, _, err = call(capsys, *train)
    assert code == 2 and "is not the tokenizer of the weights in" in err and "tokenized" not in err
    assert err.count("'bpe' with fingerprint ") == 2 and "files of the datasets" not in err
    code, _, err = call(capsys, *train, "--checkpoint.change_tokenizer", "true")
    assert code == 2 and "(the tokenizer changed); set checkpoint.reset_data = true" in err


def test_of_large_files_the_fingerprint_is_kept(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "MOST_BYTES", 100)
    file = ranks(tmp_path / "ranks.tiktoken")
    made = ("convert", "--from", run / "run", "--format", "titan", "--output", tmp_path / "copy", *words(file))
    assert call(capsys, *made)[0] == 0
    assert not list((tmp_path / "copy").rglob("tokenizer"))
    read = ("generate", "--checkpoint", tmp_path / "copy", "--prompt", "one", "--max-new-tokens", 1)
    assert call(capsys, *read)[0] == 0
    ranks(file, backwards=True)
    code, _, err = call(capsys, *read)
    assert code == 2 and err.count("'bpe' with fingerprint ") == 2
