"""Host time of one tensor-parallel layer: titan's local tensors against DTensor's styles, eager and compiled.

    python -m bench.dispatch [--tp 8] [--repeats 50]

One process stands for a rank of `tp`, in a process group whose collectives do nothing. At the widths of Llama 7B to 65B
the tensors have shapes alone (device meta), so what takes time is Python, autograd and dispatch. A compiled layer needs
real tensors: its rows, and an eager pair beside them, have a width of 64, where the arithmetic takes little.

Prints milliseconds of a layer's forward and backward and the ratio, and writes all samples under bench/results. The
layer is that of `titan.plugins.models.llama` with sequence parallelism, a micro batch of one sequence of 2,048 tokens
(64 tokens where it is compiled).
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tqdm import tqdm

from bench import results
from bench.headlines import OURS, STYLES, UNSPLIT, Halves, dispatch_ms, dispatch_ratio
from titan.contracts import BuildContext, ModelPart, Precision
from titan.contracts.base.layout import Layout
from titan.contracts.base.mesh import Mesh
from titan.layers.rotary import rope_table
from titan.plugins.models.llama import Llama, LlamaConfig
from titan.plugins.parallel.tensor import TensorConfig, TensorParallel

WIDTHS = ("7b", "13b", "65b")
"""33b has 52 heads, which 8 ranks cannot share."""

SMALL = {"dim": 64, "n_heads": 8, "ffn_dim": 256, "max_seq_len": 64}
LAYER = "layers.0"
WARM_UP = 5


def main() -> None:
    """Measure all rows, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel ranks")
    parser.add_argument("--repeats", type=int, default=50, help=f"measured passes of each kind, after {WARM_UP}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: (Llama.presets[name], "meta", False) for name in WIDTHS}
    rows |= {"width 64": (SMALL, "cpu", False), "width 64, compiled": (SMALL, "cpu", True)}
    measured: dict[str, Halves] = {}
    print(f"{'ms, forward + backward':24s}{''.join(f'{who:>18s}' for who in SPLITS)}   DTensor / titan")
    with _group_that_does_nothing(args.tp):
        for name, (sizes, device, compiled) in tqdm(rows.items(), disable=None):
            measured[name] = _row(sizes, device, compiled, args.tp, args.repeats)
            halves = (f"{forward:.2f} + {backward:.2f}" for forward, backward in dispatch_ms(measured[name]).values())
            print(f"{name:24s}{''.join(f'{half:>18s}' for half in halves)}   {dispatch_ratio(measured[name]):.2f}")
    print(results.write("dispatch", {"tp": args.tp, "rows": measured}))


@contextmanager
def _group_that_does_nothing(ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    devices = dist.Backend.backend_capability[dist.Backend.FAKE]
    if "meta" not in devices:
        devices.append("meta")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    yield
    dist.destroy_process_group()


def _row(sizes: dict[str, Any], device: str, compiled: bool, tp: int, repeats: int) -> Halves:
    """Seconds of each forward and each backward of both, taken in turns."""
    model = Llama(LlamaConfig(**{**sizes, "n_layers": 1}))
    passes = {who: _passes(model, split, device, compiled, tp) for who, split in SPLITS.items()}
    taken: Halves = {who: [[], []] for who in passes}
    for number in range(repeats + WARM_UP):
        for who, run in passes.items():
            seconds = run()
            if number >= WARM_UP:
                for half, took in zip(taken[who], seconds, strict=True):
                    half.append(took)
    return taken


def _passes(
    model: Llama, split: Callable[..., nn.Module], device: str, compiled: bool, tp: int
) -> Callable[[], tuple[float, float]]:
    with torch.device("meta"):
        layer = split(model, model.build(), tp)
    if device != "meta":
        layer.to_empty(device=device)
        for parameter in layer.parameters():
            nn.init.normal_(parameter.to_local() if isinstance(parameter, DTensor) else parameter, std=0.02)
    forward = torch.compile(layer, fullgraph=True) if compiled else layer
    tokens = model.config.max_seq_len
    x = torch.zeros(1, tokens // tp, model.config.dim, device=device, requires_grad=True)
    gradient = torch.zeros_like(x)
    positions = torch.arange(tokens, device=device)[None]
    rope = rope_table(model.config.rotary, positions)

    def run() -> tuple[float, float]:
        began = time.perf_counter()
        out: Tensor = forward(x, positions, None, rope)
        between = time.perf_counter()
        out.backward(gradient)
        ended = time.perf_counter()
        layer.zero_grad()
        x.grad = None
        return between - began, ended - between

    return run


def _ours(model: Llama, module: nn.Module, tp: int) -> nn.Module:
    mesh = Mesh(Layout(tuple(TensorParallel.axes), {"tp": tp}), torch.device("cpu"), 0)
    context = BuildContext(job=None, mesh=mesh, spec=model.spec(), precision=Precision())  # type: ignore[arg-type]
    TensorParallel(TensorConfig()).apply(ModelPart(module), context)
    return module.get_submodule(LAYER)


def _styles(model: Llama, module: nn.Module, tp: int) -> nn.Module:
    """The same layer by DTensor's own styles, as torchtitan splits it."""
    layer, mesh = module.get_submodule(LAYER), init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    sliced = Shard(1)
    into = PrepareModuleInput(input_layouts=(sliced,), desired_input_layouts=(Replicate(),))
    others = (None, None, None)  # positions, documents, rope
    attention = PrepareModuleInput(input_layouts=(sliced, *others), desired_input_layouts=(Replicate(), *others))
    styles = {
        "attn_norm": SequenceParallel(use_local_output=True),
        "ffn_norm": SequenceParallel(use_local_output=True),
        "attn": attention,
        "ffn": into,
        **dict.fromkeys(("attn.wq", "attn.wk", "attn.wv", "ffn.w1", "ffn.w3"), ColwiseParallel()),
        **dict.fromkeys(("attn.wo", "ffn.w2"), RowwiseParallel(output_layouts=sliced)),
    }
    return parallelize_module(layer, mesh, styles, src_data_rank=None)


def _whole(model: Llama, module: nn.Module, tp: int) -> nn.Module:
    return module.get_submodule(LAYER)


SPLITS: dict[str, Callable[[Llama, nn.Module, int], nn.Module]] = {UNSPLIT: _whole, STYLES: _styles, OURS: _ours}


if __name__ == "__main__":
    main()
