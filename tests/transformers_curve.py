"""Models of transformers with random weights, and their curve in a bare loop, on the samples that titan trains on.

    reference = Reference("gpt2", folder)
    assert_same_curve(reference.outcome, reference.titan("dp_shard 2, tp 2"))

Of titan, the loop takes the order of the samples and nothing else. Model, loss and shift of the labels are those of
transformers; clipping and AdamW are those of PyTorch. The test is tests/dist/test_transformers.py, and
`python -m bench.transformers` writes the figures.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomlkit
import torch
from torch import Tensor, nn

from tests.huggingface import LLAMA, SCALED, loaded
from titan.config import load_job
from titan.data.open import open_samples
from titan.inference.load_model import open_job
from titan.ranks.process import Rank
from titan.testing.jobs import Outcome, train_job, write_text

BASE = Path(__file__).parent / "configs" / "base.toml"
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 257, "n_positions": 64, "initializer_range": 0.2}
GPT2 |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 257, "initializer_range": 0.2, "seq_length": 64}
GEMMA = LLAMA | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True}
GEMMA |= {"sliding_window": 5, "query_pre_attn_scalar": 8, "hidden_act": "gelu_pytorch_tanh"}
GEMMA |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
NEOX = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=257)
NEOX |= {"max_position_embeddings": 64, "initializer_range": 0.2, "rotary_pct": 0.5}
IN_TURN = {"use_parallel_residual": False, "rotary_pct": 0.25}
MIXTRAL = LLAMA | dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.1)
QWEN3_MOE = LLAMA | dict(
    head_dim=12,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    mlp_only_layers=[0],
)
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama-gqa-scaled": ("llama", {**LLAMA, "num_key_value_heads": 2, "rope_theta": 5e5, "rope_scaling": SCALED}),
    "llama-tied": ("llama", {**LLAMA, "tie_word_embeddings": True, "rope_scaling": SCALED}),
    "mistral": ("mistral", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 5}),
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 48, "activation_function": "gelu"}),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 12, "num_key_value_heads": 2, "rope_theta": 1e6}),
    "qwen3-tied": ("qwen3", {**LLAMA, "head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {**LLAMA, "num_key_value_heads": 2, "rope_theta": 5e5}),
    "bloom": ("bloom", BLOOM),
    "bloom-untied": ("bloom", {**BLOOM, "n_head": 8, "hidden_size": 48, "tie_word_embeddings": False}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2-uncapped": ("gemma2", {**GEMMA, **UNCAPPED, "head_dim": 8, "sliding_window": 9}),
    "neox": ("gpt_neox", NEOX),
    "neox-in-turn": ("gpt_neox", {**NEOX, **IN_TURN, "rotary_emb_base": 500.0, "hidden_act": "gelu_fast"}),
    "mixtral": ("mixtral", MIXTRAL),
    "qwen3-moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3-moe-normalized": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True, "num_experts_per_tok": 3}),
}
"""Name -> (model_type, config.json). A model that titan learns to read needs one line here."""

LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "dp_shard 2, tp 2": (4, ("--mesh.dp_shard", "2", "--mesh.tp", "2", "--train.micro_batch_size", "2")),
    "dp_shard 2, pp 2": (4, ("--mesh.dp_shard", "2", "--mesh.pp", "2")),
    "dp_shard 4, ep 4": (4, ("--mesh.dp_shard", "4", "--mesh.ep", "4")),
}
"""Name -> (ranks, overrides). With tp, each rank accumulates the gradients of two micro batches."""


def runs() -> list[tuple[str, str]]:
    """(case, layout) of all that is compared: ep where there are experts."""
    return [
        (case, layout)
        for case, (_, options) in CASES.items()
        for layout in LAYOUTS
        if "ep" not in layout.split() or any(key.endswith("_experts") for key in options)
    ]


STEPS, BATCH, SEQ_LEN = 8, 8, 32
LR, BETAS, WEIGHT_DECAY, CLIP = 3e-3, (0.9, 0.95), 0.5, 2.3
EPS = 1e-4  # a bias of keys has no gradient but rounding errors, which AdamW with its 1e-8 would make steps of
WARMUP, DECAY = 2, 10
"""Steps until the learning rate is LR, and from there until it would be 0."""


def random_model(case: str, folder: Path) -> Any:
    """A model of the case with random weights, which transformers has also saved in `folder`, in several files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = CASES[case]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which are born as ones and zeros
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder, max_shard_size="40KB")
    return model


class Reference:
    """What the bare loop makes of a case, and what titan makes of the same weights and samples.

    outcome: rows and final weights of the loop, the weights under titan's names.
    """

    def __init__(self, case: str, folder: Path) -> None:
        self._folder, self._config = folder, folder / "job.toml"
        model = random_model(case, folder / "model")
        write_text(folder / "text")
        self._config.write_text(tomlkit.dumps(_job(folder / "model")))
        rows = dict(enumerate(_train(model, self._batches()), 1))
        model.save_pretrained(folder / "trained")
        weights = {name: p.detach() for name, p in loaded(folder / "trained").named_parameters()}
        self.outcome = Outcome(rows, weights)

    def titan(self, layout: str) -> Outcome:
        """Train the saved model at a layout."""
        ranks, words = LAYOUTS[layout]
        return train_job(self._folder, ranks, *words, config=self._config, name=layout)

    def _batches(self) -> Iterator[Tensor]:
        """The tokens of each step, [B, S + 1] int64: a sample and the label of its last position."""
        words = ["--data.cache", str(self._folder / "cache"), "--data.path", str(self._folder / "text")]
        samples = open_samples(load_job(self._config, words, 1), Rank(0, 1, 0, torch.device("cpu")))
        for first in range(0, STEPS * BATCH, BATCH):
            read = [samples[g] for g in range(first, first + BATCH)]
            yield torch.stack([torch.cat([sample.tokens, sample.labels[-1:]]) for sample in read])


def _job(folder: Path) -> dict[str, Any]:
    """A job that goes on from the model in a folder, as the table of a TOML."""
    return {
        "base": str(BASE),
        "run": {"device": "cpu"},
        "model": open_job(folder, ["--tokenizer.name", "byte"], 1)[1].table["model"],
        "data": {"seq_len": SEQ_LEN},
        "train": {"steps": STEPS, "global_batch_size": BATCH, "grad_clip": CLIP},
        "optimizer": {"name": "adamw", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY},
        "lr_schedule": {"name": "linear", "warmup_steps": WARMUP, "decay_steps": DECAY},
        "checkpoint": {"init_from": str(folder)},
    }


def _train(model: Any, batches: Iterable[Tensor]) -> Iterator[dict[str, float]]:
    """The loop that a user of transformers would write; yields a row of metrics per step."""
    from transformers import get_linear_schedule_with_warmup

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = [p for p in model.parameters() if p.ndim > 1 and id(p) not in embeddings]
    others = [p for p in model.parameters() if p.ndim == 1 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    [factor, _] = get_linear_schedule_with_warmup(optimizer, WARMUP, WARMUP + DECAY).lr_lambdas
    model.train()
    for step, tokens in enumerate(batches, 1):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        lr = LR * factor(step)  # the schedule counts from 0, where the rate is 0
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        learned = {"tokens": step * BATCH * SEQ_LEN, "valid_tokens": step * BATCH * SEQ_LEN}
        yield {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr, **learned}
