"""Attention on this CPU: PyTorch's SDPA against titan's kernels, in turns in one process.

    python -m bench.cpu_attention [--threads 1] [--repeats 40]

A row is a dtype and a shape with a number of threads: forward, and backward of the same result. Documents are for SDPA
a mask, made before, as the layers of a model share one. Prints median milliseconds and their ratios, and writes all
samples under bench/results. Needs a CPU with AVX2 and a C++ compiler. On a CPU without bf16, titan calls SDPA's
backward in float32, and so does this.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from bench import results
from bench.headlines import KERNEL, SDPA, Halves, kernel_ratios
from titan.layers.attention import attend, document_mask
from titan.plugins.attention.cpu_kernel import computed_in, cpu_attention, why_not

WARM_UP = 3


class Shape(NamedTuple):
    """Rows, query heads, key-value heads, positions, features per head, and positions per document (0: one)."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    width: int
    document: int = 0

    def __str__(self) -> str:
        text = f"B {self.batch}, H {self.heads}, K {self.kv_heads}, S {self.length}, N {self.width}"
        return text + (f", documents of {self.document}" if self.document else "")


SHAPES = (
    Shape(8, 8, 8, 512, 32),
    Shape(1, 16, 4, 2048, 64),
    Shape(1, 16, 4, 2048, 64, document=256),
    Shape(1, 8, 8, 1024, 128),
)


DTYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    """Measure all rows, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="threads of both, as a rank has")
    parser.add_argument("--repeats", type=int, default=40, help=f"measured passes of each, after {WARM_UP}")
    args = parser.parse_args()
    if min(*args.threads, args.repeats) < 1:
        parser.error("--threads and --repeats are at least 1")
    if why := why_not(torch.device("cpu"), torch.float32, SHAPES[0].width):
        sys.exit(why)
    measured: dict[str, Halves] = {}
    rows = [(dtype, shape, threads) for dtype in DTYPES for threads in args.threads for shape in SHAPES]
    for dtype, shape, threads in tqdm(rows, disable=None):
        by = "" if computed_in(dtype) == dtype else " by the kernel of float32"
        name = f"{str(dtype).removeprefix('torch.')}{by}, {shape}, {threads} thread{'s' * (threads > 1)}"
        torch.set_num_threads(threads)
        measured[name] = _row(dtype, shape, args.repeats)
        forward, backward = kernel_ratios(measured[name])
        print(f"{name}: forward {forward:.1f} times as fast, backward {backward:.1f}")
    print(results.write("cpu_attention", {"rows": measured}))


def _row(dtype: torch.dtype, shape: Shape, repeats: int) -> Halves:
    """Seconds of each forward and each backward of both, taken in turns."""
    inputs = [
        torch.randn(shape.batch, shape.length, heads, shape.width, dtype=dtype).transpose(1, 2)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    ]
    documents = mask = None
    if shape.document:
        documents = (torch.arange(shape.length) // shape.document).expand(shape.batch, -1)
        mask = torch.zeros(shape.batch, 1, shape.length, shape.length, dtype=dtype)
        mask.masked_fill_(~document_mask(documents), float("-inf"))
    turns = {SDPA: partial(attend, mask=mask), KERNEL: partial(cpu_attention, documents=documents)}
    taken: Halves = {who: [[], []] for who in turns}
    for number in range(repeats + WARM_UP):
        for who, operation in turns.items():
            seconds = _pass(operation, inputs)
            if number >= WARM_UP:
                for half, took in zip(taken[who], seconds, strict=True):
                    half.append(round(took, 6))
    return taken


def _pass(operation: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    began = time.perf_counter()
    out = operation(q, k, v)
    between = time.perf_counter()
    torch.autograd.grad(out, (q, k, v), inputs[3])
    return between - began, time.perf_counter() - between


if __name__ == "__main__":
    main()
