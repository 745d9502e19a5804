"""The jobs whose steps are timed and planned, and how a step's FLOPs are counted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu import jobs
from bench.gpu.setting import Setting
from titan.contracts import ModelSpec
from titan.training.metrics import peak_tflops

MICRO_BATCHES = 4


@dataclass(frozen=True)
class Shape:
    """A job: a preset with a head of its own, at a sequence length.

    sequences: of a step over all ranks; a micro batch is one.  keys: what else its TOML says.
    ranks: of which the first is measured, and the others are faked.
    """

    preset: str
    seq_len: int
    sequences: int = 1
    keys: Mapping[str, object] = field(default_factory=dict)
    ranks: int = 1

    def plan_keys(self) -> dict[str, object]:
        """Its keys, but for the tokens: what a plan needs."""
        return {
            "model.preset": self.preset,
            "model.tied": False,
            "data.seq_len": self.seq_len,
            "train.global_batch_size": self.sequences,
            "train.micro_batch_size": 1,
            **self.keys,
        }


ONE_B, THREE_B, EIGHT_B = "llama3-1b", "llama3-3b", "llama3-8b"
EIGHT_LAYERS = {"model.n_layers": 8}
"""Of 8 B: its layers and head, as many as one GPU can hold with their state."""

SELECTIVE = {"plugins.activation_checkpoint.mode": "selective"}
DOCUMENTS = {"data.packing": "document_mask"}
EXPERTS = {"model.name": "moe", "model.n_layers": 4, "model.vocab_size": 128_256, "model.max_seq_len": 8192}

JOBS: dict[str, Shape] = {
    "1B": Shape(ONE_B, 8192),
    "1B, 4 micro batches": Shape(ONE_B, 8192, MICRO_BATCHES),
    "1B at 2,048 tokens": Shape(ONE_B, 2048),
    "1B, not compiled": Shape(ONE_B, 8192, keys={"plugins.compile.enabled": False}),
    "1B, selective recomputation": Shape(ONE_B, 8192, keys=SELECTIVE),
    "1B, full recomputation": Shape(ONE_B, 8192, keys={"plugins.activation_checkpoint.mode": "full"}),
    "1B, float8 tensorwise": Shape(ONE_B, 8192, keys={"plugins.float8.recipe": "tensorwise"}),
    "1B, float8 rowwise": Shape(ONE_B, 8192, keys={"plugins.float8.recipe": "rowwise"}),
    "1B, documents, a mask": Shape(ONE_B, 8192, keys=DOCUMENTS),
    "1B, documents, varlen": Shape(ONE_B, 8192, keys={**DOCUMENTS, "plugins.attention.enabled": True}),
    "3B, selective recomputation": Shape(THREE_B, 4096, keys=SELECTIVE),
    "3B, selective, 4 micro batches": Shape(THREE_B, 4096, MICRO_BATCHES, SELECTIVE),
    "8B's shape": Shape(EIGHT_B, 8192, keys=EIGHT_LAYERS),
    "8B's shape, 4 micro batches": Shape(EIGHT_B, 8192, MICRO_BATCHES, EIGHT_LAYERS),
    "8B's shape, float8 tensorwise": Shape(EIGHT_B, 8192, keys={**EIGHT_LAYERS, "plugins.float8.recipe": "tensorwise"}),
    "8B's shape, float8 rowwise": Shape(EIGHT_B, 8192, keys={**EIGHT_LAYERS, "plugins.float8.recipe": "rowwise"}),
    "experts": Shape("qwen3-30b-a3b", 4096, keys=EXPERTS),
    "1B, optimizer on the host": Shape(ONE_B, 8192, keys={"plugins.offload.optimizer": True}),
    "1B, activations on the host": Shape(
        ONE_B, 8192, keys={"plugins.offload.optimizer": False, "plugins.offload.activations": True}
    ),
    "1B, 8-bit state": Shape(ONE_B, 8192, keys={"optimizer.name": "adamw_8bit"}),
    "1B, updates in backward": Shape(
        ONE_B, 8192, keys={"plugins.update_in_backward.enabled": True, "train.grad_clip": 0}
    ),
    "1B, pure bf16": Shape(ONE_B, 8192, keys={"plugins.bf16.pure": True}),
    "8B, dp_shard 8, 7 ranks faked": Shape(EIGHT_B, 8192, 8, {"mesh.dp_shard": 8}, ranks=8),
    "8B, dp_shard 4, tp 2, 7 ranks faked": Shape(EIGHT_B, 8192, 4, {"mesh.dp_shard": 4, "mesh.tp": 2}, ranks=8),
}
"""By name. Each is planned (`bench.gpu.predictions`) and measured (`bench.gpu.speed`, `bench.gpu.turns`)."""

REHEARSED = {"model.max_seq_len": 64, "data.seq_len": 64, "plugins.compile.backend": "aot_eager"}


def keys_of(setting: Setting, shape: Shape) -> dict[str, object]:
    """The keys of its job; in a rehearsal those of a tiny one."""
    full = shape.plan_keys()
    if setting.rehearse:
        full = {key: value for key, value in full.items() if key not in ("model.n_layers", "model.vocab_size")}
        full |= REHEARSED | {"model.preset": "moe-tiny" if full.get("model.name") == "moe" else "tiny"}
        full |= {"plugins.float8.emulate": "always"} if "plugins.float8.recipe" in full else {}
    return {**full, "data.path": tokens(setting)}


def tokens(setting: Setting) -> Path:
    """The shard of every job of speed."""
    words = setting.size(128_256, jobs.BYTE)
    return jobs.tokens(setting.folder, words, setting.size(1 << 21, 1 << 14))


def flops_per_step(spec: ModelSpec, seq_len: int, samples: float = 1) -> dict[str, float]:
    """FLOPs of forward and backward, by how attention is counted.

    "full": the whole square, as `metrics.jsonl` and torchtitan count.  "causal": the half that is needed.
    """
    full = spec.flops_per_token(seq_len) * seq_len * samples
    square = 3 * spec.n_layers * 4 * seq_len * spec.n_heads * spec.head_dim * seq_len * samples
    return {"full": full, "causal": full - square / 2}


def mfu(setting: Setting, flops: float, seconds: float) -> float | None:
    """Share of the device's dense bf16 peak; None where the peak is unknown."""
    peak = peak_tflops(setting.device)
    return flops / seconds / 1e12 / peak if peak else None
