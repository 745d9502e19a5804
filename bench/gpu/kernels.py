"""Single operations: rates of the device, attention kernels, the loss and the head at a real vocabulary."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from bench.gpu.records import Row
from bench.gpu.setting import Setting
from titan.contracts import Projection
from titan.layers.experts import stacked_product
from titan.planner.doctor import device as doctor
from titan.planner.doctor.clock import Clock
from titan.planner.doctor.report import rows
from titan.plugins.losses.cross_entropy import CrossEntropy
from titan.plugins.losses.cross_entropy.rows import Slice, loss_and_gradient
from titan.ranks import process

SLOT_S = 0.5
"""Seconds that each rate is measured for."""

BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HEADS = {"head 64": (32, 8, 64), "head 128": (24, 8, 128)}
"""Query heads, key-value heads and features of a head, of Llama 3.2 1B and 3B."""


def rates(setting: Setting) -> Iterator[Row]:
    """What `titan doctor` measures of a device: products, attention, copies, small operations."""
    me = process.here(setting.device.type)
    process.enter(me, 60.0)
    try:
        clock = Clock(me, setting.size(SLOT_S, 0.02))
        readings = [reading for dtype in ("float32", "bfloat16") for reading in doctor.products(clock, "", dtype)]
        readings += [*doctor.attention(clock, ""), *doctor.memory(clock, ""), *doctor.layer(clock, "")]
        readings.append(doctor.launch(clock, ""))
        if not setting.rehearse:
            readings += [*doctor.products(clock, "", "float8"), doctor.from_host(clock, "")]
    finally:
        process.leave()
    for row in rows(readings):
        yield Row(row.name, row.shown(row.middle), row.unit)


def attention(setting: Setting) -> Iterator[Row]:
    """Causal attention, grouped heads, bf16: each backend both ways, and which kernels the default picks."""
    length = setting.size(8192, 128)
    for shape, (heads, kv_heads, width) in HEADS.items():
        q, k, v = _heads(setting, (heads, kv_heads, kv_heads), length, width)
        grad = torch.randn_like(q)
        flops = 2.0 * heads * length * length * width
        for name, backend in BACKENDS.items():
            forward = _attend(backend, q, k, v)
            try:
                first, both = setting.median(forward), setting.median(_both_ways(forward, (q, k, v), grad))
            except RuntimeError as refused:
                yield Row(f"{shape}, {name}", f"refused: {_short(refused)}")
                continue
            yield Row(f"{shape}, {name}: forward", flops / first / 1e12, "TFLOP/s")
            yield Row(f"{shape}, {name}: forward and backward", 3.5 * flops / both / 1e12, "TFLOP/s")
        yield Row(f"{shape}: kernels of the default", ", ".join(_kernels(setting, _attend(None, q, k, v))))


def generators(setting: Setting) -> Iterator[Row]:
    """Whether attention without dropout advances the generator of the device, which titan refuses in a step."""
    for name, backend in BACKENDS.items():
        q, k, v = _heads(setting, (4, 2, 2), 256, 64)
        work = _both_ways(_attend(backend, q, k, v), (q, k, v), torch.randn_like(q))
        before = _generator(setting)
        try:
            work()
        except RuntimeError as refused:
            yield Row(name, f"refused: {_short(refused)}")
            continue
        same = torch.equal(before, _generator(setting))
        # What a run uses must leave it alone; the others are for the reader who switches to them.
        yield Row(
            f"{name} leaves the generator alone", "yes" if same else "no", passed=same or name != "default" or None
        )


def loss(setting: Setting) -> Iterator[Row]:
    """titan's loss and `F.cross_entropy` on logits in float32: seconds both ways, and memory beyond the logits."""
    count, words = setting.size((8192, 128_256), (64, 1000))
    logits = torch.randn(1, count, words, device=setting.device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(words, (1, count), device=setting.device)
    ours = CrossEntropy(CrossEntropy.Config())
    losses: dict[str, Callable[[], Tensor]] = {
        "titan": lambda: ours.compute(logits, labels)[0],
        "F.cross_entropy": lambda: F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum"),
    }
    gradients = {}
    for name, value in losses.items():
        gradients[name] = torch.autograd.grad(value(), logits)[0]
        yield Row(f"{name}: forward and backward", 1e3 * setting.median(_grad(value, logits)), "ms")
        yield Row(f"{name}: peak memory beyond the logits", setting.peak_gib(_grad(value, logits)), "GiB")
    worst = (gradients["titan"] - gradients["F.cross_entropy"]).abs().max().item()
    yield Row("largest difference of a gradient", worst, "(at most 0.01)", worst <= 0.01)


def passes(setting: Setting) -> Iterator[Row]:
    """titan's passes over logits in bf16, which leave their gradient in their place."""
    count, words = setting.size((8192, 128_256), (64, 1000))
    logits = torch.randn(count, words, device=setting.device, dtype=torch.bfloat16)
    labels, factor = torch.randint(words, (count,), device=setting.device), torch.ones((), device=setting.device)
    seconds = setting.median(lambda: loss_and_gradient(logits, logits, labels, Slice(0, words), 0.0, factor))
    yield Row("logits become gradients", 1e3 * seconds, "ms (at most 3)", setting.rehearse or seconds <= 3e-3)
    yield Row("moved, by count", 2 * logits.nbytes / 1e9, "GB")
    yield Row("rate", 2 * logits.nbytes / seconds / 1e12, "TB/s")


def fused_loss(setting: Setting) -> Iterator[Row]:
    """titan's head and loss in bf16, both ways, beside the products of the head."""
    count, width, words = setting.size((8192, 2048, 128_256), (64, 64, 1000))
    head = nn.Linear(width, words, bias=False, device=setting.device, dtype=torch.bfloat16)
    hidden = torch.randn(1, count, width, device=setting.device, dtype=torch.bfloat16).requires_grad_()
    labels, factor = torch.randint(words, (1, count), device=setting.device), torch.ones((), device=setting.device)
    upstream = torch.ones(1, count, words, device=setting.device, dtype=torch.bfloat16)
    products = _both_ways(lambda: head(hidden), (hidden, head.weight), upstream)
    yield Row("products alone", 1e3 * setting.median(products), "ms")
    project = Projection(head, head.forward, words, factor)
    for name, size in {"in chunks": None, "all logits at once": count}.items():
        ours = CrossEntropy(CrossEntropy.Config(chunk_tokens=size))
        both = _grad(lambda loss=ours: loss.of_hidden(hidden, labels, project)[0], (hidden, head.weight))
        yield Row(name, 1e3 * setting.median(both), "ms")
        yield Row(f"{name}: peak memory", setting.peak_gib(both), "GiB")


def head(setting: Setting) -> Iterator[Row]:
    """The output matrix alone, both ways, in bf16 and in float8: what a float8 head would win."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    count, width, words = setting.size((8192, 2048, 128_256), (64, 64, 512))
    x = torch.randn(count, width, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(count, words, device=setting.device, dtype=torch.bfloat16)
    flops = 6.0 * count * width * words
    for name in ("bf16", "tensorwise", "rowwise"):
        model = nn.Sequential(nn.Linear(width, words, bias=False, device=setting.device, dtype=torch.bfloat16))
        if name != "bf16":
            # Only for PyTorch 2.11: on CPUs it has no product with a scale per row.
            config = replace(Float8LinearConfig.from_recipe_name(name), emulate=setting.rehearse)
            model = convert_to_float8_training(model, config=config)
        compiled = torch.compile(model, backend=setting.size("inductor", "aot_eager"))
        seconds = setting.median(_both_ways(lambda f=compiled: f(x), (x, *model.parameters()), grad))
        yield Row(f"{name}: forward and backward", flops / seconds / 1e12, "TFLOP/s")


def experts(setting: Setting) -> Iterator[Row]:
    """The product of experts in bf16, one of them without tokens, and its gradients, against float32 on the CPU."""
    stack, width = setting.size((8, 512), (4, 16))
    counts = torch.arange(stack) * 100 + 3
    counts[stack // 2] = 0
    draws = torch.Generator().manual_seed(3)
    shapes = (int(counts.sum()), width), (stack, 2 * width, width)
    inputs = [torch.randn(shape, generator=draws).bfloat16() for shape in shapes]
    grad = torch.randn(shapes[0][0], 2 * width, generator=draws).bfloat16()
    found = []
    for device, dtype in (("cpu", torch.float32), (setting.device, torch.bfloat16)):
        rows, weight = (each.to(device, dtype).requires_grad_() for each in inputs)
        out = stacked_product(rows, weight.transpose(1, 2), counts.to(device))
        gradients = torch.autograd.grad(out, (rows, weight), grad.to(device, dtype))
        found.append([each.detach().float().cpu() for each in (out, *gradients)])
    for name, exact, ours in zip(("result", "gradient of rows", "gradient of weights"), *found, strict=True):
        apart = ((ours - exact).norm() / exact.norm()).item()
        yield Row(f"{name}: relative difference", apart, "(at most 0.01)", passed=apart <= 0.01)
    empty = found[1][2][stack // 2].abs().max().item()
    yield Row("largest gradient of the expert without tokens", empty, "(0)", passed=empty == 0)


def _heads(setting: Setting, counts: tuple[int, int, int], length: int, width: int) -> tuple[Tensor, ...]:
    settings: dict[str, Any] = {"device": setting.device, "dtype": torch.bfloat16, "requires_grad": True}
    return tuple(torch.randn(1, count, length, width, **settings) for count in counts)


def _attend(backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def chosen() -> Tensor:
        with sdpa_kernel(backend):
            return forward()

    return forward if backend is None else chosen


def _both_ways(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(forward(), inputs, grad)


def _grad(value: Callable[[], Tensor], of: Tensor | tuple[Tensor, ...]) -> Callable[[], object]:
    return lambda: torch.autograd.grad(value(), of)


def _generator(setting: Setting) -> Tensor:
    return torch.get_rng_state() if setting.rehearse else torch.cuda.get_rng_state()


def _kernels(setting: Setting, work: Callable[[], object]) -> list[str]:
    """Names of the device's kernels of a call (operations on a CPU), the longest first."""
    kind = setting.size(ProfilerActivity.CUDA, ProfilerActivity.CPU)
    with profile(activities=[kind]) as seen:
        work()
        setting.synchronize()
    device = setting.size(torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU)
    events = [event for event in seen.events() if event.device_type == device]
    events.sort(key=lambda event: -event.time_range.elapsed_us())
    return list(dict.fromkeys(event.name[:60] for event in events))[:2]


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0][:60]
