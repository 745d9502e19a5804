"""The Triton kernels of updates against the same in PyTorch: in Triton's interpreter, and compiled ahead of time."""

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan.contracts import NamedParameter
from titan.contracts.optimizers import Stream, factor_of
from titan.plugins.optimizers.adamw import AdamW
from titan.plugins.optimizers.adamw.rounded import AdamW as Rounded
from titan.plugins.optimizers.adamw_8bit import AdamW8Bit, _rates
from titan.plugins.precision.bf16.bits import bits_of, rounded_stochastically
from titan.plugins.precision.bf16.rounded import RoundedKahan, RoundedStochastically

ROOT = Path(__file__).parents[2]
STREAM = Stream(0xFEDCBA9876543210, 2**32 + 5)


def interpreted(check: str) -> None:
    """Run a function of this file in Triton's interpreter, whose kernels take tensors of the CPU."""
    pytest.importorskip("triton", minversion="3.7.1", reason="the interpreter of Triton before 3.7.1 needs numpy < 2.4")
    words = [sys.executable, "-c", f"from {__name__} import {check}; {check}()"]
    found = subprocess.run(words, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


POINTERS = {"skipped": "*fp32", "rates": "*fp32", "divisor": "*fp32", "wide": "*fp32"} | dict.fromkeys(
    [f"{mean}_{part}" for mean in ("mean", "square") for part in ("scales", "values", "boundaries")], "*fp32"
)
FLOATS = dict.fromkeys(("shrink", "of_gradient", "b2", "of_squared", "eps"), "fp32")
PLACES = dict.fromkeys(("columns", "begin", "calls", "total", "inner", "of", "base", "step_low", "step_high"), "i32")
NARROW = dict.fromkeys(("weight", "gradient", "mean", "square", "lost", "out"), "*bf16") | POINTERS | FLOATS | PLACES
NARROW |= {"key": "i64", "factor": "i32"}
CODED = {"weight": "*fp32", "gradient": "*fp32", "mean": "*u8", "square": "*u8", "numel": "i32"} | POINTERS | FLOATS
KERNELS: Mapping[str, tuple[str, str, dict[str, str], dict[str, Any]]] = {
    "rounding": ("titan.layers.rounding", "_round", NARROW, {}),
    "adamw": ("titan.plugins.optimizers.adamw.kernel", "_update", NARROW, {"compensated": False}),
    "adamw, compensated": ("titan.plugins.optimizers.adamw.kernel", "_update", NARROW, {"compensated": True}),
    "codes": ("titan.plugins.optimizers.adamw_8bit.kernel", "_update", CODED, {"coded": True, "blocks": 8}),
    "float32 means": (
        "titan.plugins.optimizers.adamw_8bit.kernel",
        "_update",
        CODED | {"mean": "*fp32", "square": "*fp32", "weight": "*bf16"},
        {"coded": False, "blocks": 8},
    ),
}


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles(name: str, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For A100, H100 and B200. A cache of its own: it compiles each time."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, function, kinds, constants = KERNELS[name]
    kernel = getattr(importlib.import_module(module), function)
    constants = {**constants, "block": 256}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    source, options = ASTSource(kernel, signature, constants), {"num_warps": 8, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert made.asm["cubin"] and made.metadata.shared <= 2**15


def test_a_kernel_rounds_by_the_bits_of_the_place() -> None:
    interpreted("round_everything")


def round_everything() -> None:
    """Every shape, shards that begin within a call of Philox among them, to the bit."""
    from titan.layers.rounding import places_of, round_to

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    mesh = init_device_mesh("cpu", (3,))
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    plain = [draw(shape) for shape in ((), (1,), (21,), (5, 21), (300, 16), (3, 5, 21))]
    plain[3][0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    plain[3].view(torch.int32)[1, 0] = 0x7FFFFFFF  # a NaN whose bits would overflow
    shards = [
        DTensor.from_local(draw(local), mesh, [Shard(dim)], run_check=False, shape=torch.Size(whole), stride=stride)
        for dim, local, whole, stride in (
            (0, (3, 21), (9, 21), (21, 1)),
            (1, (5, 7), (5, 21), (21, 1)),
            (0, (1, 4, 10), (3, 4, 10), (40, 10, 1)),
            (1, (2, 2, 10), (2, 6, 10), (60, 10, 1)),
            (2, (2, 3, 4), (2, 3, 12), (36, 12, 1)),
        )
    ]
    for tensor in [*plain, *shards]:
        wide = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for number in (0, 2):
            out = torch.empty_like(wide, dtype=torch.bfloat16)
            round_to(out, wide, places_of(tensor), STREAM, factor_of(number))
            expected = rounded_stochastically(wide, bits_of(tensor, STREAM) * factor_of(number) & 0xFFFF)
            same = (out.view(torch.int16) == expected.view(torch.int16)) | (out.isnan() & expected.isnan())
            assert same.all(), tensor.shape
    dist.destroy_process_group()


def test_a_kernel_updates_as_fp32_copies_do() -> None:
    interpreted("update_rounded")


def update_rounded() -> None:
    """Four updates of which one is skipped. Bits are alike; sums are of another order: few numbers differ."""
    for kind, slot in ((RoundedStochastically, ""), (RoundedKahan, "compensation")):
        twins = [_narrow_adamw(), _narrow_adamw()]
        step = 0
        copies = kind(twins[0][0], lambda _: Stream(STREAM.key, step))  # noqa: B023
        for step in range(1, 5):
            gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) for p in twins[0][1]]
            for _, parameters in twins:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.bfloat16() if parameter.ndim > 1 or step > 1 else None
            before = _snapshot(twins[1][0])
            twins[1][0].found_inf = torch.tensor(float(step == 3))  # type: ignore[attr-defined]
            twins[1][0].step_rounded(lambda _: Stream(STREAM.key, step), slot)  # noqa: B023
            if step == 3:
                after = _snapshot(twins[1][0])
                assert all(torch.equal(after[key], value) for key, value in before.items())
            else:
                copies.step()
        found, expected = _snapshot(twins[1][0]), _snapshot(copies)
        assert found.keys() == expected.keys() and any(key[1] == slot for key in found) == bool(slot)
        for key, value in expected.items():
            assert value.dtype == found[key].dtype, key
            # A step of bf16, or of fp32 where numbers cancel.
            torch.testing.assert_close(found[key], value, rtol=2**-7, atol=2**-22)
            assert (found[key] != value).float().mean() < 1e-3, key


def _narrow_adamw() -> tuple[Rounded, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 48), (3, 20, 12), (100,))
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]
    named = [NamedParameter(f"w{n}", parameter, "matrix", n % 2 == 0) for n, parameter in enumerate(parameters)]
    return AdamW(AdamW.Config(lr=1e-2)).build(named), parameters  # type: ignore[return-value]


def _snapshot(optimizer: torch.optim.Optimizer) -> Mapping[tuple[int, str], Tensor]:
    """Copies of weights and state, by number of the parameter and slot."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    made: dict[tuple[int, str], Any] = {(n, "weight"): p.detach().clone() for n, p in enumerate(parameters)}
    for n, parameter in enumerate(parameters):
        made |= {(n, slot): value.clone() for slot, value in optimizer.state[parameter].items()}
    return made


def test_a_kernel_updates_codes_as_pytorch_does() -> None:
    interpreted("update_codes")


def update_codes() -> None:
    """Three updates, and one that is skipped: the same codes; PyTorch fuses some products with sums."""
    from titan.plugins.optimizers.adamw_8bit.kernel import update

    for shape, dtype in (((70, 99), torch.float32), ((64, 64), torch.bfloat16), ((30, 11), torch.float32)):
        generator = torch.Generator().manual_seed(0)
        start = (torch.randn(shape, generator=generator) * torch.logspace(-4, 1, shape[1])).to(dtype)
        ours, theirs = (_coded(start, weight_decay=0.1) for _ in range(2))
        for step in range(1, 5):
            gradient = (torch.randn(shape, generator=generator) * torch.logspace(-6, 2, shape[1])).to(dtype)
            before, skipped, divisor = _state(ours), torch.tensor(float(step == 3)), torch.tensor(1.7)
            theirs.found_inf, theirs.grad_scale = skipped, divisor
            theirs.param_groups[0]["params"][0].grad = gradient
            theirs.step()
            (group,) = ours.param_groups
            (weight,) = group["params"]
            ((mean, square),), times = ours._moments([weight]), ours._counted([weight], skipped)
            update(weight.detach(), gradient, mean, square, _rates(times, group)[0], skipped, divisor, group)
            expected = _state(theirs) if step != 3 else before
            for name, value in _state(ours).items():
                near = {torch.float32: 1e-6, torch.bfloat16: 2**-7}.get(value.dtype, 0.0) * (step != 3)
                torch.testing.assert_close(value, expected[name], rtol=near, atol=2**-21 * (near > 0))


def _coded(start: Tensor, **options: float) -> Any:
    weight = nn.Parameter(start.clone())
    return AdamW8Bit(AdamW8Bit.Config(lr=1e-2, **options)).build([NamedParameter("w", weight, "matrix", True)])


def _state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    (weight,) = optimizer.param_groups[0]["params"]
    made = {"weight": weight.detach().clone(), "step": torch.tensor(float(optimizer.state[weight].get("step", 0)))}
    for slot in ("exp_avg", "exp_avg_sq"):
        mean = optimizer.state[weight].get(slot)
        parts = {"": mean} if not hasattr(mean, "codes") else {".codes": mean.codes, ".scales": mean.scales}
        made |= {f"{slot}{part}": value.clone() for part, value in parts.items() if value is not None}
    return made
