"""Measures a rank's device: matrix products, attention, memory, launch overhead, host-to-device copies, disk."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from titan.layers.products import product
from titan.planner.doctor.clock import Clock, Time
from titan.planner.doctor.report import Reading

SIZES = {
    "cpu": ((128, 64), (128, 128), (256, 128), (256, 256), (512, 256), (512, 512), (1024, 1024), (2048, 1024)),
    "cuda": ((512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (16384, 8192)),
}
"""Sizes of matrix products by device type: rows (tokens); columns and reduction length (features)."""

DTYPES = {"cpu": ("float32", "bfloat16", "float16"), "cuda": ("float32", "bfloat16", "float16", "float8")}
LAYER_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 26}
ATTENTION = {"cpu": (2, 8, 256, 32), "cuda": (2, 16, 4096, 128)}
"""Batch, heads, sequence length, head dimension: usual sizes on that device; smaller ones reach less."""

LARGE_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
DISK_BYTES = 32 << 20
FEATURES = 1024
NORM_NUMBERS, ACTIVATION_NUMBERS = 5, 13
"""Elements read and written per element of the result, forward and backward, as the cost model counts them: a norm is
one kernel, an activation several."""

PRODUCTS, LAUNCH, FROM_HOST = "matrix products in ", "launch overhead", "host-to-device copies"
"""Kinds of readings, the first with a dtype behind."""

WIDER = 2
"""Width of the activation relative to the norm, its weight in the mean of both."""


def measure(clock: Clock, subject: str, disk: Path | None) -> list[Reading]:
    """Measure this rank's device; all ranks call it. disk: folder to measure writes in, or None."""
    taken = [reading for dtype in DTYPES[_kind(clock)] for reading in products(clock, subject, dtype)]
    taken += attention(clock, subject)
    taken += memory(clock, subject)
    taken += layer(clock, subject)
    taken.append(launch(clock, subject))
    if clock.me.device.type != "cpu":
        taken.append(from_host(clock, subject))
    return taken if disk is None else [*taken, on_disk(clock, subject, disk)]


def slots(device: torch.device) -> int:
    """Maximum number of measurements that `measure` takes, without the disk."""
    return len(SIZES[device.type]) * len(DTYPES[device.type]) + 8


def products(clock: Clock, subject: str, dtype: str) -> Iterator[Reading]:
    """Matrix products of a linear layer, forward and backward (x W', dy W, dy' x), by size.

    Ends at the first size whose call would exceed the time slot.
    """
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
        name = f"matrix products, {dtype}, {rows} x {features} x {features}"
        yield _reading(PRODUCTS + dtype, name, subject, took, flops, "TFLOP/s", about)


def _linear(clock: Clock, rows: int, features: int, dtype: str) -> Any:
    x, w, dy = (
        torch.randn(n, features, device=clock.me.device, dtype=getattr(torch, dtype)) for n in (rows, features, rows)
    )
    return lambda: (product(x, w.t()), product(dy, w), product(dy.t(), x))


def _float8(clock: Clock, rows: int, features: int) -> Any:
    x = torch.randn(rows, features, device=clock.me.device).to(torch.float8_e4m3fn)
    w = torch.randn(features, features, device=clock.me.device).to(torch.float8_e4m3fn)
    one, whole = torch.ones((), device=clock.me.device), F.ScalingType.TensorWise
    return lambda: F.scaled_mm(x, w.t(), one, whole, one, whole)


def _has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def attention(clock: Clock, subject: str) -> Iterator[Reading]:
    """Causal attention: forward, and forward with backward. FLOPs count the unmasked half only."""
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
    yield _reading(kind, f"attention forward + backward, {size}", subject, both, 3.5 * flops, "TFLOP/s", about)


def memory(clock: Clock, subject: str) -> Iterator[Reading]:
    """Memory bandwidth: copy and sum of large tensors."""
    numbers = LARGE_BYTES[_kind(clock)] // 4
    x, y, z = (torch.ones(numbers, device=clock.me.device) for _ in range(3))
    copied, summed = clock.each(lambda: y.copy_(x)), clock.each(lambda: torch.add(x, y, out=z))
    yield _reading("memory", "copy of large tensors", subject, copied, 8 * numbers, "GB/s")
    yield _reading("memory", "sum of large tensors", subject, summed, 12 * numbers, "GB/s")


def layer(clock: Clock, subject: str) -> Iterator[Reading]:
    """Elementwise bandwidth: RMSNorm and SwiGLU of a layer's size, forward and backward."""
    device, rows = clock.me.device, LAYER_NUMBERS[_kind(clock)] // FEATURES
    x, gain = (torch.randn(shape, device=device, requires_grad=True) for shape in ((rows, FEATURES), (FEATURES,)))
    a, b = (torch.randn(rows, WIDER * FEATURES, device=device, requires_grad=True) for _ in range(2))
    dx, da = torch.randn_like(x), torch.randn_like(a)

    def norm() -> object:
        return torch.autograd.grad(F.rms_norm(x, (FEATURES,), gain, 1e-5), (x, gain), dx)

    def activation() -> object:
        return torch.autograd.grad(F.silu(a) * b, (a, b), da)

    moved = 4 * NORM_NUMBERS * x.numel()
    yield _reading("norm", "RMSNorm forward + backward", subject, clock.each(norm), moved, "GB/s")
    moved = 4 * ACTIVATION_NUMBERS * a.numel()
    yield _reading("activation", "SwiGLU forward + backward", subject, clock.each(activation), moved, "GB/s")


def launch(clock: Clock, subject: str) -> Reading:
    """Launch overhead: an operation on 64 elements, recorded by autograd."""
    a, b = (torch.randn(64, device=clock.me.device, requires_grad=True) for _ in range(2))
    return _reading(LAUNCH, "multiply 64 elements, with autograd", subject, clock.each(lambda: a * b), 1, "us")


def from_host(clock: Clock, subject: str) -> Reading:
    """Host-to-device copy of 64 MiB of pinned memory."""
    there = torch.empty(64 << 20, dtype=torch.uint8, device=clock.me.device)
    here = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    took = clock.each(lambda: there.copy_(here, non_blocking=True))
    return _reading(FROM_HOST, "host-to-device copy, 64 MiB pinned", subject, took, here.numel(), "GB/s")


def on_disk(clock: Clock, subject: str, folder: Path) -> Reading:
    """Disk write: one file per rank, with fsync.

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
    return _reading("disk", f"disk write, {DISK_BYTES >> 20} MiB to {folder}, fsync", subject, took, DISK_BYTES, "GB/s")


def _kind(clock: Clock) -> str:
    return clock.me.device.type


def _reading(
    kind: str, name: str, subject: str, took: Time, work: float, unit: str, about: dict[str, Any] | None = None
) -> Reading:
    return Reading(
        kind=kind,
        name=name,
        subject=subject,
        seconds=took.seconds,
        spread=took.spread,
        work=work,
        unit=unit,
        about=about or {},
    )
