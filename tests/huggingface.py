"""Hugging Face folders of small models, written from weights in memory, and read again."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from titan import cli
from titan.checkpoint.ranks import Ranks
from titan.contracts import Model, Tokenizer
from titan.contracts.base.parts import ModelPart
from titan.contracts.plugin import registry
from titan.inference import hf_export
from titan.inference.load_model import open_job
from titan.weights import huggingface
from titan.weights.load import load_weights

SCALED = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"vocab_size": 257, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.2}


def model_of(folder: Path) -> Model:
    return open_job(folder, ["--tokenizer.name", "byte"], 1)[1].model


def loaded(folder: Path, model: Model | None = None) -> torch.nn.Module:
    model = model or model_of(folder)
    module = model.build()
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    load_weights(folder, model, [ModelPart(module)], Ranks(0, 1))
    return module.eval()


def converting(source: Path, to: Path | str, form: str = "hf", tokenizer: str = "byte") -> list[str]:
    """The command; tokenizer: its plugin, "" that of the weights."""
    named = ["--tokenizer.name", tokenizer] if tokenizer else []
    return ["convert", "--from", str(source), "--output", str(to), "--format", form, *named]


def convert(source: Path, to: Path, form: str, *words: str, tokenizer: str = "byte") -> None:
    assert cli.main([*converting(source, to, form, tokenizer), *words]) == 0


class Drawn:
    """Random weights of a model, in memory."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.shapes, generator = huggingface.shapes_of(model), torch.Generator().manual_seed(1)
        self.tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in self.shapes.items()}
        self.read = self.tensors.__getitem__

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype


OWN: dict[str, dict[str, Any]] = {"bloom": {"ffn_dim": None}}  # there, always 4 dim


def plugin(name: str, **options: Any) -> Model:
    registry.load_plugins()
    found: Any = registry.find(Model.kind, name)
    model: Model = found(found.Config(**{**SMALL, **OWN.get(name, {}), **options}))
    return model


SMALL = {"n_layers": 2, "dim": 16, "n_heads": 4, "ffn_dim": 24, "vocab_size": 257, "max_seq_len": 64}


def write(to: Path, model: Model, dtype: torch.dtype = torch.float32, shard_bytes: int = 10**9) -> Drawn:
    registry.load_plugins()
    byte: Any = registry.find(Tokenizer.kind, "byte")
    drawn = Drawn(model, dtype)
    hf_export.write_hf(to, drawn, model, byte(byte.Config()), None, shard_bytes, lambda: None)
    return drawn


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
