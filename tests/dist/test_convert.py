"""What many ranks saved becomes one Hugging Face folder, and a run goes on from what came back."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.huggingface import convert
from tests.jobs import GPT, LLAMA, SAVING, mesh
from tests.sweeps import swept_case
from titan import cli
from titan.testing.jobs import read_rows, train_job
from titan.testing.ranks import run_ranks


def test_a_sharded_checkpoint_there_and_back(tmp_path: Path) -> None:
    run = train_job(tmp_path, 4, *mesh(tp=2, pp=2), *SAVING, "--train.steps", "2")
    convert(tmp_path / "run", tmp_path / "hf", "hf", tokenizer="")
    held = load_file(tmp_path / "hf" / "model.safetensors")
    assert len(held) == len(run.weights)
    for theirs, ours in {
        "model.embed_tokens.weight": "embed.weight",
        "model.layers.0.self_attn.k_proj.weight": "layers.0.attn.wk.weight",
        "model.layers.1.mlp.down_proj.weight": "layers.1.ffn.w2.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "output.weight",
    }.items():
        assert torch.equal(held[theirs], run.weights[ours]), theirs
    convert(tmp_path / "hf", tmp_path / "kept", "titan", tokenizer="")
    words = ("--checkpoint.resume", str(tmp_path / "kept"), "--train.steps", "1")
    resumed = train_job(tmp_path, 2, "--mesh.tp", "2", *SAVING, *words, name="resumed")
    started = train_job(tmp_path, 1, "--checkpoint.init_from", str(tmp_path / "hf"), "--train.steps", "1", name="new")
    assert list(read_rows(tmp_path / "resumed")) == [1]
    assert abs(resumed.rows[1]["loss"] / started.rows[1]["loss"] - 1) < 1e-6


SAID = "The loss falls while the gradient norm stays small, and a model trains on many ranks: naïve, 東京, 🗼.\n"


def _losses(folder: str) -> list[float]:
    """On one rank: the loss on a text by transformers, which reads the exported model and tokenizer, and by titan."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/hf", dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(f"{folder}/hf")(SAID, return_tensors="pt").input_ids
    with torch.no_grad():
        theirs = float(model(ids, labels=ids).loss)
    return [theirs, *(_eval(f"{folder}/{checkpoint}", f"{folder}/said.txt") for checkpoint in ("run", "hf"))]


def _eval(checkpoint: str, text: str) -> float:
    words = ["--data", "text", "--path", text, "--first-token", "skip", "--seq-len", "128", "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["eval", "--checkpoint", checkpoint, *words]) == 0
    loss: float = json.loads(out.getvalue())["loss"]
    return loss


@pytest.mark.parametrize("config", [LLAMA, swept_case(GPT)], ids=["llama", "gpt"])
def test_transformers_finds_the_loss_that_eval_finds(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    words = ("--tokenizer.name", "bpe", "--model.vocab_size", "4097", "--model.max_seq_len", "128")
    train_job(tmp_path, 1, *words, *SAVING, "--optimizer.lr", "1e-2", config=config)
    (tmp_path / "said.txt").write_text(SAID)
    convert(tmp_path / "run", tmp_path / "hf", "hf", tokenizer="")
    [(theirs, run, export)] = run_ranks(_losses, 1, str(tmp_path), init=False)
    assert 3 < run < 8
    assert abs(run - theirs) < 1e-5 and abs(export - theirs) < 1e-5
