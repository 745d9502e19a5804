"""Attention split over ranks gives one process's output and gradients (plugins/parallel/context/attention.py)."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.operations import Watch
from titan.contracts import Costs
from titan.contracts.base.cost import Attention
from titan.plugins.parallel.context import blocks
from titan.plugins.parallel.context import costs as methods
from titan.plugins.parallel.context.attention import OPERATIONS, Ranks, Scores, gather, positions_of, ring, ulysses
from titan.testing.ranks import run_ranks

T = 48  # chunks of 24, 12, 8 and 6 positions at sizes 1 to 4
HEADS = 12
CPU = torch.DispatchKeySet(torch.DispatchKey.CPU)
SLOPES = tuple(2 ** -(head / 3) for head in range(HEADS))
METHODS = ("ring", "gather", "ulysses")


class Case(NamedTuple):
    kv_heads: int = 4
    head_dim: int = 8
    batch: int = 1
    borders: tuple[tuple[int, ...], ...] = ()  # of documents, for each sequence
    window: int | None = None
    scale: float | None = None
    slopes: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32

    def documents(self) -> Tensor | None:
        rows = [[sum(at >= border for border in borders) for at in range(T)] for borders in self.borders]
        return torch.tensor(rows) if rows else None

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, of the whole sequence, as models hand them over: transposed views."""
        draws = torch.Generator().manual_seed(0)
        heads = (HEADS, self.kv_heads, self.kv_heads, HEADS)
        shapes = [(self.batch, T, count, self.head_dim) for count in heads]
        return [torch.randn(shape, generator=draws).to(self.dtype).transpose(1, 2) for shape in shapes]


CASES = {
    "no groups": Case(kv_heads=HEADS),
    "groups, batch of 2": Case(kv_heads=6, batch=2, head_dim=16),
    "one key-value head": Case(kv_heads=1),
    "2 key-value heads": Case(kv_heads=2),
    "one document": Case(borders=((),)),
    "documents, borders inside of chunks and on them": Case(batch=2, borders=((5, 12, 24, 31), (1, 8, 36, 47))),
    "window of the position itself": Case(window=1),
    "window inside of a chunk": Case(window=5, kv_heads=2),
    "window of a chunk of 2 ranks": Case(window=12),
    "window of a chunk of 3 ranks": Case(window=8),
    "window of a chunk of 4 ranks": Case(window=6),
    "window one short of a chunk of 2 ranks": Case(window=11),
    "window of some chunks": Case(window=19, batch=2),
    "window of all": Case(window=T),
    "window over documents": Case(window=10, batch=2, borders=((7, 24), (13, 30)), head_dim=16),
    "scale": Case(scale=0.5),
    "ALiBi": Case(kv_heads=HEADS, slopes=SLOPES),
    "ALiBi, groups, window over documents, scale": Case(
        slopes=SLOPES, scale=0.2, window=10, batch=2, borders=((7, 24), (13, 30))
    ),
}


def _mask(case: Case, rank: int = 0, size: int = 1) -> Tensor:
    """Of all positions, for this rank's share of the heads; with slopes what is added to scores."""
    distance, documents = torch.arange(T)[:, None] - torch.arange(T), case.documents()
    seen = (distance >= 0) & (distance < (case.window or T))
    seen = seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None, :])
    if not case.slopes:
        return seen
    own = torch.tensor(case.slopes).view(size, -1, 1, 1)[rank]
    return torch.where(seen, -own * distance, -math.inf)


def _whole(mask: Tensor, scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _both_ways(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients."""
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


def _alone(case: Case, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Output and gradients of one process."""
    return _both_ways(partial(_whole, _mask(case), case.scale), *(t.to(dtype or case.dtype) for t in case.tensors()))


def _ranks() -> Ranks:
    return Ranks(dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank())


def _method(name: str, case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    documents = case.documents()
    if name == "ulysses":
        ranks = _ranks()
        return partial(ulysses, attend=partial(_whole, _mask(case, ranks.rank, ranks.size), case.scale), ranks=ranks)
    function = {"ring": ring, "gather": gather}[name]
    return lambda q, k, v: function(q, k, v, documents, _ranks(), Scores(case.window, case.scale, case.slopes))


def _own(name: str, case: Case) -> list[Tensor]:
    ranks = _ranks()
    at = positions_of(T, ranks.rank, ranks.size, name)
    # Indexed along T of [B, T, H, N]: a rank's own are transposed views too.
    return [t.transpose(1, 2)[:, at].transpose(1, 2) for t in case.tensors()]


def _run_all(cases: dict[str, Case]) -> dict[tuple[str, str], list[Tensor]]:
    pairs = [(name, label) for name in METHODS for label in cases if _fits(name, cases[label].kv_heads)]
    return {(n, label): _both_ways(_method(n, case := cases[label]), *_own(n, case)) for n, label in pairs}


def _fits(name: str, kv_heads: int) -> bool:
    size = dist.get_world_size()
    return name != "ulysses" or kv_heads % size == 0 or size % kv_heads == 0


def _joined(name: str, pieces: list[Tensor]) -> Tensor:
    """The whole sequence in its order, from each rank's positions."""
    at = torch.cat([positions_of(T, rank, len(pieces), name) for rank in range(len(pieces))])
    return torch.cat(pieces, dim=2)[:, :, at.argsort()]


def _results(size: int, cases: dict[str, Case]) -> Iterator[tuple[str, str, list[Tensor]]]:
    ranks = run_ranks(_run_all, size, cases)
    for name, label in ranks[0]:
        pieces = zip(*(rank[name, label] for rank in ranks), strict=True)
        yield name, label, [_joined(name, list(each)) for each in pieces]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_output_and_gradients_are_those_of_one_process(size: int) -> None:
    """Gradients of scores are differences of two products; which of their roundings cancel depends on the CPU."""
    expected = {label: _alone(case) for label, case in CASES.items()}
    seen = set()
    for name, label, results in _results(size, CASES):
        seen.add(name)
        q, _, v, gradient = CASES[label].tensors()
        products = (gradient @ v.repeat_interleave(HEADS // v.shape[1], dim=1).mT).abs().max().item()
        slope = 2 * torch.finfo(torch.float32).eps * products * (CASES[label].scale or CASES[label].head_dim ** -0.5)
        for what, result, target in zip(("out", "dq", "dk", "dv"), results, expected[label], strict=True):
            atol = 2e-6 if what in ("out", "dv") else max(2e-6, slope * q.abs().max().item())
            told = f"{name}, {label}, {what}: {{}}".format
            torch.testing.assert_close(result, target, rtol=1e-5, atol=atol, msg=told)
    assert seen == set(METHODS)


def test_bf16_is_about_as_near_to_float32_as_one_process_is() -> None:
    """Twice its error: a block's output and gradients are rounded to bf16 once more than those of the whole are.

    And float32's rounding: of one key, two equal products cancel to a slope of 0 if they are summed in the same order.
    """
    cases = {label: case._replace(dtype=torch.bfloat16) for label, case in CASES.items()}
    for name, label, results in _results(4, cases):
        alone, targets = _alone(cases[label]), _alone(cases[label], torch.float32)
        rounding = torch.finfo(torch.float32).eps * cases[label].tensors()[-1].norm()
        for what, result, one, target in zip(("out", "dq", "dk", "dv"), results, alone, targets, strict=True):
            error, allowed = (result - target).norm(), 2 * (one - target).norm() + rounding
            assert error <= allowed, f"{name}, {label}, {what}: {error:.2e} > {allowed:.2e}"


# --- what autograd, recomputation and compilation make of it --------------------------------------------------------


def _counting(counts: Counter[str]) -> Watch:
    return Watch(lambda function, *_: counts.update([function._schema.name]))


COSTLY = ("titan::ring_attention", "titan::gather_attention", "_c10d_functional::all_to_all_single")


def _two_layers(method: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return method(method(q, k, v).tanh(), v, k)


def _like_a_sums(gradient: Tensor) -> Tensor:
    """Without memory of its own."""
    return gradient[..., :1].expand_as(gradient)


def _transformed(name: str, case: Case) -> dict[str, tuple[list[Tensor], int]]:
    """Output and gradients, and how many costly operations forward and backward ran."""
    *inputs, gradient = _own(name, case)
    gradient = _like_a_sums(gradient)
    layers = partial(_two_layers, _method(name, case))
    contexts = partial(create_selective_checkpoint_contexts, list(OPERATIONS))
    ways: dict[str, Callable[..., Tensor]] = {
        "plain": layers,
        "recomputed": partial(checkpoint, layers, use_reentrant=False),
        "recomputed in part": partial(checkpoint, layers, use_reentrant=False, context_fn=contexts),
    }
    found = {}
    for way, forward in ways.items():
        with _counting(counts := Counter()):
            results = _both_ways(forward, *inputs, gradient)
        found[way] = results, sum(counts[name] for name in COSTLY)
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    found["compiled"] = _both_ways(compiled, *inputs, gradient), 0
    return found


def _all_transformed(case: Case) -> dict[str, dict[str, tuple[list[Tensor], int]]]:
    return {name: _transformed(name, case) for name in METHODS}


def test_two_layers_recomputed_and_compiled_give_the_same_numbers() -> None:
    case = Case(window=19, batch=2, borders=((7, 24), (13, 30)))
    *inputs, gradient = case.tensors()
    layers = partial(_two_layers, partial(_whole, _mask(case), case.scale))
    target = _both_ways(layers, *inputs, _like_a_sums(gradient))
    ranks = run_ranks(_all_transformed, 2, case)
    for name in METHODS:
        for rank in ranks:
            plain, forwards = rank[name].pop("plain")
            once = {"ring": 2, "gather": 2, "ulysses": 4}[name]
            backwards = once if name == "ulysses" else 0  # an all-to-all undoes another
            # Recomputation stops before the last all-to-all, whose result nobody saved.
            again = once - 1 if name == "ulysses" else once
            assert forwards == once + backwards
            assert rank[name]["recomputed"][1] == forwards + again
            assert rank[name]["recomputed in part"][1] == forwards
            for results, _ in rank[name].values():
                assert all(map(torch.equal, results, plain))
            rank[name]["plain"] = plain, 0
        pieces = zip(*(rank[name]["plain"][0] for rank in ranks), strict=True)
        for result, whole in zip((_joined(name, list(piece)) for piece in pieces), target, strict=True):
            torch.testing.assert_close(result, whole, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("label", ["groups, batch of 2", "window over documents", "ALiBi"])
def test_implementations_run_on_meta_tensors(label: str) -> None:
    """So that a dry run sees the collectives; what compilation assumes of shapes and strides is what they return."""
    case, ranks = CASES[label], Ranks("", 4, 1)
    q, k, v, grad = (t[:, :, : T // ranks.size].to("meta") for t in case.tensors())
    documents = case.documents()
    rest = (documents if documents is None else documents.to("meta"), *ranks, case.window, case.scale, case.slopes)
    expected = {
        "ring_attention": {"all_to_all_single": 3 + 3 + 4},
        "gather_attention": {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1},
    }
    for name, collectives in expected.items():
        forward, backward = (getattr(torch.ops.titan, f"{name}{suffix}").default for suffix in ("", "_backward"))
        of_forward, of_backward = (torch.library.get_kernel(operation, "CPU") for operation in (forward, backward))
        with _counting(seen := Counter()):
            results = of_forward.call_boxed(CPU, q, k, v, *rest)
            gradients = of_backward.call_boxed(CPU, grad, q, k, v, *results, *rest)
        supposed = forward(q, k, v, *rest), backward(grad, q, k, v, *results, *rest)
        for real, fake in zip((*results, *gradients), (t for pair in supposed for t in pair), strict=True):
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
        counts = {key.removeprefix("_c10d_functional::"): n for key, n in seen.items() if "_c10d" in key}
        assert counts.pop("wait_tensor") == sum(collectives.values())
        assert counts == collectives


# --- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_ranks_hold_all_positions_once_and_equal_work(size: int) -> None:
    length = 4 * size * 3
    for name in METHODS:
        held = [positions_of(length, rank, size, name) for rank in range(size)]
        assert torch.equal(torch.cat(held).sort().values, torch.arange(length))
    scores = {int((positions_of(length, rank, size, "ring") + 1).sum()) for rank in range(size)}
    assert len(scores) == 1


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_blocks_are_as_few_and_as_large_as_costs_say(size: int, packed: bool) -> None:
    """A kernel for the keys of each rank, or two for each half of the queries; under a mask no scores of later keys."""
    width = 3
    length = 2 * size * width
    costs = Costs(seq_len=length, dim=8, micro_batch=1, micro_batches=1, embeddings=(), layer=(), head=(), styles={})
    op = Attention(heads=2, kv_heads=1, head_dim=4, documents=packed)
    ring, gather = methods.ring(op, size, costs)[0], methods.gather(op, size, costs)[0]
    sight = blocks.Sight(width, torch.zeros(1, length) if packed else None, None, None)
    scores, kernels = [0, 0], [0, 0]
    for rank in range(size):
        own = blocks.chunks_of(rank, size)
        passed = [b for other in range(size) for b in blocks.blocks_of(sight, own, blocks.chunks_of(other, size))]
        at_once = blocks.blocks_of(sight, own, range(2 * size))
        kernels = [max(most, len(found)) for most, found in zip(kernels, (passed, at_once), strict=True)]
        for place, found in enumerate((passed, at_once)):
            scores[place] += sum((q.stop - q.start) * (k.stop - k.start) for q, k, _ in found)
    if packed:
        assert scores == [length * ring.masked_blocks, length * gather.masked_blocks]
    else:
        assert kernels == [ring.blocks, gather.blocks]


def _masked(seen: Tensor) -> blocks.Mask:
    return lambda scores, rows: scores.masked_fill_(~seen[:, :, rows], -math.inf)


@pytest.mark.parametrize("most", [1, 100, 2**26], ids=["a query at a time", "some", "all at once"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_written_blocks_equal_the_fused_kernel(kv_heads: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_SCORES", most)
    draws = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(2, heads, 10, 8, generator=draws) for heads in (4, kv_heads, kv_heads, 4))
    seen = torch.ones(1, 1, 10, 10, dtype=torch.bool).tril()
    for causal, mask, scale in ((False, None, None), (True, _masked(seen), None), (True, _masked(seen), 0.8)):
        fused = blocks.forward_fused(q, k, v, causal, scale)
        written = blocks.forward_written(q, k, v, mask, scale)
        torch.testing.assert_close(written, fused, rtol=1e-5, atol=1e-6)
        # As in a ring, output and log-sum-exp are of more keys than the block's.
        out, lse = fused[0] * 0.7, fused[1] + 0.3
        gradients = blocks.backward_fused(grad, q, k, v, out, lse, causal, scale)
        again = blocks.backward_written(grad, q, k, v, out, lse, mask, scale)
        torch.testing.assert_close(again, gradients, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("label", ["groups, batch of 2", "window of some chunks", "window over documents"])
def test_every_kind_of_block_may_be_written(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a mask too, which a GPU writes in float32."""
    case, kinds = CASES[label], set()
    q, k, v, grad = case.tensors()
    own = positions_of(T, 1, 3, "ring")
    queries = blocks.Queries(q[:, :, own], case.documents(), 1, 3, Scores(window=case.window))

    def results() -> list[Tensor]:
        out, lse = queries.nothing_seen()
        queries.attend(torch.stack((k, v)), range(6), out, lse)
        dq = torch.zeros_like(out)
        return [out, lse, queries.gradients(torch.stack((k, v)), range(6), grad[:, :, own], out, lse, dq), dq]

    expected = results()
    monkeypatch.setattr(blocks, "is_fused", lambda _, kind: kinds.add(kind))
    torch.testing.assert_close(results(), expected, rtol=1e-5, atol=2e-6)
    assert kinds == ({"full", "causal"} if case.window is None and not case.borders else {"masked", *kinds})


def test_queries_without_a_key_have_no_output() -> None:
    q = torch.ones(1, 2, 3, 8)
    seen = torch.tensor([[False, False], [True, True], [False, False]])[None, None]
    out, lse = blocks.forward_written(q, q[:, :, :2], q[:, :, :2], _masked(seen), None)
    assert out[:, :, 1].eq(1).all() and out[:, :, ::2].eq(0).all()
    assert lse[:, :, ::2].eq(-math.inf).all() and lse[:, :, 1].isfinite().all()
    total, sums = torch.zeros_like(q), torch.full((1, 2, 3), -math.inf)
    blocks.merge(total, sums, out, lse)
    assert torch.equal(total, out) and torch.equal(sums, lse)
    sums = sums.nan_to_num(neginf=0.0)
    gradients = blocks.backward_written(q, q, q[:, :, :2], q[:, :, :2], out, sums, _masked(seen), None)
    assert all(gradient.isfinite().all() for gradient in gradients)
