"""Checkpoints: written under a temporary name, renamed when complete, loaded at any layout.

A checkpoint is a folder `step-NNNNNNNN` with DCP's files, which hold tensors only, state.json, which holds the rest as
plain data, and manifest.json, which detects damage. Loading an untrusted checkpoint never executes code from it.
"""

from titan.checkpoint.checkpointer import Checkpointer
from titan.checkpoint.state import rng_state, set_rng_state

__all__ = ["Checkpointer", "rng_state", "set_rng_state"]
