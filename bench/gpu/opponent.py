"""One run of torchtitan 0.2.2 for `bench.gpu.turns`, in a process of its own; and its Trainer, for other benchmarks.

    python -m bench.gpu.opponent '{"dim": 2048, ...}'

Prints one JSON object: seconds of the first step, of each step, and of steps in a row. The model, the tokens, AdamW,
clipping and compilation by block are those of titan's job; everything else is torchtitan's own Trainer.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan.data.tokens.shards import open_shard

MODEL = "titan_bench"


def main() -> None:
    """Train, print."""
    asked = json.loads(sys.argv[1])
    if asked["device"] == "cpu":
        accept_cpu()
    be_alone()
    trainer = trainer_of(asked)
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.step = 2  # neither the first step nor one of log_freq: nothing is logged, and nothing waits for the device

    def step() -> None:
        trainer.train_step(batches)

    def timed(count: int) -> float:
        wait()
        began = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - began) / count

    wait = torch.cuda.synchronize if asked["device"] == "cuda" else lambda: None
    first = timed(1)
    for _ in range(asked["warm_up"]):
        step()
    each = [timed(1) for _ in range(asked["steps"])]
    found = {"first_s": first, "step_s": statistics.median(each), "in_a_row_s": timed(asked["steps"])}
    if asked["device"] == "cuda":
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    print(json.dumps(found), flush=True)
    os._exit(0)


def trainer_of(asked: dict[str, Any]) -> Any:
    """torchtitan's Trainer of a Llama of these sizes, on the tokens of one of titan's shards.

    asked: sizes of the model, seq_len, batch (sequences per data-parallel rank), tokens, folder, dtype, backend ("":
        not compiled), recompute, and degrees of dp, tp and pp (1F1B, one sequence per micro batch).
    """
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
    from torchtitan.train import Trainer

    widened = int(2 * 4 * asked["dim"] / 3)  # torchtitan rounds ffn_dim_multiplier * this up to a multiple_of
    sizes = {key: asked[key] for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")}
    model = TransformerModelArgs(
        **sizes, multiple_of=asked["ffn_dim"], ffn_dim_multiplier=asked["ffn_dim"] / widened, rope_theta=500000
    )
    spec = TrainSpec(
        model_cls=Transformer, model_args={MODEL: model}, parallelize_fn=parallelize_llama, pipelining_fn=pipeline_llm,
        build_optimizers_fn=build_optimizers, build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=lambda **_: Tokens(Path(asked["tokens"]), asked["seq_len"], asked["batch"]),
        build_tokenizer_fn=None, build_loss_fn=build_cross_entropy_loss,
    )  # fmt: skip
    register_train_spec(MODEL, spec)
    trainer = Trainer(_config(asked))
    if torch.device(trainer.device).type == "cpu":
        _sum_by_gloo(trainer.model_parts)
    return trainer


def _sum_by_gloo(parts: Iterable[nn.Module]) -> None:
    """Let FSDP2 sum without a factor in the reduction: gloo has none."""
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _config(asked: dict[str, Any]) -> Any:
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.model.name, config.model.flavor = MODEL, MODEL
    config.job.dump_folder = asked["folder"]
    config.training.local_batch_size, config.training.seq_len = asked["batch"], asked["seq_len"]
    config.training.mixed_precision_param = asked["dtype"]
    config.parallelism.data_parallel_shard_degree = asked.get("dp", 1)
    config.parallelism.tensor_parallel_degree = asked.get("tp", 1)
    config.parallelism.pipeline_parallel_degree = asked.get("pp", 1)
    config.training.steps = 1_000_000
    config.metrics.log_freq = 1_000_000
    config.optimizer.lr = 3e-4
    config.compile.enable, config.compile.backend = bool(asked["backend"]), asked["backend"]
    config.activation_checkpoint.mode = asked["recompute"]
    return config


class Tokens:
    """The tokens of titan's shard, a batch of sequences after the other, over and over."""

    def __init__(self, path: Path, seq_len: int, batch: int) -> None:
        self._tokens, self._seq_len, self._batch = open_shard(path).map()[0], seq_len, batch

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        at, length = 0, self._seq_len * self._batch
        while True:
            at = at if at + length < len(self._tokens) else 0
            chunk = torch.from_numpy(self._tokens[at : at + length + 1].astype("int64"))
            at += length
            tokens, labels = (part.reshape(self._batch, -1) for part in (chunk[:-1].clone(), chunk[1:].clone()))
            yield {"input": tokens}, labels


def be_alone() -> None:
    """Say that this process is the only rank, as torchrun would."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in alone.items()})


def accept_cpu() -> None:
    """Let torchtitan, which asks for an accelerator when it is imported, take a CPU."""
    import torch._utils

    torch.set_num_threads(1)
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda _: torch.cpu
    absent = {
        "get_device_name": lambda *_: "cpu", "get_device_properties": lambda *_: SimpleNamespace(total_memory=1),
        "memory_stats": lambda *_: {}, "reset_peak_memory_stats": lambda: None, "empty_cache": lambda: None,
    }  # fmt: skip
    for name, value in absent.items():
        setattr(torch.cpu, name, value)


if __name__ == "__main__":
    main()
