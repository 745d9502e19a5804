"""Causal attention, the one module of a model in which positions see each other.

Each layer of a model has an `AttentionCore`, and the spec names it (`ModelSpec.attention`). A technique or a key-value
cache may give a core another operation. All operations take and return plain tensors.
"""

# B rows, S tokens of this forward, T tokens of the whole sequence, H query heads, K key-value heads, N head_dim.

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from titan.contracts.base.cost import Attention, SavedTensor
from titan.contracts.plugin.options import did_you_mean
from titan.errors import PluginError
from titan.layers.products import attention, takes

AttentionOperation = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q, k, v, positions, documents) -> output, as `AttentionCore.forward` takes and returns them."""

Fact = Literal["window", "scale", "soft_cap", "slopes"]
"""What an `AttentionCore` may have besides plain causal attention; an operation in its place follows it, or may not."""


def document_mask(documents: Tensor) -> Tensor:
    """Which position attends to which: itself and earlier ones of its document. [B, S] -> [B, 1, S, S] bool."""
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril_()


def alibi(slopes: Sequence[float], distance: Tensor) -> Tensor:
    """What ALiBi adds to scores (arXiv 2108.12409): -slope * distance for each of H heads, float32 [..., H, Q, K].

    distance: [..., Q, K], query positions less key positions.
    """
    heads = torch.tensor(slopes, device=distance.device)
    return distance.float().unsqueeze(-3) * -heads[:, None, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float | None = None) -> Tensor:
    """Attention of q [B, H, S, N] to k and v [B, K, S, N], H a multiple of K; returns [B, H, S, N] in q's dtype.

    mask: [B or 1, H or 1, S, S], what is added to the scores, in q's dtype: 0 or a bias where a position attends to
        another, else -inf; or bool, True where it attends, of which PyTorch makes and saves the former in every call.
        None: causal.
    scale: factor of the products of queries and keys; None: 1 / sqrt(N).
    """
    group = q.shape[1] // k.shape[1]
    if mask is not None and group > 1:
        # The fused CUDA kernel that takes a mask knows no groups; without it the S x S scores are written out.
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    if takes(q, k, v, mask):
        return attention(q, k, v, mask, scale)
    grouped = group > 1 and mask is None
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def attend_unfused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float | None = None, soft_cap: float = 0.0
) -> Tensor:
    """The same as `attend`, as separate operations: scores [B, H, S, S] pass through memory in q's dtype.

    Backward needs the softmax of the scores: B H S^2 numbers, which recompute modes "attention" and "selective" do not
    keep; with a soft cap the tanh too. It holds two more such tensors, the gradients of probabilities and of scores.

    mask, scale: as in `attend`. With a mask k and v may have another number of positions than q.
    soft_cap: c: scaled scores s become c tanh(s / c) before they are masked (Gemma 2, arXiv 2408.00118); 0: they stay.
    """
    b, heads, s, n = q.shape
    group = heads // k.shape[1]
    if mask is None:
        mask = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    factor = (1 / math.sqrt(n) if scale is None else scale) / (soft_cap or 1.0)
    # The heads of a group look at the same keys: side by side as if they were tokens, they need no copies of them.
    side_by_side = (q * factor).reshape(b, heads // group, group * s, n)
    scores = (side_by_side @ k.transpose(-2, -1)).view(b, heads, s, -1)
    if soft_cap:
        scores = scores.tanh() * soft_cap
    # Not in place: of a view, autograd would copy the whole gradient twice more.
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1).view(b, heads // group, group * s, -1) @ v).view(b, heads, s, n)


class AttentionCore(nn.Module):
    """Causal attention of q to k and v, without the linear layers around it.

    window: how many positions each attends to, itself included; 0: all that came before.
    scale: factor of the products of queries and keys; None: 1 / sqrt(N).
    soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap); 0: they stay. No fused kernel does this, so the core
        writes its scores.
    slopes: of ALiBi, one for each query head of the model: -slope * (query position - key position) is added to a score
        (arXiv 2108.12409); empty: nothing is added.
    first_head: which of the model's query heads is the first of q. A technique that splits heads adds to it.
    writes_scores: whether the S x S scores are saved for backward, so that recomputing the core saves memory.

    A class of a model's own may derive from this one and compute another `attend`; techniques then only wrap it. If it
    writes its scores, the model states `scores_written` in its costs.
    """

    def __init__(
        self,
        *,
        window: int = 0,
        scale: float | None = None,
        soft_cap: float = 0.0,
        slopes: Sequence[float] = (),
        writes_scores: bool = False,
    ) -> None:
        super().__init__()
        self.window, self.scale, self.soft_cap, self.slopes = window, scale, soft_cap, tuple(slopes)
        self.writes_scores = writes_scores or soft_cap > 0
        self.first_head = 0
        self.operation: AttentionOperation | None = None
        self._used_by = ""

    def own_slopes(self, heads: int) -> tuple[float, ...]:
        """Slopes of the `heads` query heads that q has; empty where the model has none. For operations, when called."""
        own = self.slopes[self.first_head : self.first_head + heads]
        assert len(own) in (0, heads) and bool(own) == bool(self.slopes), "heads beyond those of the model"
        return own

    def use(self, operation: AttentionOperation, by: str, *, follows: Sequence[Fact] = (), wraps: bool = False) -> None:
        """Compute the output by another operation; for techniques, in phase "convert".

        A pipeline copies modules: an operation that holds a module, a technique or a process group is copied with it.

        by: name of the technique.  follows: what the operation does if the core has it, by its attributes when called.
        wraps: the operation calls the one before, `operation` or `attend`, and so follows all that it does.
        PluginError: another technique has replaced the operation, or this one would leave out what the model's
            attention does, or `follows` has an unknown name.
        """
        if self._used_by and not wraps:
            raise PluginError(
                f"techniques {self._used_by} and {by} both replace attention, and {by}, the later one, does not call "
                "the other's operation; disable one of them"
            )
        if self.computes_its_own and not wraps:
            own = f"{type(self).__name__} computes attention of its own"
            raise PluginError(f"technique {by} replaces attention, but {own}")
        for fact in follows:
            if fact not in get_args(Fact):
                raise PluginError(f"technique {by} follows {fact!r} of attention{did_you_mean(fact, get_args(Fact))}")
        facts: dict[Fact, tuple[bool, str]] = {
            "window": (self.window > 0, f"window of {self.window} positions"),
            "scale": (self.scale is not None, f"scale of {self.scale}"),
            "soft_cap": (self.soft_cap > 0, f"soft cap of {self.soft_cap}"),
            "slopes": (bool(self.slopes), f"ALiBi slopes of {len(self.slopes)} heads"),
        }
        left_out = " and its ".join(text for fact, (has, text) in facts.items() if has and fact not in follows)
        if left_out and not wraps:
            raise PluginError(f"technique {by} replaces attention, but does not follow its {left_out}")
        self.operation, self._used_by = operation, by

    @property
    def computes_its_own(self) -> bool:
        """Whether a class of a model's own computes `attend`."""
        return type(self).attend is not AttentionCore.attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attention of this rank's positions to those of their documents up to their own: [B, H, S, N] in q's dtype.

        q: [B, H, S, N].  k, v: [B, K, S, N], H a multiple of K.
        positions: [B, S] int64, places in the whole sequence.
        documents: [B, T] int64, the document of each place of the whole sequence; None: all of one.
        """
        # Only for PyTorch 2.11: `or` would be a branch that it cannot compile.
        operation = self.attend if self.operation is None else self.operation
        return operation(q, k, v, positions, documents)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        """The same where k and v are of all positions of the sequence, in order."""
        slopes = self.own_slopes(q.shape[1])
        mask: Tensor | None = None
        if documents is not None or slopes or 0 < self.window < q.shape[2]:
            dtype = torch.bool if self.writes_scores and not slopes else q.dtype
            make = _new_mask if torch.compiler.is_compiling() else shared_mask
            mask = make(positions, documents, self.window, slopes, q.shape[2], dtype)
        if self.writes_scores:
            return attend_unfused(q, k, v, mask, scale=self.scale, soft_cap=self.soft_cap)
        return attend(q, k, v, mask, scale=self.scale)


_masks: dict[tuple[int, tuple[float, ...]], tuple[weakref.ref[Tensor] | None, Tensor]] = {}
"""The last mask of each window and slopes, and the documents that it is of; it goes when they do."""


def forget_masks() -> None:
    """Free the masks that are held from step to step, of windows and slopes, as before the first step."""
    _masks.clear()


def _forget(dead: weakref.ref[Tensor]) -> None:
    for kind in [kind for kind, (of, _) in _masks.items() if of is dead]:
        del _masks[kind]


@library.custom_op("titan::attention_mask", mutates_args=())
def shared_mask(
    positions: Tensor, documents: Tensor | None, window: int, slopes: Sequence[float], length: int, dtype: torch.dtype
) -> Tensor:
    """The mask of a window, slopes and documents; layers that are given the same documents share it, recomputed or not.

    One tensor, so that autograd keeps it once. One operation, whether the mask is there or not: selective recomputation
    requires the same operations again, while a pipeline may have made the mask of another micro batch in between.
    """
    kind = window, tuple(slopes)
    of, mask = _masks.get(kind, (None, torch.empty(0)))
    same = of is None if documents is None else of is not None and of() is documents
    if not same or (mask.shape[-1], mask.dtype, mask.device) != (length, dtype, positions.device):
        del mask
        _masks.pop(kind, None)  # before its successor is made: two at a time may not fit
        mask = _new_mask(positions, documents, window, slopes, length, dtype)
        _masks[kind] = None if documents is None else weakref.ref(documents, _forget), mask
    return mask


def _new_mask(
    positions: Tensor, documents: Tensor | None, window: int, slopes: Sequence[float], length: int, dtype: torch.dtype
) -> Tensor:
    """As `attend` takes it. In place, as each copy is of S x S: one bool tensor besides the mask at most."""
    device = positions.device
    if documents is None:
        seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril_()
    else:
        seen = document_mask(documents)
    if window:
        seen.triu_(1 - window)
    if dtype == torch.bool:
        return seen
    if slopes:
        at = torch.arange(length, device=device)
        return alibi(slopes, at[:, None] - at).to(dtype).masked_fill(seen.logical_not_(), -math.inf)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(seen.logical_not_(), -math.inf)


def attention_cost(
    heads: int, kv_heads: int, head_dim: int, *, scores_written: bool = False, soft_cap: bool = False
) -> Attention:
    """The cost of causal attention that saves q, k, v and its output, and what its backward needs besides.

    With a flash kernel these are float32 statistics, one per token and head. Attention that writes its scores saves the
    softmax of the scores in the compute dtype instead: S numbers per token and head. Backward holds two copies more.

    Arguments: as in `titan.contracts.base.cost.Attention`. Scores with a soft cap are written, and their tanh is saved.
    """
    inputs_and_output = SavedTensor(numel=2 * (heads + kv_heads) * head_dim, region="tp_sharded")
    statistics = SavedTensor(numel=heads, region="tp_sharded", itemsize=4)
    scores = SavedTensor(numel=heads, region="tp_sharded", scores=True)
    written = scores_written or soft_cap
    saved = (inputs_and_output, replace(scores, numel=(1 + soft_cap) * heads) if written else statistics)
    scratch = (replace(scores, numel=2 * heads),) if written else ()
    core = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, soft_cap=soft_cap)
    return replace(core, scores_written=written, scratch=scratch, saved=saved)
