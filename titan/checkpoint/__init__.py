"""Checkpoints: written under a temporary name, renamed when complete, loaded at any layout.

A checkpoint is a folder `step-NNNNNNNN`:

    rank-NNNNN.safetensors               weights, the optimizer's state and generators' states that a rank wrote
    techniques/rank-NNNNN.safetensors    tensors of techniques' state
    state.json                           everything else: step, place in the data, config, numbers, ancestors
    titan.index                          which tensors there are, and who wrote which chunk of them
    tokenizer/                           copies of the tokenizer's files
    manifest.json                        size and SHA-256 of each of these, to detect damage

Readers of PyTorch and safetensors open the data files; nothing in a checkpoint is ever executed.
"""

from titan.checkpoint.checkpointer import Checkpointer
from titan.checkpoint.state import rng_state, set_rng_state

__all__ = ["Checkpointer", "rng_state", "set_rng_state"]
