"""What a rank's device reaches: matrix products, attention, memory, small operations, copies from the host, a disk."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from titan.doctor.clock import Clock, Time
from titan.doctor.report import Reading

SIZES = {
    "cpu": ((128, 64), (128, 128), (256, 128), (256, 256), (512, 256), (512, 512), (1024, 1024), (2048, 1024)),
    "cuda": ((512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (16384, 8192)),
}
"""Of products: rows (tokens), and columns and reduction (features)."""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16", "float8")}
LAYER_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 26}
ATTENTION = {"cpu": (2, 8, 256, 32), "cuda": (2, 16, 4096, 128)}
"""Batch, heads, sequence, features of a head, of models as they train there: narrow heads and short ones reach less."""

LARGE_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
DISK_BYTES = 32 << 20
FEATURES = 1024
NORM_NUMBERS, ACTIVATION_NUMBERS = 5, 13
"""Read and written for each number of the result, both ways, as models count them: a norm as one kernel, an activation
as several."""

WIDER = 2
"""By which an activation is wider than a norm in a layer, for each of two norms and more; so much it weighs."""


def measure(clock: Clock, subject: str, disk: Path | None) -> list[Reading]:
    """All readings of this rank's device; takes part with all ranks."""
    taken = [reading for dtype in DTYPES[_kind(clock)] for reading in products(clock, subject, dtype)]
    taken += attention(clock, subject)
    taken += memory(clock, subject)
    taken += layer(clock, subject)
    taken.append(launch(clock, subject))
    if clock.me.device.type != "cpu":
        taken.append(from_host(clock, subject))
    return taken if disk is None else [*taken, on_disk(clock, subject, disk)]


def slots(device: torch.device) -> int:
    """How many readings `measure` takes at most, without the disk."""
    return len(SIZES[device.type]) * len(DTYPES[device.type]) + 8


def products(clock: Clock, subject: str, dtype: str) -> Iterator[Reading]:
    """A linear's forward and backward by size: x W', dy W, dy' x. Ends where a call would fill its slot."""
    if dtype == "float8" and not _has_float8(clock.me.device):
        return
    seconds, before = 0.0, 0.0
    for rows, features in SIZES[_kind(clock)]:
        flops = 6.0 * rows * features * features
        if before and clock.agree(seconds) * flops / before > clock.slot:
            return
        work = _float8(clock, rows, features) if dtype == "float8" else _linear(clock, rows, features, dtype)
        took = clock.each(work)
        flops = flops / 3 if dtype == "float8" else flops
        seconds, before = took.seconds, flops
        about = {"dtype": dtype, "rows": rows, "features": features}
        name = f"products, {dtype} {rows} x {features} x {features}"
        yield _reading(f"products in {dtype}", name, subject, took, flops, "TFLOP/s", about)


def _linear(clock: Clock, rows: int, features: int, dtype: str) -> Any:
    x, w, dy = (
        torch.randn(n, features, device=clock.me.device, dtype=getattr(torch, dtype)) for n in (rows, features, rows)
    )
    return lambda: (x @ w.t(), dy @ w, dy.t() @ x)


def _float8(clock: Clock, rows: int, features: int) -> Any:
    x = torch.randn(rows, features, device=clock.me.device).to(torch.float8_e4m3fn)
    w = torch.randn(features, features, device=clock.me.device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=clock.me.device)
    return lambda: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def attention(clock: Clock, subject: str) -> Iterator[Reading]:
    """Causal attention forward, and forward and backward, in FLOPs of the half square that is needed."""
    device, shape = clock.me.device, ATTENTION[_kind(clock)]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    batch, heads, length, width = shape
    flops = 2.0 * batch * heads * length * length * width
    about = {"dtype": str(dtype).removeprefix("torch.")}
    kind, size = "attention", f"{batch} x {heads} x {length} x {width}"
    yield _reading(kind, f"attention forward, {size}", subject, clock.each(forward), flops, "TFLOP/s", about)
    both = clock.each(lambda: torch.autograd.grad(forward(), (q, k, v), grad))
    yield _reading(kind, f"attention both ways, {size}", subject, both, 3.5 * flops, "TFLOP/s", about)


def memory(clock: Clock, subject: str) -> Iterator[Reading]:
    """Copy and sum of large tensors."""
    numbers = LARGE_BYTES[_kind(clock)] // 4
    x, y, z = (torch.ones(numbers, device=clock.me.device) for _ in range(3))
    copied, summed = clock.each(lambda: y.copy_(x)), clock.each(lambda: torch.add(x, y, out=z))
    yield _reading("memory", "copy of large tensors", subject, copied, 8 * numbers, "GB/s")
    yield _reading("memory", "sum of large tensors", subject, summed, 12 * numbers, "GB/s")


def layer(clock: Clock, subject: str) -> Iterator[Reading]:
    """An RMSNorm and a SwiGLU forward and backward, of a layer's size."""
    device, rows = clock.me.device, LAYER_NUMBERS[_kind(clock)] // FEATURES
    x, gain = (torch.randn(shape, device=device, requires_grad=True) for shape in ((rows, FEATURES), (FEATURES,)))
    a, b = (torch.randn(rows, WIDER * FEATURES, device=device, requires_grad=True) for _ in range(2))
    dx, da = torch.randn_like(x), torch.randn_like(a)

    def norm() -> object:
        return torch.autograd.grad(F.rms_norm(x, (FEATURES,), gain, 1e-5), (x, gain), dx)

    def activation() -> object:
        return torch.autograd.grad(F.silu(a) * b, (a, b), da)

    moved = 4 * NORM_NUMBERS * x.numel()
    yield _reading("norm", "norm both ways", subject, clock.each(norm), moved, "GB/s")
    moved = 4 * ACTIVATION_NUMBERS * a.numel()
    yield _reading("activation", "silu(a) b both ways", subject, clock.each(activation), moved, "GB/s")


def launch(clock: Clock, subject: str) -> Reading:
    """An operation on a few numbers, noted for backward."""
    a, b = (torch.randn(64, device=clock.me.device, requires_grad=True) for _ in range(2))
    return _reading(
        "a small operation", "a b of 64 numbers, noted for backward", subject, clock.each(lambda: a * b), 1, "us"
    )


def from_host(clock: Clock, subject: str) -> Reading:
    """A copy of pinned memory to the device."""
    there = torch.empty(64 << 20, dtype=torch.uint8, device=clock.me.device)
    here = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    took = clock.each(lambda: there.copy_(here, non_blocking=True))
    return _reading("copies from the host", "64 MiB from the host, pinned", subject, took, here.numel(), "GB/s")


def on_disk(clock: Clock, subject: str, folder: Path) -> Reading:
    """A file for each rank, written and synchronised.

    Raises:
        OSError: the folder cannot be written to.
    """
    path, content = folder / f".titan-doctor-{clock.me.number}", os.urandom(DISK_BYTES)

    def write() -> None:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    try:
        took = clock.each(write)
    finally:
        path.unlink(missing_ok=True)
    return _reading("disk", f"{DISK_BYTES >> 20} MiB to {folder}, fsync", subject, took, DISK_BYTES, "GB/s")


def _kind(clock: Clock) -> str:
    return clock.me.device.type


def _reading(
    kind: str, name: str, subject: str, took: Time, work: float, unit: str, about: dict[str, Any] | None = None
) -> Reading:
    return Reading(
        kind=kind, name=name, subject=subject, seconds=took.seconds, spread=took.spread, work=work, unit=unit,
        about=about or {},
    )  # fmt: skip
