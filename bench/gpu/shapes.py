"""The models whose steps are timed, and how a step's FLOPs are counted."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.gpu import jobs
from bench.gpu.setting import Setting
from titan.contracts import ModelSpec
from titan.training.metrics import peak_tflops


@dataclass(frozen=True)
class Shape:
    """A model of a preset with a head of its own, at a sequence length; one sequence is a step."""

    name: str
    preset: str
    seq_len: int
    keys: Mapping[str, object] = field(default_factory=dict)


B1 = Shape("1B", "llama3-1b", 8192)
B3 = Shape("3B", "llama3-3b", 4096, {"plugins.activation_checkpoint.mode": "full"})
"""With full recomputation: its state alone takes 54 GiB, and both trainers mean the same by it."""
REHEARSED = {
    "model.preset": "tiny",
    "model.max_seq_len": 64,
    "data.seq_len": 64,
    "plugins.compile.backend": "aot_eager",
}


def keys_of(setting: Setting, shape: Shape) -> dict[str, object]:
    """The keys of its job; in a rehearsal those of a tiny one."""
    full = {"model.preset": shape.preset, "model.tied": False, "data.seq_len": shape.seq_len, **shape.keys}
    if setting.rehearse:
        full = {**full, **REHEARSED}
    words = setting.size(128_256, jobs.BYTE)
    return {**full, "data.path": jobs.tokens(setting.folder, words, setting.size(1 << 21, 1 << 14))}


def flops_per_step(spec: ModelSpec, seq_len: int, samples: int = 1) -> dict[str, float]:
    """FLOPs of forward and backward, by how attention is counted.

    "full": the whole square, as `metrics.jsonl` and torchtitan count.  "causal": the half that is needed.
    """
    full = spec.flops_per_token(seq_len) * seq_len * samples
    square = 3 * spec.n_layers * 4 * seq_len * spec.n_heads * spec.head_dim * seq_len * samples
    return {"full": full, "causal": full - square / 2}


def mfu(setting: Setting, flops: float, seconds: float) -> float | None:
    """Share of the device's dense bf16 peak; None where the peak is unknown."""
    peak = peak_tflops(setting.device, 0.0)
    return flops / seconds / 1e12 / peak if peak else None
