"""Causal attention, the one module of a model in which positions see each other.

Each layer of a model has an `AttentionCore`, and the spec names it (`ModelSpec.attention`). A technique may give a core
another operation, as may a key-value cache. All operations take and return plain tensors, so that recomputation,
compilation and pipelines need to know nothing of them.
"""

# B rows, S tokens of this forward, T tokens of the whole sequence, H query heads, K key-value heads, N head_dim.

import math
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from titan.contracts.base.cost import Attention, SavedTensor
from titan.errors import PluginError

AttentionOperation = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q, k, v, positions, documents) -> output, as `AttentionCore.forward` takes and returns them."""


def document_mask(documents: Tensor) -> Tensor:
    """Which position attends to which: itself and earlier ones of its document. [B, S] -> [B, 1, S, S] bool."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril_()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of q [B, H, S, N] to k and v [B, K, S, N], H a multiple of K; returns [B, H, S, N] in q's dtype.

    mask: [B or 1, 1, S, S], what is added to the scores, in q's dtype: 0 where a position attends to another, else
        -inf; or bool, True where it attends, of which PyTorch makes and saves the former in every call. None: causal.
    """
    group = q.shape[1] // k.shape[1]
    if mask is not None and group > 1:
        # The fused CUDA kernel that takes a mask knows no groups; without it the S x S scores are written out.
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    grouped = group > 1 and mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def attend_unfused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same as `attend`, as separate operations: scores [B, H, S, S] pass through memory in q's dtype.

    Backward needs the softmax of the scores: B H S^2 numbers, which recompute modes "attention" and "selective" do not
    keep. Its softmax holds two tensors of that size besides: the gradients of the probabilities and of the scores. The
    scores are not masked in place: they are a view, for which autograd would copy the whole gradient twice more.

    mask: [B or 1, 1, S, S] bool, True where a position attends to another; None: causal attention.
    """
    b, heads, s, n = q.shape
    group = heads // k.shape[1]
    if mask is None:
        mask = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    # The heads of a group look at the same keys: side by side as if they were tokens, they need no copies of them.
    side_by_side = (q / math.sqrt(n)).reshape(b, heads // group, group * s, n)
    scores = (side_by_side @ k.transpose(-2, -1)).view(b, heads, s, s).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1).view(b, heads // group, group * s, s) @ v).view(b, heads, s, n)


class AttentionCore(nn.Module):
    """Causal attention of q to k and v, without the linear layers around it.

    window: how many positions each attends to, itself included; 0: all that came before.
    writes_scores: whether the S x S scores are saved for backward, so that recomputing the core saves memory. A model
        whose own attention does so derives its core from this class, and states `scores_written` in its costs.

    A class of a model's own may derive from this one and compute another `attend`; techniques then only wrap it.
    """

    def __init__(self, *, window: int = 0, writes_scores: bool = False) -> None:
        super().__init__()
        self.window, self.writes_scores = window, writes_scores
        self.operation: AttentionOperation | None = None
        self._used_by = ""

    def use(self, operation: AttentionOperation, by: str, *, windows: bool = False, wraps: bool = False) -> None:
        """Compute the output by another operation; for techniques, in phase "convert".

        A pipeline copies modules: an operation that holds a module, a technique or a process group is copied with it.

        Args:
            operation: in place of `attend`.
            by: name of the technique.
            windows: the operation follows `window`.
            wraps: the operation calls the one before, `operation` or `attend`, and so follows all that it does.

        Raises:
            PluginError: another technique has replaced the operation, or this one would leave out what the model's
                attention does.
        """
        if self._used_by and not wraps:
            raise PluginError(
                f"techniques {self._used_by} and {by} both replace attention, and {by}, the later one, does not call "
                "the other's operation; disable one of them"
            )
        if self.computes_its_own and not wraps:
            raise PluginError(
                f"technique {by} replaces attention, but {type(self).__name__} computes attention of its own"
            )
        if self.window and not (windows or wraps):
            raise PluginError(
                f"technique {by} replaces attention, but does not follow its window of {self.window} positions"
            )
        self.operation, self._used_by = operation, by

    @property
    def computes_its_own(self) -> bool:
        """Whether a class of a model's own computes `attend`."""
        return type(self).attend is not AttentionCore.attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attention of this rank's positions to those of their documents up to their own.

        q: [B, H, S, N].  k, v: [B, K, S, N], H a multiple of K.
        positions: [B, S] int64, places in the whole sequence.
        documents: [B, T] int64, the document of each place of the whole sequence; None: all of one.

        Returns [B, H, S, N] in q's dtype.
        """
        # `or` would be a branch that PyTorch 2.11 cannot compile.
        operation = self.attend if self.operation is None else self.operation
        return operation(q, k, v, positions, documents)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        """The same where k and v are of all positions of the sequence, in order."""
        masked = documents is not None or 0 < self.window < q.shape[2]
        dtype = torch.bool if self.writes_scores else q.dtype
        mask = _mask(positions, documents, self.window, q.shape[2], dtype) if masked else None
        return (attend_unfused if self.writes_scores else attend)(q, k, v, mask)


def _mask(positions: Tensor, documents: Tensor | None, window: int, length: int, dtype: torch.dtype) -> Tensor:
    if torch.compiler.is_compiling():
        return _new_mask(documents, window, length, dtype, positions.device)
    mask: Tensor = _shared_mask(positions, documents, window, length, dtype)
    return mask


_masks: dict[int, tuple[weakref.ref[Tensor] | None, Tensor]] = {}
"""The last mask of each window, and the documents that it is of; it goes when they do."""


def forget_masks() -> None:
    """Free the masks of windows that are held from step to step, as before the first step."""
    _masks.clear()


def _forget(dead: weakref.ref[Tensor]) -> None:
    for window in [window for window, (of, _) in _masks.items() if of is dead]:
        del _masks[window]


@library.custom_op("titan::attention_mask", mutates_args=())
def _shared_mask(positions: Tensor, documents: Tensor | None, window: int, length: int, dtype: torch.dtype) -> Tensor:
    """The mask of a window and documents; layers that are given the same documents share it, recomputed or not.

    The same tensor for all layers, so that autograd keeps it once. One operation, whether the mask is there or not:
    selective recomputation requires the same operations again, while a pipeline may have made the mask of another micro
    batch in between.
    """
    device = positions.device
    of, mask = _masks.get(window, (None, torch.empty(0)))
    same = of is None if documents is None else of is not None and of() is documents
    if not same or (mask.shape[-1], mask.dtype, mask.device) != (length, dtype, device):
        del mask
        _masks.pop(window, None)  # before its successor is made: two at a time may not fit
        mask = _new_mask(documents, window, length, dtype, device)
        _masks[window] = None if documents is None else weakref.ref(documents, _forget), mask
    return mask


def _new_mask(documents: Tensor | None, window: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `attend` takes it. In place, as each copy is of S x S: one bool tensor besides the mask at most."""
    if documents is None:
        seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril_()
    else:
        seen = document_mask(documents)
    if window:
        seen.triu_(1 - window)
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(seen.logical_not_(), -math.inf)


def attention_cost(
    heads: int, kv_heads: int, head_dim: int, *, window: int = 0, scores_written: bool = False
) -> Attention:
    """The cost of causal attention that saves q, k, v and its output, and what its backward needs besides.

    With a flash kernel these are float32 statistics, one per token and head. Attention that writes its scores saves the
    softmax of the scores in the compute dtype instead: S numbers per token and head. Backward holds two copies more.

    Args:
        heads, kv_heads: query heads and key-value heads, before any split.
        head_dim: features per head.
        window: as in `AttentionCore`.
        scores_written: as in `titan.contracts.base.cost.Attention`; whether the model uses `attend_unfused`.
    """
    inputs_and_output = SavedTensor(numel=2 * (heads + kv_heads) * head_dim, region="tp_sharded")
    statistics = SavedTensor(numel=heads, region="tp_sharded", itemsize=4)
    scores = SavedTensor(numel=heads, region="tp_sharded", scores=True)
    saved = (inputs_and_output, scores if scores_written else statistics)
    scratch = (replace(scores, numel=2 * heads),) if scores_written else ()
    return Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window, scores_written=scores_written,
        scratch=scratch, saved=saved,
    )  # fmt: skip
