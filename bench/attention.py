"""Attention of packed documents on a CPU: document by document, against one of the whole sequence with a mask.

    python -m bench.attention [--tokens 2048] [--repeats 20]

What the layers of `[plugins.attention] backend = "documents"` do, against what they do without the technique: forward
and backward of one layer, of 8 heads of 64 features, in turns in one process, on all cores. The mask and the places
where documents end are there already, as all layers but the first find them. Documents have about equal lengths; one
document is plain causal attention, with a mask and without.

Prints the ratios of the median times and writes all samples under bench/results.
"""

import argparse
import time
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from bench import results
from bench.headlines import headline
from titan.layers.attention import AttentionCore
from titan.plugins.attention.backend.by_document import attend_by_document

HEADS, FEATURES = 8, 64
DOCUMENTS = (1, 4, 8)
DTYPES = (torch.float32, torch.bfloat16)
WARM_UP = 3


def main() -> None:
    """Measure all rows, print the headline, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="positions of the sequence")
    parser.add_argument("--repeats", type=int, default=20, help=f"measured passes of each kind, after {WARM_UP}")
    args = parser.parse_args()
    rows = {}
    for dtype in DTYPES:
        for count in DOCUMENTS:
            name = f"{str(dtype).removeprefix('torch.')}, {count} document{'s' * (count > 1)}"
            rows[name] = _in_turns(args.tokens, count, dtype, args.repeats, name)
    found = {"tokens": args.tokens, "threads": torch.get_num_threads(), "rows": rows}
    print(headline("attention", found))
    print(results.write("attention", found))


def _in_turns(tokens: int, count: int, dtype: torch.dtype, repeats: int, name: str) -> dict[str, list[float]]:
    """Seconds of each forward and backward together, by what computes it."""
    draws, core = torch.Generator().manual_seed(0), AttentionCore()
    q, k, v, grad = (
        torch.randn(1, tokens, HEADS, FEATURES, generator=draws).to(dtype).transpose(1, 2) for _ in range(4)
    )
    inputs = tuple(t.requires_grad_() for t in (q, k, v))
    positions = torch.arange(tokens)[None]
    documents = positions * count // tokens
    kinds = {"mask": core, "documents": partial(attend_by_document, core)}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in tqdm(range(repeats + WARM_UP), desc=name, leave=False, disable=None):
        for kind, attend in kinds.items():
            began = time.perf_counter()
            out: Tensor = attend(*inputs, positions, documents)
            torch.autograd.grad(out, inputs, grad)
            if number >= WARM_UP:
                taken[kind].append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    main()
