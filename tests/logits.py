"""Models called by hand: on whole sequences, whose positions count from 0."""

from torch import Tensor, nn

from titan.contracts import Batch


def places(tokens: Tensor) -> Tensor:
    """Positions [B, S] of whole sequences of tokens [B, S], or of hidden states [B, S, D]."""
    flat = tokens[..., 0] if tokens.ndim == 3 else tokens
    return Batch(flat, flat).positions


def logits_of(model: nn.Module, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """What a model makes of whole sequences: tokens [B, S], or hidden states [B, S, D] of an earlier stage."""
    found: Tensor = model(tokens, places(tokens), documents)
    return found
