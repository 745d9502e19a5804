"""float8: matrix products of the layers' linears in 8-bit floats, with dynamic scaling (torchao).

A linear y = x W^T has three products, y, dL/dx = g W and dL/dW = g^T x with g = dL/dy. Before each, its operands A are
cast to q(A) = float8(s A) with s = F / max|A|, F the largest float8 number (448 in e4m3), and

    A B  ~  (q(A) q(B)) / (s_A s_B),      summed in float32, returned in the run's precision.

FP8 formats and training: arXiv 2209.05433. The `recipe` sets which values share one scale:

    tensorwise          a tensor; x and W in e4m3, g in e5m2 (more range, fewer digits). The fastest.
    rowwise             a row of A, a column of B, so an outlier spoils its own row only; all in e4m3, scales rounded
                        down to powers of 2, which lose nothing. Each operand is cast twice, once per direction.
    rowwise_with_gw_hp  the same, with dL/dW in the run's precision and W in one scale for dL/dx. The most accurate.

Weights, gradients, optimizer state, norms, attention, embedding and head stay in the run's precision, as do linears
whose sizes are not multiples of 16, which tensor cores require. Which linears are converted follows from
the model and `filter` alone, never from the layout. Meant to go with bf16.

Cost: products at up to twice bf16's FLOP/s where the hardware has float8 (CUDA capability 8.9 and up), and a pass over
each operand for its maximum and its cast, which only `compile` fuses; by torchao's measurements on H100s, linears below
about 2,000 x 1,000 get slower. Activations are saved in the run's precision: no memory is saved. `fsdp_all_gather`
casts a shard before it is gathered, half of bf16's bytes, with one all-reduce per step for the scales of all weights.
On other hardware products are emulated: the same rounded operands multiplied in float32, slower than without float8.

Limits: the curve depends on the layout. A scale covers the tokens of one micro batch on one rank. Only with
`rowwise_with_gw_hp`, whose scales cover single rows, is the curve independent of how the batch is divided. Slices of
tensor parallelism have scales of their own, so no rank waits for another's maximum. With `fsdp_all_gather` a weight has
one scale, and is rounded once, from fp32, else from the run's precision too. A schedule that splits the backward does
all its products twice, once in each half. Rowwise products come out in bf16 in an fp32 run too.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from titan.contracts import BuildContext, Costs, Job, ModelPart, ModelSpec, Technique, option, register
from titan.contracts.base.cost import Elementwise, Matmul
from titan.contracts.base.options import did_you_mean
from titan.contracts.base.spec import glob_matches, nearest
from titan.errors import install

_log = logging.getLogger("titan.float8")
_MULTIPLE = 16
"""What the sizes of a float8 product must be multiples of on tensor cores."""


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """Options of `[plugins.float8]`: scaling recipe, and which linears are converted."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = option(
        "tensorwise", "scaling per tensor, per row, or per row with weight gradients in high precision (hp)"
    )
    filter: tuple[str, ...] = option((), "globs of linear modules in layers to leave unconverted (layers.*.attn.wo)")
    fsdp_all_gather: bool = option(False, "cast weight shards to float8 before the all-gather (tensorwise, with fsdp)")
    emulate: Literal["auto", "always"] = option(
        "auto",
        "auto: emulate float8 products in float32 on devices without float8 matrix products; always: on all devices",
    )


@register
class Float8(Technique):
    """Multiplies the matrices of the layers' linears in float8, scaled per tensor or per row (torchao)."""

    name = "float8"
    Config = Float8Config
    config: Float8Config
    phase = "convert"
    preserves_numerics = False

    def __init__(self, config: Float8Config) -> None:
        super().__init__(config)
        self._context: BuildContext | None = None
        self._scaled = False

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """The package must be there, the options fit each other, and every slice of a product come out even."""
        if find_spec("torchao") is None:
            yield f"torchao is missing: {install('float8')}"
        if self.config.fsdp_all_gather:
            yield from self._check_gather(job)
        with torch.device("meta"):
            linears = _linears(job.model.build(), spec)
        kinds = {f"{spec.layers}.*.{name.removeprefix(f'{spec.layers}.').partition('.')[2]}" for name in linears}
        for glob in self.config.filter:
            if not any(glob_matches(glob, name) for name in linears):
                yield f"filter names {glob!r}, which matches no linear module of a layer{did_you_mean(glob, kinds)}"
        converted = {name: linear for name, linear in linears.items() if self._converts(name, linear)}
        if not converted:
            yield f"no linear is left to convert: each is in filter or has a size that is no multiple of {_MULTIPLE}"
        yield from _check_slices(job, spec, converted)
        tokens = job.micro_batch * job.data.seq_len // job.layout.degree_of("sliced")
        if self.config.recipe != "rowwise_with_gw_hp" and tokens % _MULTIPLE:
            yield (
                f"a micro batch of {job.micro_batch} x {job.data.seq_len} tokens is {tokens} per rank, no multiple of "
                f'{_MULTIPLE} as weight gradients need; change either, or set recipe = "rowwise_with_gw_hp"'
            )

    def _check_gather(self, job: Job) -> Iterator[str]:
        if self.config.recipe != "tensorwise":
            yield f'fsdp_all_gather needs recipe = "tensorwise": with {self.config.recipe!r} a shard has many scales'
        if not job.provides("gathered_parameters"):
            yield "fsdp_all_gather needs [plugins.fsdp]; add that table"

    def _converts(self, name: str, linear: nn.Linear) -> bool:
        even = linear.in_features % _MULTIPLE == 0 and linear.out_features % _MULTIPLE == 0
        return even and not any(glob_matches(glob, name) for glob in self.config.filter)

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The layers' products in float8; each operand passed over for its maximum and its cast.

        Linears that `filter` leaves out are counted as converted; stacks of weights are no linears.
        """
        linears = [op for op in costs.layer if isinstance(op, Matmul) and op.stack == 1]
        widths = [op.of_layers * op.used * (op.inputs + op.outputs) for op in linears]
        casts = Elementwise(region="tp_sharded", forward=1.5 * sum(widths), backward=1.5 * sum(widths))
        return replace(costs, dtype="float8", layer=(*costs.layer, casts))

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Swap the linears of the whole model; names and parameters stay."""
        torchao = _torchao()
        config = torchao.Float8LinearConfig.from_recipe_name(self.config.recipe)
        config = replace(config, enable_fsdp_float8_all_gather=self.config.fsdp_all_gather)
        config = replace(config, emulate=self.config.emulate == "always" or not _multiplies(context, config))
        linears = _linears(part.module, context.spec)
        names = {name for name, linear in linears.items() if self._converts(name, linear)}
        torchao.convert_to_float8_training(part.module, module_filter_fn=lambda _, name: name in names, config=config)
        if config.round_scales_to_power_of_2 and any(technique.phase == "compile" for technique in context.techniques):
            # A power of 2 is a step: what is recomputed in a backward must round as the forward did, or scales differ
            # by a factor of 2 and turn into NaN (github.com/pytorch/pytorch/issues/150859).
            import torch._inductor.config

            torch._inductor.config.emulate_precision_casts = True
        self._context = context

    def before_step(self, step: int) -> None:
        """Before the first step of a process: weights are new, or from a checkpoint."""
        if not self._scaled:
            self._scale()

    def after_step(self, step: int) -> None:
        """Weights have changed, and so have their scales."""
        self._scale()

    def _scale(self) -> None:
        """One all-reduce for the scales of all gathered weights, instead of one for each."""
        if self.config.fsdp_all_gather:
            assert self._context is not None, "a step before the model was converted"
            for part in self._context.parts:
                _torchao().precompute_float8_dynamic_scale_for_fsdp(part.module)
        self._scaled = True


def _linears(model: nn.Module, spec: ModelSpec) -> dict[str, nn.Linear]:
    """The linears inside layers by name, but for those whose weight is another's too."""
    tied = {name for pair in spec.tied for name in pair}
    layers = tuple(f"{name}." for name in spec.layer_names())
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(layers) and f"{name}.weight" not in tied
    }


def _check_slices(job: Job, spec: ModelSpec, linears: dict[str, nn.Linear]) -> Iterator[str]:
    """Hold the slices that the spec makes of each linear against the multiple; a glob is said once."""
    axes = {axis: job.layout.degree(axis) for axis in job.layout.axes_of("slices")}
    ranks = job.layout.degree_of("slices")
    said = set()
    for name, linear in linears.items():
        glob, style = next(((g, s) for g, s in spec.tensor.items() if glob_matches(g, name)), ("", None))
        kind, features = ("input", linear.in_features) if style == "row" else ("output", linear.out_features)
        if style not in ("column", "row") or glob in said or features % (_MULTIPLE * ranks) == 0:
            continue
        said.add(glob)
        split = " x ".join(f"mesh.{axis} = {degree}" for axis, degree in axes.items() if degree > 1)
        fits = _nearest_degree(ranks, features)
        yield (
            f"{glob}: {features} {kind} features over {split} must be a multiple of {_MULTIPLE} per rank; nearest "
            f"that fits: {fits}, or name it in filter"
        )


def _nearest_degree(ranks: int, features: int) -> str:
    return nearest(ranks, lambda degree: features % (_MULTIPLE * degree) == 0, most=features // _MULTIPLE)


def _torchao() -> Any:
    """torchao's float8 training. Imported late: it takes a second, and speaks of kernels that training does not use."""
    logging.disable(logging.WARNING)
    try:
        return import_module("torchao.float8")
    finally:
        logging.disable(logging.NOTSET)


def _multiplies(context: BuildContext, config: Any) -> bool:
    """Whether this device can do all products of a recipe; found out by doing them."""
    config = replace(config, enable_fsdp_float8_all_gather=False)
    settings: dict[str, Any] = {"device": context.device, "dtype": context.precision.param_dtype}
    with torch.device("meta"):
        linear = nn.Linear(32, 32, bias=False)
    linear.weight = nn.Parameter(torch.ones(32, 32, **settings))
    try:
        linear = _torchao().convert_to_float8_training(linear, config=config)
        linear(torch.ones(_MULTIPLE, 32, requires_grad=True, **settings)).sum().backward()
    except (RuntimeError, ValueError) as error:
        _log.info(
            f"float8: matrix products are emulated in float32; this {context.device.type} has no such float8 products"
        )
        _log.debug(f"float8: asked for one, it said: {error}")
        return False
    return True
