"""Hugging Face's Trainer, for `bench.peers`. Needs transformers and accelerate."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from bench.peers.cases import batches
from bench.peers.turns import Waiting, share_cores


class _Peer(Trainer):
    """The Trainer on batches that wait."""

    asked: dict[str, Any]

    def get_train_dataloader(self) -> Any:
        """Hidden from accelerate, which would fetch a batch ahead."""
        return Waiting(self._examples())

    def _examples(self) -> Iterator[dict[str, Tensor]]:
        for tokens, _ in batches(self.asked):
            yield {"input_ids": tokens, "labels": tokens}  # the model shifts them


def main() -> None:
    """Train until stdin ends."""
    asked = json.loads(sys.argv[1])
    share_cores(asked["ranks"])
    config = LlamaConfig(
        hidden_size=asked["dim"],
        num_hidden_layers=asked["n_layers"],
        num_attention_heads=asked["n_heads"],
        num_key_value_heads=asked["n_kv_heads"],
        intermediate_size=asked["ffn_dim"],
        vocab_size=asked["vocab_size"],
        max_position_embeddings=asked["seq_len"],
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    arguments = TrainingArguments(
        output_dir=asked["folder"],
        use_cpu=True,
        max_steps=1_000_000,
        per_device_train_batch_size=asked["batch"],
        learning_rate=asked["lr"],
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=asked["dtype"] == "bfloat16",
        torch_compile=bool(asked["backend"]),
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = _Peer(LlamaForCausalLM(config), arguments)
    trainer.asked = asked
    trainer.train()


if __name__ == "__main__":
    main()
