"""Checkpoints: saved aside and renamed when complete, loaded on any layout.

A checkpoint is a folder `step-NNNNNNNN` with DCP's files, which hold tensors only, and state.json, which
holds the rest.
"""

from titan.checkpoint.checkpointer import Checkpointer
from titan.checkpoint.state import Own, rng_state, set_rng_state

__all__ = ["Checkpointer", "Own", "rng_state", "set_rng_state"]
