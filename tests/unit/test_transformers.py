"""Models that transformers has made and models that it reads: the same logits, both ways."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface import convert, loaded
from tests.logits import logits_of
from tests.transformers_curve import CASES, random_model
from titan.contracts.plugin import registry
from titan.weights import hf_folder

KINDS = {"gpt2": "gpt", "llama": "llama", "mistral": "llama", "bloom": "bloom", "gemma2": "gemma"}
KINDS |= {"gpt_neox": "neox", "olmo2": "olmo2", "qwen3": "qwen3", "mixtral": "moe", "qwen3_moe": "moe"}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_left_out_have_the_defaults_of_transformers(kind: str, transformers: Any) -> None:
    registry.load_plugins()
    model: Any = registry.find("model", KINDS[kind])
    whole = transformers.AutoConfig.for_model(kind).to_dict()
    assert model.from_hf({"model_type": kind}) == model.from_hf({**whole, "model_type": kind})


@pytest.fixture(scope="module")
def theirs(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A folder that transformers wrote of a random model of a case, in shards, and the model."""

    @cache
    def make(case: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(case)
        return folder, random_model(case, folder).eval()

    return make


@torch.no_grad()
def assert_same_logits(ours: torch.nn.Module, other: Any) -> None:
    tokens = torch.randint(257, (2, 64), generator=torch.Generator().manual_seed(5))
    mine, wanted = logits_of(ours, tokens), other(tokens).logits
    assert wanted.std() > 0.1
    assert (mine - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_same_logits_both_ways(case: str, theirs: Any, transformers: Any, tmp_path: Path) -> None:
    folder, model = theirs(case)
    ours = loaded(folder)
    assert_same_logits(ours, model)
    convert(folder, tmp_path / "kept", "titan")
    convert(tmp_path / "kept", tmp_path / "hf", "hf", "--shard-size", "4e-5")
    again, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values()), told
    assert type(again) is type(model)
    assert again.config.eos_token_id == 256 and again.config.bos_token_id is None
    assert_same_logits(ours, again.eval())
    assert {name: stored.shape for name, stored in hf_folder.find_tensors(folder).items()} == {
        name: stored.shape for name, stored in hf_folder.find_tensors(tmp_path / "hf").items()
    }
