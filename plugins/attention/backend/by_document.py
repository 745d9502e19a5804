"""Causal attention document by document, in place of one of whole sequences with a mask of S x S.

A sequence of packed documents is cut where the document changes; each run of equal numbers is a sequence of its own. On
a GPU one kernel computes all runs (the variable-length kernel of FlashAttention, arXiv 2307.08691), on a CPU PyTorch's
flash kernel computes one after the other. Both follow a window. Nothing of S x S is made: a run of L positions costs
L^2 / 2 scores, or L x window. PyTorch's kernel follows no window, so on a CPU a run that is longer than its window is
cut into pieces of 256 queries, with the keys that they see: L x (window + 255) scores, of which a mask leaves out
those beyond the window.

The host must know where runs end: it looks once per micro batch, for all layers, forward and backward. It has the
documents that the loader has copied to the device. Those that are made there, as where a pipeline cuts a step into
micro batches, are read back: on a GPU the host waits for what was queued before.
"""

# B rows, S tokens, H query heads, K key-value heads, N head_dim.

import weakref
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from titan.contracts import host_values
from titan.layers.attention import AttentionCore, attend
from titan.layers.products import FLASH, attention_backward

_aten = torch.ops.aten

# A graph cannot replay what the host does with the documents' values.
_TAGS = (torch.Tag.cudagraph_unsafe,)


QUERIES = 256
"""Queries of a piece, on a CPU: so few that their mask is small, and enough for a window's keys to be read seldom."""


class Runs(NamedTuple):
    """Runs of one document in rows laid end to end.

    ends: [R] int32 on the device, from 0: where the r-th run begins, and in the end B S.  longest: positions of it.
    host: the same numbers as `ends`.
    """

    ends: Tensor
    longest: int
    host: list[int]

    def pieces(self, length: int, window: int) -> Iterator[tuple[int, slice, slice]]:
        """(row, positions of queries, positions of the keys that they see): runs, cut where the window is shorter.

        length: positions of a row.  window: 0: none.
        """
        for begin, stop in pairwise(self.host):
            row = begin // length
            start, end = begin - row * length, stop - row * length
            cut = 0 < window < end - start
            for first in range(start, end, QUERIES if cut else end - start):
                last = min(first + QUERIES, end) if cut else end
                yield row, slice(first, last), slice(max(start, first - window + 1) if cut else start, last)


_held: dict[int, tuple[weakref.ref[Tensor], Runs]] = {}
"""The runs of the documents that there are, by identity; they go when the documents do."""


def runs_of(documents: Tensor) -> Runs:
    """The runs of documents [B, S], found by the host once for each tensor."""
    key = id(documents)
    held = _held.get(key)
    if held is None or held[0]() is not documents:
        held = weakref.ref(documents, lambda _: _held.pop(key, None)), _read(documents)
        _held[key] = held
    return held[1]


def _read(documents: Tensor) -> Runs:
    values = host_values(documents)
    last = F.pad(values[:, 1:] != values[:, :-1], (0, 1), value=True)
    return _placed([0, *(last.flatten().nonzero()[:, 0] + 1).tolist()], documents.device)


@lru_cache(maxsize=8)
def _whole_rows(rows: int, length: int, device: torch.device) -> Runs:
    """A document per row; kept, as a copy to the device holds up the host."""
    return _placed([row * length for row in range(rows + 1)], device)


def _placed(host: list[int], device: torch.device) -> Runs:
    ends = torch.tensor(host, dtype=torch.int32)
    if device.type == "cuda":
        ends = ends.pin_memory().to(device, non_blocking=True)
    return Runs(ends, max(end - start for start, end in pairwise(host)), host)


def attend_by_document(
    core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None = None
) -> Tensor:
    """As `AttentionCore.attend` of a core without slopes and soft cap."""
    window = core.window if 0 < core.window < q.shape[2] else 0
    if q.device.type == "meta" or (documents is None and not window):
        return attend(q, k, v, scale=core.scale)  # tensors without values: what is saved is the same
    out: Tensor = _by_document(q, k, v, documents, window, core.scale)[0]
    return out


# --- the operation --------------------------------------------------------------------------------------------------


@library.custom_op("titan::attention_by_document", mutates_args=(), tags=_TAGS)
def _by_document(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output [B, H, S, N], and the log-sum-exp of the scores [H, B, S] in float32."""
    runs = _whole_rows(q.shape[0], q.shape[2], q.device) if documents is None else runs_of(documents)
    q, k, v = map(_dense, (q, k, v))
    out, lse = _results(q)
    if q.device.type == "cuda":
        flat = [_flat(t) for t in (q, k, v)]
        causal, left = not window, window - 1
        ends = (runs.ends, runs.ends, runs.longest, runs.longest)
        sides = {"window_size_left": left, "window_size_right": 0}
        found = _aten._flash_attention_forward(*flat, *ends, 0.0, causal, False, scale=scale, **sides)
        return _rows(found[0], q), found[1].reshape(lse.shape)
    masks = Window(window, q)
    for row, queries, keys in runs.pieces(q.shape[2], window):
        mask = masks.of(queries, keys)
        own = (t[row : row + 1, :, at] for t, at in ((q, queries), (k, keys), (v, keys)))
        one, sums = FLASH(*own, 0.0, mask is None, attn_mask=mask, scale=scale)
        out[row, :, queries], lse[:, row, queries] = one[0], sums[0]
    return out, lse


@library.custom_op("titan::attention_by_document_backward", mutates_args=(), tags=_TAGS)
def _by_document_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    runs = _whole_rows(q.shape[0], q.shape[2], q.device) if documents is None else runs_of(documents)
    grad, q, k, v = map(_dense, (grad, q, k, v))
    if q.device.type == "cuda":
        flat = [_flat(t) for t in (grad, q, k, v, out)]
        causal, left = not window, window - 1
        # Of the random state of a dropout, which is not there.
        state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
        ends = (runs.ends, runs.ends, runs.longest, runs.longest)
        sides = {"window_size_left": left, "window_size_right": 0}
        found = _aten._flash_attention_backward(
            *flat, lse.flatten(1), *ends, 0.0, causal, state, unused, scale=scale, **sides
        )
        return _rows(found[0], q), _rows(found[1], k), _rows(found[2], v)
    made, masks = [_empty_like(t) for t in (q, k, v)], Window(window, q)
    if window:  # a key's gradient is the sum of those of several pieces
        made[1:] = [one.float().zero_() for one in made[1:]]
    for row, queries, keys in runs.pieces(q.shape[2], window):
        mask, places = masks.of(queries, keys), (queries, queries, keys, keys, queries)
        own = [t[row : row + 1, :, at] for t, at in zip((grad, q, k, v, out), places, strict=True)]
        sums = lse[None, :, row, queries].contiguous()
        found = attention_backward(own, sums, mask is None, mask, scale)
        made[0][row, :, queries] = found[0][0]
        for whole, one in zip(made[1:], found[1:], strict=True):
            part = whole[row, :, keys]
            part.copy_(part + one[0] if window else one[0])
    return made[0], made[1].to(k.dtype), made[2].to(v.dtype)


class Window:
    """Masks [queries, keys] of pieces, as PyTorch's flash kernel for CPUs takes them: cut out of one."""

    def __init__(self, window: int, like: Tensor) -> None:
        self._window, self._like = window, like

    def of(self, queries: slice, keys: slice) -> Tensor | None:
        """None: plain causal attention. The last query is at the last key."""
        rows, columns = queries.stop - queries.start, keys.stop - keys.start
        if rows == columns and not 0 < self._window < rows:
            return None
        left = self._window - 1 - (columns - rows)  # keys of a whole window that are before the run
        return self._whole[:rows, left : left + columns]

    @cached_property
    def _whole(self) -> Tensor:
        """Of queries whose windows lie in the run: query i sees keys i to i + window - 1."""
        size = QUERIES, QUERIES + self._window - 1
        unseen = self._like.new_ones(size, dtype=torch.bool).tril_(self._window - 1).triu_(0).logical_not_()
        return self._like.new_zeros(size).masked_fill_(unseen, float("-inf"))


def _dense(t: Tensor) -> Tensor:
    """The kernels read heads whose numbers lie side by side."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _flat(t: Tensor) -> Tensor:
    """[B, H, S, N] as [B S, H, N]."""
    return t.transpose(1, 2).flatten(0, 1)


def _rows(flat: Tensor, like: Tensor) -> Tensor:
    """[B S, H, N] as [B, H, S, N]."""
    return flat.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def _empty_like(t: Tensor) -> Tensor:
    """Of its shape, with the heads of a position side by side, as the next product reads them."""
    b, heads, length, n = t.shape
    return t.new_empty(b, length, heads, n).transpose(1, 2)


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    b, heads, length, _ = q.shape
    return _empty_like(q), q.new_empty(heads, b, length, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, *ctx.constants = inputs
    ctx.save_for_backward(q, k, v, *output, documents)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_by_document_backward(grad, *ctx.saved_tensors, *ctx.constants), None, None, None


_by_document.register_fake(lambda q, *_: _results(q))
_by_document_backward.register_fake(lambda _, q, k, v, *__: tuple(_empty_like(t) for t in (q, k, v)))
_by_document.register_autograd(_differentiate, setup_context=_save)

OPERATION = torch.ops.titan.attention_by_document.default
