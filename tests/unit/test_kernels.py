"""Seconds of operations, by hand."""

from dataclasses import replace

import pytest

from titan.contracts.base.cost import Attention, Costs, Elementwise, EmbeddingOp, Matmul, Stage
from titan.planner.machine import cluster as clusters
from titan.planner.machine.cluster import Cluster, Kernels, Products
from titan.planner.machine.kernels import PASSES_OVER_SCORES, Device

PLAIN = Products(efficiency=0.5, tile=(128, 256), wave_quantization=0.0)
KERNELS = Kernels(attention_forward=0.4, attention_backward=0.2, bandwidth_efficiency=0.5)


def device(products: Products = PLAIN, kernels: Kernels = KERNELS) -> Device:
    """100 TFLOP/s, 1000 GB/s, 10 units."""
    base = clusters.load("a100-80gb")
    hardware = replace(base.device, bandwidth_gb_s=1000.0, compute_units=10)
    own, peak = {"bfloat16": products}, {"bfloat16": 100.0}
    return Device(replace(base, device=hardware, kernels=kernels, products=own, peak_tflops=peak))


def costs(**changed: object) -> Costs:
    """One sequence of 1,024 tokens on one rank."""
    plain: dict[str, object] = {"seq_len": 1024, "dim": 512, "micro_batch": 1, "micro_batches": 1}
    plain |= {"embeddings": (), "layer": (), "head": (), "styles": {}, "itemsize": 2}
    plain |= {"dtype": "bfloat16", "wide_dtype": "bfloat16", "stages": (Stage(0, range(1)),)}
    return Costs(**{**plain, **changed})  # type: ignore[arg-type]


HALVED = replace(PLAIN, aligned=64, unaligned_factor=0.9, unaligned_16b_factor=0.1)
POINTS = Products(points=("1e9 10", "1e11 40"))
PRODUCTS = {
    "large: FLOPs at the share of the peak": (PLAIN, (4096, 4096, 4096), 2 * 4096**3 / 50e12),
    "thin: bytes": (PLAIN, (8, 4096, 4096), 2 * (8 * 4096 + 4096 * 4096 + 8 * 4096) / 500e9),
    "half at this depth": (replace(PLAIN, k_half=1024), (4096, 1024, 4096), 2 * 2 * 4096 * 1024 * 4096 / 50e12),
    "aligned to 64": (HALVED, (4096, 4096, 4096 + 64), 2 * 4096 * 4096 * (4096 + 64) / 50e12),
    "aligned to 32": (HALVED, (4096, 4096, 4096 + 32), 2 * 4096 * 4096 * (4096 + 32) / 50e12 / 0.9),
    "aligned to 8": (HALVED, (4096, 4096, 4096 + 8), 2 * 4096 * 4096 * (4096 + 8) / 50e12 / 0.9**3),
    "rows of no multiple of 16 bytes": (
        replace(PLAIN, unaligned_16b_factor=0.1),
        (4096, 4096, 4100),
        2 * 4096 * 4096 * 4100 / 5e12,
    ),
    "a measured point": (POINTS, (4096, 4096, 4096), 2 * 4096**3 / 40e12),
    "half way between, by the logarithm of the FLOPs": (POINTS, (500, 10000, 1000), 1e10 / 25e12),
}


@pytest.mark.parametrize(("products", "size", "seconds"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_takes(products: Products, size: tuple[int, int, int], seconds: float) -> None:
    assert device(products).product(*size, "bfloat16", 2) == pytest.approx(seconds)


def test_every_operation_takes_a_launch() -> None:
    launched = device(kernels=replace(KERNELS, launch_us=7.0))
    free, taken = (each.product(512, 512, 512, "bfloat16", 2) for each in (device(), launched))
    assert taken - free == pytest.approx(7e-6)
    assert launched.moving(1e-9, 2) == pytest.approx(7e-6)
    assert launched.moving(0, 2) == 0


def test_a_last_wave_that_is_partly_filled_costs_as_much_as_a_full_one() -> None:
    """10 units: 10 tiles are one wave, 11 are two, of which nine tenths of the second are lost."""
    waved = device(replace(PLAIN, wave_quantization=1.0))
    one, two = (waved.product(128 * tiles, 8192, 256, "bfloat16", 2) for tiles in (10, 20))
    more = waved.product(128 * 11, 8192, 256, "bfloat16", 2)
    assert two == pytest.approx(2 * one)
    # Half tiles waste less: 22 of them take three waves of half the work.
    assert more == pytest.approx(1.5 * one)


@pytest.mark.parametrize(("matrices", "wide", "share"), [(16, 192, 0.2), (17, 192, 1), (16, 128, 1), (16, 512, 1)])
def test_a_batch_of_few_products_is_slow_in_the_gap_that_says_so(matrices: int, wide: int, share: float) -> None:
    few = device(replace(PLAIN, small_batch_max=16, small_batch_dims=(161, 256), small_batch_factor=0.2))
    seconds = few.batched(matrices, 2048, wide, 2048, "bfloat16", 2)
    assert seconds == pytest.approx(2 * matrices * 2048**2 * wide / 50e12 / share)
    assert few.batched(matrices, 2048, 2048, wide, "bfloat16", 2) == pytest.approx(seconds)


def test_backward_of_a_linear_is_two_products() -> None:
    seconds = device().operation(Matmul(module="w", inputs=4096, outputs=8192), costs(seq_len=8192), "bfloat16")
    assert seconds.forward == seconds.inputs == seconds.weights == pytest.approx(2 * 8192 * 4096 * 8192 / 50e12)


def test_attention_skips_what_is_not_seen() -> None:
    op, job = Attention(heads=8, kv_heads=8, head_dim=64), costs()
    square = 4 * 1024 * 1024 * 8 * 64
    seen = device().operation(op, job, "bfloat16")
    assert seen.forward == pytest.approx(square / 2 / 40e12)
    assert seen.backward == pytest.approx(2.5 * square / 2 / 20e12)
    whole = device(kernels=replace(KERNELS, causal=False)).operation(op, job, "bfloat16")
    assert whole.forward == pytest.approx(2 * seen.forward)


def test_written_scores_pass_through_memory() -> None:
    """Products as large as the scores are bound by their bytes here, and softmax and dropout pass over them besides."""
    op = Attention(heads=8, kv_heads=8, head_dim=64, scores_written=True)
    seconds = device().operation(op, costs(), "bfloat16")
    passes = [2 * passes * 8 * 1024 * 1024 / 500e9 for passes in PASSES_OVER_SCORES]
    pair = seconds.forward - passes[0]
    assert pair > 2 * 2 * 8 * 1024 * 1024 / 500e9
    assert seconds.backward == pytest.approx(2 * pair + passes[1])


def test_elementwise_operations_take_their_bytes_and_less_where_they_are_merged() -> None:
    op = Elementwise(region="hidden", forward=1000, backward=2000)
    seconds = device().operation(op, costs(), "bfloat16")
    assert seconds.forward == pytest.approx(1024 * 1000 * 2 / 500e9)
    assert seconds.backward == pytest.approx(2 * seconds.forward)
    merged = device(kernels=replace(KERNELS, fused_traffic_factor=0.25)).operation(op, costs(fused=True), "bfloat16")
    assert merged.forward == pytest.approx(seconds.forward / 4)
    lookup = device().operation(EmbeddingOp(module="embed", rows=50000, width=512), costs(), "bfloat16")
    assert lookup.forward == pytest.approx(2 * 1024 * 512 * 2 / 500e9)


def test_ranks_that_split_a_region_do_their_part() -> None:
    op = Elementwise(region="tp_sharded", forward=1000, backward=0)
    split = {"hidden": 1, "seq_full": 1, "tp_sharded": 4, "logits": 1}
    whole, part = (device().operation(op, costs(**more), "bfloat16") for more in ({}, {"splits": split}))
    assert whole.forward == pytest.approx(4 * part.forward)


@pytest.mark.parametrize("name", clusters.names())
def test_every_cluster_that_comes_along_times_a_product(name: str) -> None:
    cluster: Cluster = clusters.load(name)
    for dtype in cluster.products:
        seconds = Device(cluster).product(8192, 8192, 8192, dtype, 2)
        assert 0.2 < 2 * 8192**3 / seconds / cluster.peak(dtype) < 1.0
    assert cluster.source
