"""What all trainers of `bench.peers` train: one Llama, the same tokens, AdamW, and clipping at 1."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.gpu import jobs
from bench.gpu.opponent import Tokens
from titan.layers.products import LACKS_BF16

SIZES: Mapping[str, int] = {
    "dim": 256,
    "n_layers": 8,
    "n_heads": 8,
    "n_kv_heads": 8,
    "ffn_dim": 768,
    "vocab_size": 2048,
}
SEQ_LEN, SEQUENCES = 512, 4
"""Tokens per sequence, and sequences per step over all ranks; 1 in bf16 where the CPU lacks it and others take long."""

TOKENS = 1 << 19
LR = 3e-4


@dataclass(frozen=True)
class Case:
    """A precision or a layout.

    ranks: of each trainer; each rank of one has all cores, each of several has one.
    degrees: of dp, tp and pp above 1.
    """

    name: str
    ranks: int = 1
    bf16: bool = False
    compiled: bool = False
    degrees: Mapping[str, int] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """Per step, over all ranks."""
        return 1 if self.bf16 and self.ranks == 1 and LACKS_BF16 else SEQUENCES

    def asked(self, folder: Path) -> dict[str, Any]:
        """The same for the process of a trainer, as JSON takes it; makes the tokens."""
        return {
            **SIZES,
            **self.degrees,
            "seq_len": SEQ_LEN,
            "sequences": self.sequences,
            "ranks": self.ranks,
            "batch": self.sequences // self.degrees.get("dp", 1),
            "dtype": "bfloat16" if self.bf16 else "float32",
            "backend": "inductor" if self.compiled else "",
            "recompute": "none",
            "lr": LR,
            "folder": str(folder),
            "tokens": str(jobs.tokens(folder, SIZES["vocab_size"], TOKENS)),
        }


CASES = (
    Case("fp32"),
    Case("bf16, compiled", bf16=True, compiled=True),
    Case("fsdp 2", ranks=2, degrees={"dp": 2}),
    Case("tp 2", ranks=2, degrees={"tp": 2}),
    Case("pp 2", ranks=2, degrees={"pp": 2}),
)


def batches(asked: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels [B, S] without end, for trainers that have no loader of their own."""
    for inputs, labels in Tokens(Path(asked["tokens"]), asked["seq_len"], asked["batch"]):
        yield inputs["input"], labels
