"""`titan eval`: its numbers against a direct computation, a document at a time, and the same at any layout."""

import contextlib
import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.huggingface import plugin, tensors, write
from tests.jobs import LLAMA, SAVING, mesh
from tests.logits import logits_of
from tests.sweeps import but_sweep
from titan import cli
from titan.config import load_job
from titan.data.tokens.shards import ShardWriter
from titan.testing.jobs import train_job
from titan.testing.ranks import run_ranks
from titan.weights.hf_folder import SINGLE

TEXTS = ["one two three four five six seven", "x", "Zwölf Boxkämpfer jagen Viktor.\n quer\tüber", "one two" * 9, " \n"]
END, LENGTH = 256, 16
LAST = [
    "two three four five one",
    "three four five",
    "one two three four five",
    "five one two four",
    "two three five one",
]


def evaluated(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """On one rank: the exit code of `titan eval` with each of these words, its stdout and its stderr.

    One command at most where there are many ranks: they meet once.
    """
    found = []
    for words in commands:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = cli.main(["eval", *words])
        found.append((code, out.getvalue(), err.getvalue()))
    return found


@dataclass
class Trained:
    """A run whose model has learnt to count to five, that model on its own, and files to measure it on."""

    run: Path
    model: nn.Module
    jsonl: list[str]
    last_words: list[str]

    def eval(self, *commands: list[str], ranks: int = 1) -> list[dict[str, Any]]:
        given = [["--checkpoint", str(self.run), "--json", *words] for words in commands]
        found = run_ranks(evaluated, ranks, given, init=False, timeout=120)
        assert all(code == 0 for each in found for code, _, _ in each), found
        assert not any(out for other in found[1:] for _, out, _ in other), "one rank talks"
        return [json.loads(out) for _, out, _ in found[0]]


LAYERS = ("--model.n_layers", "3")
"""Of which two stages have uneven parts."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("one two three four five " * 200)
    learn = [*LAYERS, "--train.steps", "60", "--lr_schedule.decay_steps", "60", "--optimizer.lr", "1e-2"]
    outcome = train_job(folder, 1, *SAVING, "--checkpoint.every", "60", *learn)
    model = load_job(LLAMA, [*LAYERS, "--data.path", "x"]).model.build().requires_grad_(False)
    model.load_state_dict(outcome.weights)
    for name, texts in (("texts", TEXTS), ("last", LAST)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = [["--data", "jsonl", "--path", str(folder / f"{name}.jsonl")] for name in ("texts", "last")]
    return Trained(folder / "run", model, data[0], [*data[1], "--last-word"])


def nats_of(model: nn.Module, ids: list[int], length: int, stride: int) -> float:
    """Of all but the first id: each predicted from the window whose end it is not beyond."""
    total, done = 0.0, 1
    ends = [min(length + n * stride, len(ids) - 1) for n in range(len(ids))]
    for end in sorted(set(ends)) if len(ids) > 1 else ():
        window = torch.tensor(ids[max(0, end - length) : end])
        log_p = logits_of(model, window[None])[0].double().log_softmax(-1)
        for place in range(done, end + 1):
            total -= log_p[place - 1 - max(0, end - length), ids[place]].item()
        done = end + 1
    return total


def expected(model: nn.Module, length: int, stride: int, skip: bool = False) -> dict[str, float | None]:
    encoded = [[*([] if skip else [END]), *text.encode()] for text in TEXTS]
    nats = sum(nats_of(model, ids, length, stride) for ids in encoded)
    tokens = sum(len(ids) - 1 for ids in encoded)
    words, size = sum(len(re.split(r"\s+", text)) for text in TEXTS), sum(len(text.encode()) for text in TEXTS)
    return {
        "loss": nats / tokens,
        "perplexity": math.exp(nats / tokens),
        "word_perplexity": math.exp(nats / words),
        "bits_per_byte": nats / size / math.log(2),
        "tokens": tokens,
        "words": words,
        "bytes": size,
        "documents": len(TEXTS),
    }


WAYS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "as trained": ([], {"length": LENGTH, "stride": LENGTH}),
    "stride": (["--stride", "5", "--batch-size", "3"], {"length": LENGTH, "stride": 5}),
    "every token a window": (["--stride", "1"], {"length": LENGTH, "stride": 1}),
    "long windows": (["--seq-len", "32", "--batch-size", "1"], {"length": 32, "stride": 32}),
    "short windows": (["--seq-len", "3"], {"length": 3, "stride": 3}),
    "first tokens left out": (["--first-token", "skip"], {"length": LENGTH, "stride": LENGTH, "skip": True}),
}


def test_against_a_direct_computation(trained: Trained) -> None:
    found = trained.eval(*([*trained.jsonl, *words] for words, _ in WAYS.values()))
    for (_, way), numbers in zip(WAYS.values(), found, strict=True):
        right = expected(trained.model, **way)
        assert {key: numbers[key] for key in right} == pytest.approx(right, rel=1e-5)


def test_a_text_as_transformers_shifts_its_labels(trained: Trained, tmp_path: Path) -> None:
    text = "one two three four five Six"
    (tmp_path / "a.txt").write_text(text)
    data = ["--data", "text", "--path", str(tmp_path / "a.txt"), "--first-token", "skip", "--data.seq_len=32"]
    [found] = trained.eval(data)
    ids = torch.tensor(list(text.encode()))
    right = nn.functional.cross_entropy(logits_of(trained.model, ids[None])[0, :-1], ids[1:]).item()
    assert found["loss"] == pytest.approx(right, rel=1e-6)


def test_shards_have_no_words_and_no_bytes(trained: Trained, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.bin", 257) as writer:
        for text in TEXTS:
            writer.add([*text.encode(), END])
    [found] = trained.eval(["--data", "shards", "--path", str(tmp_path)])
    right = expected(trained.model, LENGTH, LENGTH)
    for key in ("word_perplexity", "bits_per_byte", "words", "bytes"):
        assert found[key] is None
        del right[key]
    assert {key: found[key] for key in right} == pytest.approx(right, rel=1e-5)


def test_a_limit_counts_documents(trained: Trained) -> None:
    few, more = trained.eval([*trained.jsonl, "--limit", "2"], [*trained.last_words, "--limit", "4"])
    assert (few["documents"], few["words"], few["tokens"]) == (2, 8, len(TEXTS[0]) + 1)
    assert (more["documents"], more["tokens"]) == (4, sum(len(text.split()[-1]) + 1 for text in LAST[:4]))


def test_last_words(trained: Trained) -> None:
    [found] = trained.eval(trained.last_words)
    nats, tokens, known = 0.0, 0, 0
    for text in LAST:
        asked = len(text.split()[-1]) + 1
        ids = torch.tensor(list(text.encode())[-LENGTH - 1 :])
        log_p = logits_of(trained.model, ids[None, :-1])[0].double().log_softmax(-1)[-asked:]
        nats += nn.functional.nll_loss(log_p, ids[-asked:], reduction="sum").item()
        known += bool((log_p.argmax(-1) == ids[-asked:]).all())
        tokens += asked
    assert 0 < known < len(LAST)
    assert found["accuracy"] == known / len(LAST)
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["word_perplexity"] == pytest.approx(math.exp(nats / 5), rel=1e-4)
    assert (found["tokens"], found["documents"]) == (tokens, 5)


@pytest.fixture(scope="module")
def alone(trained: Trained) -> dict[str, dict[str, Any]]:
    """On one rank."""
    text, last = trained.eval([*trained.jsonl, "--stride", "5"], trained.last_words)
    return {"text": text, "last words": last}


LAYOUTS = {
    "dp_shard 3": ("text", 3, ["--batch-size", "2"]),
    "tp 2": ("last words", 2, [*mesh(tp=2), "--batch-size", "2"]),
    "pp 2": ("last words", 2, mesh(pp=2)),
    "cp 2": ("last words", 2, mesh(cp=2)),
    "cp 2, tp 2, pp 2": ("text", 8, [*mesh(cp=2, tp=2, pp=2), "--plugins.context.method", "ulysses"]),
    "dp_shard 2, cp 2": ("text", 4, [*mesh(dp_shard=2, cp=2), "--plugins.context.method", "gather"]),
    "dp_shard 2, tp 2, pp 2": ("text", 8, [*mesh(dp_shard=2, tp=2, pp=2), "--batch-size", "1"]),
}


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, "cp 2, tp 2, pp 2", "dp_shard 2, tp 2, pp 2"))
def test_the_same_at_any_layout(layout: str, trained: Trained, alone: dict[str, dict[str, Any]]) -> None:
    what, ranks, words = LAYOUTS[layout]
    data = [*trained.jsonl, "--stride", "5"] if what == "text" else trained.last_words
    [found] = trained.eval([*data, *words], ranks=ranks)
    said = {key: value for key, value in alone[what].items() if isinstance(value, (int, float))}
    assert {key: found[key] for key in said} == pytest.approx(said, rel=1e-5)


def test_weights_that_are_nan_have_no_loss(trained: Trained, tmp_path: Path) -> None:
    write(tmp_path / "hf", plugin("llama"))
    held = tensors(tmp_path / "hf")
    held["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(held, tmp_path / "hf" / SINGLE)
    words = ["--checkpoint", str(tmp_path / "hf"), "--tokenizer.name", "byte", *trained.jsonl]
    [[(code, out, err)]] = run_ranks(evaluated, 1, [words], init=False, timeout=120)
    assert (code, out) == (1, "")
    assert err.endswith("the model's logits are NaN or infinite; so is layers.1.ffn.w3.weight in part\n")


def test_wrong_input_is_said_in_a_sentence(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.jsonl").write_text('{"txt": "a"}\n')
    (tmp_path / "one.jsonl").write_text('{"text": "two words"}\n\n{"text": "word "}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    cases = {
        "txt --path x": "unknown dataset (did you mean 'text'?)",
        "text --path nowhere": "nowhere: no such file or folder",
        "text": "[data] path: missing",
        "jsonl --path bad.jsonl": "bad.jsonl:1: no field 'text'; set data.field to one of: 'txt'",
        "jsonl --path empty.jsonl": "dataset 'jsonl' holds no token to score",
        "jsonl --path empty.jsonl --last-word": "dataset 'jsonl' holds no text",
        "jsonl --path one.jsonl --last-word": "one.jsonl:3: --last-word needs documents of at least two words",
        "jsonl --path one.jsonl --last-word --seq-len 5": "has 6 tokens; 1 to --seq-len 5 fit",
        "jsonl --path one.jsonl --stride 17": "--stride 17: must be at most the window length --seq-len, 16",
        "jsonl --path one.jsonl --limit 0": "--limit 0: must be at least 1",
        "jsonl --path one.jsonl --seq-len 64": "[data] seq_len = 64: must be at most the model's max_seq_len, 32",
        "jsonl --path one.jsonl --mesh.tpp 2": "no plugin owns this axis",
    }
    given = [["--checkpoint", str(trained.run), "--data", *words.split()] for words in cases]
    monkeypatch.chdir(tmp_path)
    [found] = run_ranks(evaluated, 1, given, init=False)
    for (code, out, err), expected in zip(found, cases.values(), strict=True):
        assert (code, out, len(err.splitlines())) == (2, "", 1) and expected in err, err
