"""Models that transformers has made and models that it reads: the same logits, both ways."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface import LLAMA, SCALED, convert, loaded
from titan.checkpoint.disk import tensor_files

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 257, "n_positions": 64, "initializer_range": 0.2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gqa-scaled": ("llama", {"num_key_value_heads": 2, "rope_theta": 500000.0, "rope_scaling": SCALED}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "rope_scaling": SCALED}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 48}),
}


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")
        yield pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def theirs(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A folder that transformers wrote of a random model of a case, in shards, and the model."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(case: str) -> tuple[Path, Any]:
        if case not in made:
            kind, options = CASES[case]
            folder = tmp_path_factory.mktemp(case)
            config, model = {
                "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
                "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
            }[kind]
            torch.manual_seed(3)
            model = model(config(**(LLAMA if kind == "llama" else GPT2), **options)).eval()
            with torch.no_grad():
                for parameter in model.parameters():  # norms and biases too, which are born as ones and zeros
                    parameter.add_(0.1 * torch.randn(parameter.shape))
            model.save_pretrained(folder, max_shard_size="40KB")
            made[case] = folder, model
        return made[case]

    return make


@torch.no_grad()
def assert_same_logits(ours: torch.nn.Module, other: Any) -> None:
    tokens = torch.randint(257, (2, 64), generator=torch.Generator().manual_seed(5))
    mine, wanted = ours(tokens), other(tokens).logits
    assert wanted.std() > 0.1
    assert (mine - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_same_logits_both_ways(case: str, theirs: Any, transformers: Any, tmp_path: Path) -> None:
    folder, model = theirs(case)
    ours = loaded(folder)
    assert_same_logits(ours, model)
    convert(folder, tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "hf", "hf", "--shard-size", "4e-5")
    again, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values()), told
    assert type(again) is type(model)
    assert again.config.eos_token_id == 256 and again.config.bos_token_id is None
    assert_same_logits(ours, again.eval())
    assert {name: stored.shape for name, stored in tensor_files.find_tensors(folder).items()} == {
        name: stored.shape for name, stored in tensor_files.find_tensors(tmp_path / "hf").items()
    }
