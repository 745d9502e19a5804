"""Time of operations on a device, in seconds.

A matrix product of [m, k] by [k, n] takes 2 m k n / (peak * efficiency). The efficiency falls below its maximum for
three reasons: the last wave of output tiles does not fill the compute units (wave quantization); the reduction length k
is short; or a size is divisible by a small power of two only, so that loads are narrower. Sizes that are not a multiple
of 16 bytes do not use tensor cores at all. A product takes at least the time of its memory traffic (the roofline of
Williams et al., CACM 52(4), 2009).

A stack of weights is one grouped product (MegaBlocks, arXiv 2211.15841): as many products as the rank holds weights,
each of the tokens that pass its weight. Their tiles share the waves, so small groups waste parts of tiles, not waves. A
weight is read once per micro batch however few tokens pass it, so with few tokens the product takes the time of its
weights' bytes. The number of a group's tokens is arbitrary, and grouped kernels are made for that: its alignment costs
nothing.

Attention counts needed FLOPs only: half of the square where a kernel skips masked positions; all where it is given a
mask, of documents, a window or ALiBi: no kernel knows which of its blocks are empty. A kernel that follows a window
itself (`Attention.skips`) skips what it hides; documents count as long as the sequence. Its backward has 2.5 times
the FLOPs of its forward (FlashAttention-2, arXiv 2307.08691).
"""

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

from titan.contracts.base.cost import Attention, Costs, EmbeddingOp, Matmul, Operation
from titan.planner.machine.cluster import Cluster, Products

BACKWARD_OF_ATTENTION = 2.5
PASSES_OVER_SCORES = (4.5, 5.5)
"""Elements per score that move through memory, forward and backward, besides the products, in attention that writes its
scores: the softmax reads and writes (its backward reads two), and so does dropout, with a mask of one byte. titan's own
kernel has no dropout, but masks the scores in a pass of its own: it reads and writes them once more, 4 and 5 in all."""

PASSES_OF_SOFT_CAP = (4.0, 5.0)
"""The same of a soft cap besides: a tanh and a factor, each in a pass of its own; the tanh's backward reads two."""

FLOAT32 = 4
"""Bytes per score in blocks with a mask between ranks."""


class Seconds(NamedTuple):
    """Seconds of one or more operations: forward; backward for the inputs; backward for the weights."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0

    @property
    def backward(self) -> float:
        """Seconds of the whole backward: for inputs and weights."""
        return self.inputs + self.weights


class Device:
    """Times the kernels of a cluster's device. Caches the times of matrix products."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.kernels = cluster, cluster.kernels
        self._launch = cluster.kernels.launch_us * 1e-6
        self._bytes_per_s = cluster.device.bandwidth_gb_s * 1e9 * cluster.kernels.bandwidth_efficiency
        self._products: dict[tuple[float, float, float, str, int], float] = {}
        self._grouped: dict[tuple[float, float, float, float, str, int], float] = {}
        self._points = {dtype: rates.curve() for dtype, rates in cluster.products.items() if rates.points}

    def product(self, m: float, k: float, n: float, dtype: str, width: int) -> float:
        """Seconds of the matrix product [m, k] x [k, n] in a dtype; `width`: bytes per element."""
        key = (m, k, n, dtype, width)
        seconds = self._products.get(key)
        if seconds is None:
            even = min(_even(m), _even(k), _even(n))
            seconds = self._products[key] = self._of_groups(1, m, k, n, even, dtype, width)
        return seconds

    def grouped(self, groups: float, m: float, k: float, n: float, even: int, dtype: str, width: int) -> float:
        """Seconds of `groups` products [m, k] x [k, n] in one kernel.

        even: the largest power of two that divides the sizes on which the speed of the kernel depends.
        """
        key = (groups, m, k, n, dtype, width)
        seconds = self._grouped.get(key)
        if seconds is None:
            seconds = self._grouped[key] = self._of_groups(groups, m, k, n, even, dtype, width)
        return seconds

    def _of_groups(self, groups: float, m: float, k: float, n: float, even: int, dtype: str, width: int) -> float:
        flops, moved = 2.0 * m * k * n, width * (m * k + k * n + m * n)
        if points := self._points.get(dtype):
            return groups * (flops / _interpolated(points, flops))  # as measured: with all that a product takes
        reached = self._reached(groups, m, k, n, even, dtype, width)
        return groups * max(flops / reached, moved / self._bytes_per_s) + self._launch

    def _reached(self, groups: float, m: float, k: float, n: float, even: int, dtype: str, width: int) -> float:
        """FLOP/s of a product, or of several in one kernel."""
        rates = self.cluster.products.get(dtype, Products())
        waste = rates.wave_quantization * self._wasted(groups, m, n, rates.tile)
        share: float = rates.efficiency / (1 + waste) * k / (k + rates.k_half)
        share *= rates.unaligned_factor ** max(0.0, math.log2(rates.aligned / even))
        if even * width % 16:
            share *= rates.unaligned_16b_factor
        return self.cluster.peak(dtype) * share

    def _wasted(self, groups: float, m: float, n: float, tile: tuple[int, int]) -> float:
        """Idle compute of partly filled tiles and waves, relative to the work; best of three tile orientations."""
        units, (rows, columns) = self.cluster.device.compute_units, tile
        found = math.inf
        for r, c in ((rows, columns), (columns, rows), (rows, columns // 2)):
            waves = math.ceil(groups * math.ceil(m / r) * math.ceil(n / c) / units)
            found = min(found, waves * units * r * c / (groups * m * n) - 1)
        return found

    def moving(self, numbers: float, width: float) -> float:
        """Seconds of an operation that moves `numbers` elements of `width` bytes through memory; 0 for none."""
        return numbers * width / self._bytes_per_s + self._launch if numbers else 0.0

    def operation(self, op: Operation, costs: Costs, dtype: str, ways: int = 1) -> Seconds:
        """Seconds of one operation for one micro batch on one rank, in the mean layer.

        costs: of the job, for the share of tokens and heads per rank.  dtype: that of matrix products.
        ways: ranks that each hold a part of the weights of a stack.
        """
        seconds = self._whole(op, costs, dtype, ways)
        return seconds if op.of_layers == 1 else Seconds(*(op.of_layers * each for each in seconds))

    def _whole(self, op: Operation, costs: Costs, dtype: str, ways: int) -> Seconds:
        """Seconds of an operation in a layer that has it."""
        if isinstance(op, Matmul):
            return self._stack(op, costs, ways) if op.stack > 1 else self._linear(op, costs, dtype)
        if isinstance(op, Attention):
            return self._core(op, costs)
        if isinstance(op, EmbeddingOp):
            numbers = costs.share("hidden") * op.width
            return Seconds(self.moving(2 * numbers, costs.itemsize), 0.0, self.moving(3 * numbers, costs.itemsize))
        tokens = costs.share(op.region) * (self.kernels.fused_traffic_factor if costs.fused else 1.0)
        forward = op.forward + (0.0 if costs.fused else op.unfused_bytes / costs.itemsize)
        return Seconds(self.moving(tokens * forward, costs.itemsize), self.moving(tokens * op.backward, costs.itemsize))

    def _linear(self, op: Matmul, costs: Costs, dtype: str) -> Seconds:
        rows, width, dtype = costs.share("seq_full") * op.used, costs.itemsize, op.dtype or dtype
        inputs, outputs = costs.product(op)
        return Seconds(
            self.product(rows, inputs, outputs, dtype, width),
            self.product(rows, outputs, inputs, dtype, width),
            self.product(inputs, rows, outputs, dtype, width),
        )

    def _stack(self, op: Matmul, costs: Costs, ways: int) -> Seconds:
        """A grouped product. The rank's weights see tokens of all ranks that share the stack, as many as its own."""
        held, (inputs, outputs) = op.stack / ways, costs.product(op)
        rows, even = costs.share("seq_full") * op.used / held, min(_even(inputs), _even(outputs))
        dtype, width = costs.wide_dtype, costs.itemsize
        return Seconds(
            self.grouped(held, rows, inputs, outputs, even, dtype, width),
            self.grouped(held, rows, outputs, inputs, even, dtype, width),
            self.grouped(held, inputs, rows, outputs, even, dtype, width),
        )

    def _core(self, op: Attention, costs: Costs) -> Seconds:
        if op.scores_written:
            return self._written(op, costs)
        return self._in_parts(op, costs) if op.masked_blocks else self._attention(op, costs)

    def _attention(self, op: Attention, costs: Costs) -> Seconds:
        whole = masked(op, costs.seq_len) or not (self.kernels.causal or op.skips)
        seen = costs.seq_len if whole else op.mean_keys(costs.seq_len)
        tokens, launches = costs.share("tp_sharded"), op.blocks * self._launch
        needed = 4.0 * tokens * seen * op.heads * op.head_dim / self.cluster.peak(costs.wide_dtype)
        needed *= 1 + self.kernels.attention_half / op.head_dim
        biases = op.biased * op.heads * costs.seq_len
        forward, backward = (self.moving(tokens * (copied + biases), costs.itemsize) for copied in op.copied)
        return Seconds(
            needed / self.kernels.attention_forward + launches + forward,
            BACKWARD_OF_ATTENTION * needed / self.kernels.attention_backward + launches + backward,
        )

    def _written(self, op: Attention, costs: Costs) -> Seconds:
        """Attention that writes its scores: two batched products forward, four backward, passes over S x S scores."""
        pair = sum(self._products_of_scores(op, costs))
        forward, backward = self._passes_over_scores(op, costs)
        return Seconds(pair + forward, 2 * pair + backward)

    def _in_parts(self, op: Attention, costs: Costs) -> Seconds:
        """Attention block by block between ranks, whose blocks with a mask write their scores in float32."""
        forward, inputs, _ = self._written(op, costs)
        copied = [self.moving(costs.share("tp_sharded") * numbers, costs.itemsize) for numbers in op.copied]
        return Seconds(forward + copied[0], inputs + copied[1])

    def _products_of_scores(self, op: Attention, costs: Costs) -> tuple[float, float]:
        """Seconds of the product of queries and keys, and of that of scores and values."""
        seq_len, dtype, width = costs.seq_len, costs.wide_dtype, costs.itemsize
        matrices, keys = costs.share("tp_sharded") * op.heads / seq_len, op.masked_blocks or seq_len
        return (
            self.batched(matrices, seq_len, op.head_dim, keys, dtype, width),
            self.batched(matrices, seq_len, keys, op.head_dim, dtype, width),
        )

    def _passes_over_scores(self, op: Attention, costs: Costs) -> tuple[float, float]:
        """Seconds of the softmax and the dropout or mask of the scores, forward and backward."""
        scores = costs.share("tp_sharded") * op.heads * (op.masked_blocks or costs.seq_len)
        width = FLOAT32 if op.masked_blocks else costs.itemsize
        capped = PASSES_OF_SOFT_CAP if op.soft_cap else (0.0, 0.0)
        forward, backward = (
            self.moving(sum(passes) * scores, width) for passes in zip(PASSES_OVER_SCORES, capped, strict=True)
        )
        return forward, backward

    def core_again(self, op: Attention, costs: Costs, both: bool) -> float:
        """Seconds to recompute attention in the mean layer; both: also the second product where scores are written."""
        if not op.scores_written:
            return op.of_layers * self._core(op, costs).forward
        first, last = self._products_of_scores(op, costs)
        return op.of_layers * (first + last * both + self._passes_over_scores(op, costs)[0])

    def batched(self, matrices: float, m: float, k: float, n: float, dtype: str, width: int) -> float:
        """Seconds of a batched product of `matrices` pairs [m, k] x [k, n]; their tiles share the waves."""
        seconds, rates = self.product(matrices * m, k, n, dtype, width), self.cluster.products.get(dtype, Products())
        narrowest, widest = rates.small_batch_dims
        slow = matrices <= rates.small_batch_max and narrowest <= min(k, n) <= widest
        return seconds / rates.small_batch_factor if slow else seconds

    def update(self, bytes_: float) -> float:
        """Seconds of an optimizer update that moves that many bytes through memory."""
        share = self.kernels.update_bandwidth_efficiency or self.kernels.bandwidth_efficiency
        return bytes_ / (self.cluster.device.bandwidth_gb_s * 1e9 * share)

    def to_host(self, bytes_: float) -> float:
        """Seconds to copy that many bytes between the device and its host, one way."""
        return bytes_ / (self.cluster.device.host_gb_s * 1e9)


def masked(op: Attention, seq_len: int) -> bool:
    """Whether attention is one fused operation with a mask: of documents, biases, or a window below the sequence."""
    if op.scores_written or op.masked_blocks or op.skips:
        return False
    return op.documents or op.biased or op.keys(seq_len) < seq_len


def _even(size: float) -> int:
    """The largest power of two that divides a size."""
    whole = int(size)
    return (whole & -whole) or 1


def _interpolated(points: Sequence[tuple[float, float]], flops: float) -> float:
    """FLOP/s of a product of that many FLOPs: linear in log(FLOPs) between points, constant outside."""
    at = bisect.bisect_left(points, (flops, 0.0))
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (low, slow), (high, fast) = points[at - 1], points[at]
    return slow + (fast - slow) * math.log(flops / low) / math.log(high / low)
