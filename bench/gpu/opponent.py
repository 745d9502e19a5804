"""Steps of torchtitan 0.2.2, and its Trainer for other benchmarks.

The model, the tokens, AdamW, clipping and compilation by block are those of titan's job; everything else is
torchtitan's own Trainer.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bench.gpu.setting import Setting, no_garbage
from titan.data.tokens.shards import open_shard

MODEL = "titan_bench"


def steps_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Train in this process, which must not have touched the device; as `bench.gpu.speed.steps_of`.

    asked: as `trainer_of`, and device, steps, warm_up.
    """
    began = time.perf_counter()
    cpu = asked["device"] == "cpu"
    if cpu:
        accept_cpu()
    be_alone()
    trainer = trainer_of(asked)
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.step = 2  # neither the first step nor one of log_freq: nothing is logged, and nothing waits for the device
    nowhere = Path(asked["folder"])
    setting = Setting(nowhere, nowhere, nowhere / "log.txt", rehearse=cpu)
    trainer.train_step(batches)
    setting.synchronize()
    first = time.perf_counter() - began
    with no_garbage():
        for _ in range(asked["warm_up"]):
            trainer.train_step(batches)
        taken = setting.each(lambda: trainer.train_step(batches), asked["steps"])
    return {
        "first_s": first,
        "steps_s": taken,
        "allocated_gib": None if cpu else torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": None if cpu else torch.cuda.max_memory_reserved() / 2**30,
    }


def trainer_of(asked: dict[str, Any]) -> Any:
    """torchtitan's Trainer of a Llama of these sizes, on the tokens of one of titan's shards.

    asked: sizes of the model, seq_len, batch (sequences per data-parallel rank), tokens, folder, dtype, backend ("":
        not compiled), recompute, degrees of dp, tp and pp (1F1B, one sequence per micro batch), micro_batches, and
        reshard: wrap the model of one rank in `fully_shard` too, as torchtitan does for several, with this
        fsdp_reshard_after_forward; empty: do not.
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
        model_cls=Transformer,
        model_args={MODEL: model},
        pipelining_fn=pipeline_llm,
        parallelize_fn=_wrapping if asked.get("reshard") else parallelize_llama,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=lambda **_: Tokens(Path(asked["tokens"]), asked["seq_len"], asked["batch"]),
        build_tokenizer_fn=None,
        build_loss_fn=build_cross_entropy_loss,
    )
    register_train_spec(MODEL, spec)
    trainer = Trainer(_config(asked))
    if asked.get("reshard"):
        trainer.maybe_enable_amp = nullcontext()  # `fully_shard` casts
    if torch.device(trainer.device).type == "cpu":
        _sum_by_gloo(trainer.model_parts)
    return trainer


def _wrapping(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """torchtitan's `parallelize_llama`, and its `fully_shard` where that leaves it out: on one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp, parallelize_llama
    from torchtitan.tools.utils import device_type

    model = parallelize_llama(model, parallel_dims, job_config)
    dtypes = (job_config.training.mixed_precision_param, job_config.training.mixed_precision_reduce)
    apply_fsdp(
        model,
        init_device_mesh(device_type, (1,)),
        *(TORCH_DTYPE_MAP[dtype] for dtype in dtypes),
        pp_enabled=False,
        reshard_after_forward_policy=job_config.parallelism.fsdp_reshard_after_forward,
    )
    return model


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
    config.parallelism.fsdp_reshard_after_forward = asked.get("reshard") or "default"
    config.training.steps = 1_000_000
    config.metrics.log_freq = 1_000_000
    config.optimizer.lr = 3e-4
    config.compile.enable, config.compile.backend = bool(asked["backend"]), asked["backend"]
    config.activation_checkpoint.mode = asked["recompute"]
    config.activation_checkpoint.selective_ac_option = "op"
    if "micro_batches" in asked:
        config.training.global_batch_size = asked["batch"] * asked["micro_batches"]
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
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, value in absent.items():
        setattr(torch.cpu, name, value)
