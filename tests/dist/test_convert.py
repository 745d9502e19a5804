"""What many ranks saved becomes one Hugging Face folder, and a run goes on from what came back."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.jobs import SAVING, read_rows, train_job
from titan import cli


def test_a_sharded_checkpoint_there_and_back(tmp_path: Path) -> None:
    mesh = ("--mesh.tp", "2", "--mesh.pp", "2")
    run = train_job(tmp_path, 4, *mesh, *SAVING, "--train.steps", "2")
    assert cli.main(["convert", "--from", str(tmp_path / "run"), "--to", str(tmp_path / "hf"), "--format", "hf"]) == 0
    held = load_file(tmp_path / "hf" / "model.safetensors")
    assert len(held) == len(run.weights)
    for theirs, ours in {
        "model.embed_tokens.weight": "embed.weight",
        "model.layers.0.self_attn.k_proj.weight": "layers.0.attn.wk.weight",
        "model.layers.3.mlp.down_proj.weight": "layers.3.ffn.w2.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "output.weight",
    }.items():
        assert torch.equal(held[theirs], run.weights[ours]), theirs
    assert cli.main(["convert", "--from", str(tmp_path / "hf"), "--to", str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    words = ("--checkpoint.resume", str(tmp_path / "dcp"), "--train.steps", "1")
    resumed = train_job(tmp_path, 2, "--mesh.tp", "2", *SAVING, *words, name="resumed")
    started = train_job(tmp_path, 1, "--checkpoint.init_from", str(tmp_path / "hf"), "--train.steps", "1", name="new")
    assert list(read_rows(tmp_path / "resumed")) == [1]
    assert abs(resumed.rows[1]["loss"] / started.rows[1]["loss"] - 1) < 1e-6
