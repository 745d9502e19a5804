"""Weights alone, without the state of a run: of a checkpoint, or of a Hugging Face folder."""
