"""Recompute tables of papers and talks with the formulas of `planner/step/arithmetic.py`.

    python -m bench.arithmetic

A `!` marks a printed number that does not follow from its own formula or from the other numbers of its row.
"""

from typing import NamedTuple

from titan.planner.step import arithmetic

A100 = 312.0
"""Dense fp16 and bf16 peak of an A100, TFLOP/s."""


class Row(NamedTuple):
    """A row of arXiv 2104.04473, table 1, as printed: sequences of 2,048, vocabulary 51,200, full recompute.

    billions: parameters, 1e9.  tflops: per GPU, recomputed FLOPs included.  percent: of the peak.  pflops: of all GPUs.
    """

    billions: float
    heads: int
    dim: int
    layers: int
    gpus: int
    batch: int
    tflops: int
    percent: int
    pflops: float


MEGATRON = (
    Row(1.7, 24, 2304, 24, 32, 512, 137, 44, 4.4),
    Row(3.6, 32, 3072, 30, 64, 512, 138, 44, 8.8),
    Row(7.5, 32, 4096, 36, 128, 512, 142, 46, 18.2),
    Row(18.4, 48, 6144, 40, 256, 1024, 135, 43, 34.6),
    Row(39.1, 64, 8192, 48, 512, 1536, 138, 44, 70.8),
    Row(76.1, 80, 10240, 60, 1024, 1792, 140, 45, 143.8),
    Row(145.6, 96, 12288, 80, 1536, 2304, 148, 47, 227.1),
    Row(310.1, 128, 16384, 96, 1920, 2160, 155, 50, 297.4),
    Row(529.6, 128, 20480, 105, 2520, 2520, 163, 52, 410.2),
    Row(1008.0, 160, 25600, 128, 3072, 3072, 163, 52, 502.0),
)
SEQUENCE, VOCABULARY = 2048, 51200


class Llama(NamedTuple):
    """A model of arXiv 2302.13971, tables 2 and 15: parameters as printed and counted, tokens, A100 hours, energy."""

    billions: float
    params: int
    tokens: float
    hours: int
    megawatt_hours: int


LLAMA = (
    Llama(6.7, 6_738_415_616, 1.0e12, 82_432, 36),
    Llama(13.0, 13_015_864_320, 1.0e12, 135_168, 59),
    Llama(32.5, 32_528_943_616, 1.4e12, 530_432, 233),
    Llama(65.2, 65_285_660_672, 1.4e12, 1_022_362, 449),
)
FRONTIER = ((22, (132, 88, 176), 440), (175, (1050, 700, 1400), 3500), (1000, (6000, 4000, 8000), 20000))
"""1e9 parameters; GB of parameters, gradients, optimizer; GB in total: the memory table of the Frontier team's talk on
arXiv 2312.12705."""


def megatron(row: Row) -> tuple[float, float, float, float]:
    """1e9 parameters, seconds per step, percent of the peak, PFLOP/s of all GPUs, from the other columns of a row."""
    params = arithmetic.megatron_parameters(row.layers, row.dim, VOCABULARY, SEQUENCE)
    flops = arithmetic.megatron_flops(row.batch, SEQUENCE, row.layers, row.dim, VOCABULARY)
    speed = row.gpus * row.tflops * 1e12
    return params / 1e9, flops / speed, 100 * row.tflops / A100, speed / 1e15


def agrees(row: Row) -> bool:
    """Whether the numbers of a row are consistent, within the rounding of its TFLOP/s."""
    billions, _, percent, pflops = megatron(row)
    half = 0.5 / row.tflops
    return (
        abs(billions - row.billions) <= 0.0501
        and abs(percent - row.percent) <= 0.5 + half * percent
        and abs(pflops - row.pflops) <= 0.05 + half * pflops
    )


def main() -> None:
    """Print every table, printed values beside recomputed ones."""
    _megatron()
    _llama()
    _memory()


def _mark(agreed: bool) -> str:
    return " " if agreed else "!"


def _megatron() -> None:
    print("arXiv 2104.04473, table 1 (printed | recomputed from the other columns), and days for 300e9 tokens")
    print(
        f"{'parameters, 1e9':>22} {'TFLOP/s':>8} {'% of peak':>13} {'PFLOP/s':>16} {'step, s':>8} {'300e9, days':>12}"
    )
    for row in MEGATRON:
        billions, step, percent, pflops = megatron(row)
        days = 300e9 / (row.batch * SEQUENCE) * step / 86400
        print(
            f"{row.billions:10.1f} | {billions:9.2f} {row.tflops:8d} {row.percent:6d} | {percent:4.1f}"
            f" {row.pflops:7.1f} | {pflops:6.1f} {step:8.2f} {days:12.1f} {_mark(agrees(row))}"
        )
    for name, params, gpus, tflops, tokens, printed in (
        ("GPT-3, 175e9", 175e9, 1024, 140, 300e9, 34),
        ("1008e9", 1008e9, 3072, 163, 450e9, 84),
    ):
        days = arithmetic.training_seconds(params, tokens, gpus, tflops * 1e12, 1, recompute=True) / 86400
        print(
            f"{name}, {tokens:.3g} tokens on {gpus} GPUs at {tflops} TFLOP/s, 8 T P / N X: {printed} | {days:.1f} days"
        )


def _llama() -> None:
    print(
        "\narXiv 2302.13971, tables 2 and 15: MFU (6 T P over the hours), tokens per parameter, MWh at 400 W, PUE 1.1"
    )
    for each in LLAMA:
        flops = 6 * each.tokens * each.params
        used = flops / (each.hours * 3600 * A100 * 1e12)
        energy = each.hours * 400 * 1.1 / 1e6
        agreed = round(each.params / 1e9, 1) == each.billions
        print(
            f"{each.billions:5.1f} | {each.params / 1e9:6.2f} {_mark(agreed)} {each.hours:>9,} h {used:7.1%}"
            f" {each.tokens / each.params:6.0f} {each.megawatt_hours:5d} | {energy:5.1f}"
        )
    hours = 1.4e12 / 380 / 3600
    days = hours / 2048 / 24
    print(f"65B at 380 tokens/s per GPU: {hours:,.0f} h, {days:.1f} days on 2,048 (printed: 1,022,362 h, 21 days)")


def _memory() -> None:
    print("\nThe Frontier team's memory table: GB by row, their sum | printed sum, bytes per parameter of both")
    for billions, rows, printed in FRONTIER:
        total = sum(rows)
        print(
            f"{billions:5d}e9 {' + '.join(map(str, rows)):>20} = {total:6d} | {printed:6d} {_mark(total == printed)}"
            f" {total / billions:5.0f} | {printed / billions:.0f}"
        )
    print("\narXiv 1910.02054, figure 1: 7.5e9 parameters, 64 ranks, ZeRO 0 to 3 (printed 120, 31.4, 16.6, 1.9 GB)")
    print("  ".join(f"{size / 1e9:.1f}" for size in arithmetic.zero_bytes(7.5e9, 64)))
    print("\nOpenGPT-X, 13e9 parameters on 32 GPUs, the model split over 4: GB per GPU")
    print(f"optimizer over 32 GPUs, then everything over 4: 56 -> 14 | {opengptx():.1f} -> {opengptx() / 4:.1f} !")
    strict = arithmetic.zero_bytes(13e9 / 4, 8)
    print("ZeRO 0 to 3 over the 8 data-parallel ranks: " + "  ".join(f"{size / 1e9:.1f}" for size in strict))


def opengptx() -> float:
    """GB before the split over 4, as the slide of that layout counts: the optimizer is already over all 32 GPUs."""
    return arithmetic.zero_bytes(13e9, 32)[1] / 1e9


if __name__ == "__main__":
    main()
