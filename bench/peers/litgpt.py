"""LitGPT's pretraining, for `bench.peers`: its model and its `fit`. Needs litgpt."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.model import GPT, Config
from litgpt.pretrain import fit, initialize_weights
from torch import Tensor

from bench.peers.cases import batches
from bench.peers.turns import Waiting, share_cores


def main() -> None:
    """Train until stdin ends."""
    asked = json.loads(sys.argv[1])
    share_cores(asked["ranks"])
    config = Config(
        n_embd=asked["dim"],
        n_layer=asked["n_layers"],
        n_head=asked["n_heads"],
        n_query_groups=asked["n_kv_heads"],
        intermediate_size=asked["ffn_dim"],
        padded_vocab_size=asked["vocab_size"],
        block_size=asked["seq_len"],
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        parallel_residual=False,
        rotary_percentage=1.0,
    )
    precision = "bf16-mixed" if asked["dtype"] == "bfloat16" else "32-true"
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    model = GPT(config)
    initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
    prepared = fabric.setup(torch.compile(model) if asked["backend"] else model)
    adamw = torch.optim.AdamW(prepared.parameters(), lr=asked["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    state = {"model": prepared, "optimizer": fabric.setup_optimizers(adamw), "iter_num": 0, "step_count": 0}
    tokens_per_step, samples = asked["batch"] * asked["seq_len"], _samples(asked)
    tried = [next(samples), next(samples)]  # on which `fit` validates before it trains
    fit(
        fabric,
        1,
        state,
        Waiting(samples),
        tried,
        Path(asked["folder"]),
        None,
        TrainArgs(
            global_batch_size=asked["batch"],
            micro_batch_size=asked["batch"],
            max_norm=1.0,
            lr_warmup_steps=0,
            max_tokens=1_000_000 * tokens_per_step,
            log_interval=1_000_000,
            save_interval=None,
        ),
        EvalArgs(interval=1_000_000, final_validation=False, initial_validation=False),
    )


def _samples(asked: dict[str, int]) -> Iterator[Tensor]:
    """[B, S + 1]: fit takes inputs and targets out of it."""
    for tokens, labels in batches(asked):
        yield torch.cat([tokens, labels[:, -1:]], 1)


if __name__ == "__main__":
    main()
