"""float8: matrix products of linears in 8-bit floats, with dynamic scaling (torchao).

A linear y = x W^T has three products, y, dL/dx = g W and dL/dW = g^T x with g = dL/dy. Before each, its operands A are
cast to q(A) = float8(s A) with s = F / max|A|, F the largest float8 number (448 in e4m3), and

    A B  ~  (q(A) q(B)) / (s_A s_B),      summed in float32, returned in the run's precision.

FP8 formats and training: arXiv 2209.05433. The `recipe` sets which values share one scale:

    tensorwise          a tensor; x and W in e4m3, g in e5m2 (more range, fewer digits). The fastest.
    rowwise             a row of A, a column of B, so an outlier spoils its own row only; all in e4m3, scales rounded
                        down to powers of 2, which lose nothing. Each operand is cast twice, once per direction.
    rowwise_with_gw_hp  the same, with dL/dW in the run's precision and W in one scale for dL/dx. The most accurate.
    mxfp8               32 numbers along a sum, all in e4m3 (OCP Microscaling 1.0; arXiv 2506.08027): 1 / s is a power
                        of 2, rounded up so that nothing overflows. Products of blocks are scaled in the hardware.
    mxfp8_with_gw_hp    the same, with dL/dW in the run's precision.

Weights, gradients, optimizer state, norms, attention and embedding stay in the run's precision, as do linears whose
sizes are not multiples of 16, which tensor cores require (32 with mxfp8). Which linears are converted follows from the
model, `filter` and `head` alone, never from the layout. `head` converts the projection to logits, which is the most
sensitive to rounding; its dL/dW stays in the run's precision with mxfp8. Meant to go with bf16.

Where a device has no such products, they are emulated: the same rounded operands multiplied in float32 (bf16 with
mxfp8), slower than without float8. By default a run says so in a warning and goes on: so the TOML of a large job
rehearses on a laptop, with the numbers of the large one. `emulate = "never"` refuses instead. mxfp8 is refused unless
`emulate = "always"`: a GPU that lacks it may well have the other recipes, at full speed. PyTorch 2.13 has all but
mxfp8's on CPUs too, so these are not emulated there; they are slower than bf16's.

Cost: products at up to twice bf16's FLOP/s where the hardware has float8 (CUDA capability 8.9 and up; 10.0 for mxfp8),
and a pass over each operand for its maximum and its cast, which only `compile` fuses; by torchao's measurements on
H100s, linears below about 2,000 x 1,000 get slower. Weights are cast in every micro batch. Activations are saved in the
run's precision: no memory is saved. A head is not compiled: while the gradient of its logits is cast, 10 bytes per
number exist besides, or 12.4 with mxfp8, of the tokens that the loss projects at once. `fsdp_all_gather` casts a shard
of a layer before it is gathered, half of bf16's bytes, with one all-reduce for the scales of all weights, per step and
per batch of a validation. Selective recomputation saves products, and maxima of tensors and rows; from PyTorch 2.14 on
compiled blocks take that of their last weight again.

Limits: the curve depends on the layout. A scale covers the tokens of one micro batch on one rank, padding too; in the
head, those that the loss projects at once. Only with `rowwise_with_gw_hp` and `mxfp8_with_gw_hp`, whose scales stay
within rows, is the curve independent of how the batch is divided. Slices of tensor parallelism have scales of their
own, so no rank waits for another's maximum. With `fsdp_all_gather` a weight has one scale, and is rounded once, from
fp32, else from the run's precision too. A schedule that splits the backward does all its products twice, once in each
half. Rowwise products come out in bf16 in an fp32 run too. A tied head, or one with a soft cap, is not converted. The
plan counts float8 products at the cluster file's rate for float8, and does not ask whether its device has mxfp8.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan.contracts import Batch, BuildContext, Costs, Fact, Job, ModelPart, ModelSpec, Technique, option, register
from titan.contracts.base.cost import Elementwise, Matmul, Operation
from titan.contracts.base.spec import glob_matches, nearest
from titan.contracts.plugin.options import did_you_mean
from titan.errors import ConfigError
from titan.packages import install

_log = logging.getLogger("titan.float8")
_PASSES = {"tensorwise": 1.5, "rowwise": 4.5, "rowwise_with_gw_hp": 4.5, "mxfp8": 3.0, "mxfp8_with_gw_hp": 3.0}
"""Numbers of the run's precision moved per number that is cast: a maximum read, and each cast read and written."""
MAXIMA = {torch.ops.aten.max.default, torch.ops.aten.amax.default}
"""Of tensors or rows: each a pass over an operand for a few numbers."""
_MX_CAPABILITY = (10, 0)


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """Options of `[plugins.float8]`: scaling recipe, and which linears are converted."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp"] = option(
        "tensorwise", "one scale per tensor, row, or 32 numbers of a row (mxfp8); gw_hp: weight gradients as without"
    )
    filter: tuple[str, ...] = option((), "globs of linear modules in layers to leave unconverted (layers.*.attn.wo)")
    fsdp_all_gather: bool = option(False, "cast weight shards to float8 before the all-gather (tensorwise, with fsdp)")
    head: bool = option(False, "convert the projection to logits too, if it is not tied to the embedding")
    emulate: Literal["auto", "always", "never"] = option(
        "auto",
        "auto: emulate products on devices without them, with a warning, but refuse mxfp8; always: on all devices; "
        "never: refuse such devices",
    )

    @property
    def mx(self) -> bool:
        """Whether blocks of 32 numbers share a scale."""
        return self.recipe.startswith("mxfp8")

    @property
    def multiple(self) -> int:
        """What the sizes of a product must be multiples of: for tensor cores, or in blocks."""
        return 32 if self.mx else 16


@register
class Float8(Technique):
    """Multiplies matrices of linears in float8, scaled per tensor, row or block of 32 (torchao)."""

    name = "float8"
    Config = Float8Config
    config: Float8Config
    phase = "convert"
    preserves_numerics = False

    def __init__(self, config: Float8Config) -> None:
        super().__init__(config)
        self._context: BuildContext | None = None

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """The package must be there, the options fit each other, and every slice of a product come out even."""
        if find_spec("torchao") is None:
            yield f"torchao is missing: {install('float8')}"
        if self.config.fsdp_all_gather:
            yield from self._check_gather(job)
        with torch.device("meta"):
            model = job.model.build()
        linears, multiple = _linears(model, spec), self.config.multiple
        kinds = {f"{spec.layers}.*.{name.removeprefix(f'{spec.layers}.').partition('.')[2]}" for name in linears}
        for glob in self.config.filter:
            if not any(glob_matches(glob, name) for name in linears):
                yield f"filter names {glob!r}, which matches no linear module of a layer{did_you_mean(glob, kinds)}"
        converted = {name: linear for name, linear in linears.items() if self._converts(name, linear)}
        if not converted:
            yield f"no linear is left to convert: each is in filter or has a size that is no multiple of {multiple}"
        if self.config.head:
            head = model.get_submodule(spec.head[-1])
            if wrong := self._wrong_head(head, spec):
                yield wrong
            else:
                converted[spec.head[-1]] = head
        yield from _check_slices(job, spec, converted, multiple)
        tokens = job.micro_batch * job.data.seq_len // job.layout.degree_of("sliced")
        if not self.config.recipe.endswith("gw_hp") and tokens % multiple:
            yield (
                f"a micro batch of {job.micro_batch} x {job.data.seq_len} tokens is {tokens} per rank, no multiple of "
                f'{multiple} as weight gradients need; change either, or set recipe = "{self._high_precision()}"'
            )

    def facts(self) -> dict[Fact, str]:
        why = "[plugins.float8] fsdp_all_gather = true gives weights a gather of their own; set it to false"
        return {"casts_in_gather": why} if self.config.fsdp_all_gather else {}

    def _high_precision(self) -> str:
        return "mxfp8_with_gw_hp" if self.config.mx else "rowwise_with_gw_hp"

    def _wrong_head(self, head: nn.Module, spec: ModelSpec) -> str:
        """Why the projection to logits cannot be converted; empty if it can."""
        name, multiple = spec.head[-1], self.config.multiple
        tied = next((pair for pair in spec.tied if f"{name}.weight" in pair), ())
        for other in (one for one in tied if one != f"{name}.weight"):
            return f"head = true needs a head of its own, but {name}.weight is {other}; untie them, or set head = false"
        if type(head) is not nn.Linear:
            return f"head = true needs {name} to be an nn.Linear, but it is a {type(head).__name__}; set head = false"
        if head.in_features % multiple or head.out_features % multiple:
            fits = nearest(spec.vocab_size, step=multiple)
            return (
                f"head = true: {name} has {head.in_features} x {head.out_features} features, which must be multiples "
                f"of {multiple}; nearest [model] vocab_size that fits: {fits}, or set head = false"
            )
        return ""

    def _check_gather(self, job: Job) -> Iterator[str]:
        if self.config.recipe != "tensorwise":
            yield f'fsdp_all_gather needs recipe = "tensorwise": with {self.config.recipe!r} a shard has many scales'
        if not job.provides("gathered_parameters"):
            yield "fsdp_all_gather needs [plugins.fsdp]; add that table"
        for why in job.stating("weights_on_host"):  # their maxima would be, and the device's collectives sum none there
            yield f"fsdp_all_gather scales shards on the device; set it to false, or: {why}"

    def _converts(self, name: str, linear: nn.Linear) -> bool:
        even = linear.in_features % self.config.multiple == 0 and linear.out_features % self.config.multiple == 0
        return even and not any(glob_matches(glob, name) for glob in self.config.filter)

    def cost(self, costs: Costs, job: Job) -> Costs:
        """Products in float8, but for linears left out; each operand passed over for its maximum and its cast.

        Weights are cast in each micro batch, but for shards cast before the gather. Stacks of weights are no linears.
        A converted head runs outside of compiled layers: casting its weight, or the gradient of its logits, copies it.
        """
        layer = tuple(part for op in costs.layer for part in self._parts(op, job.spec))
        name = job.spec.head[-1] if self.config.head else ""
        head = tuple(
            replace(op, dtype="float8") if isinstance(op, Matmul) and op.module == name else op for op in costs.head
        )
        tokens, slices = costs.tokens / job.layout.degree_of("sliced"), job.layout.degree_of("slices")
        words = sum(op.outputs for op in head if isinstance(op, Matmul) and op.dtype)
        weight = sum(op.inputs * op.outputs for op in head if isinstance(op, Matmul) and op.dtype)
        each = _copies(self.config) / slices
        widened = costs.itemsize / 4 / slices * (self.config.emulate == "always")  # an emulated product's weight
        fixed = (each + widened) * weight
        copies = replace(self._casts(head, tokens), scratch=each * words * tokens, fixed_scratch=fixed)
        return replace(
            costs, layer=(*layer, self._casts(layer, tokens)), head=(*head, copies) if self.config.head else head
        )

    def _parts(self, op: Operation, spec: ModelSpec) -> Iterator[Operation]:
        """An operation of the mean layer: as in the layers that convert it, and as in those that do not."""
        if not isinstance(op, Matmul) or op.stack > 1:
            yield op
            return
        names = [f"{layer}.{op.module}" for layer in spec.layer_names()]
        kept = sum(any(glob_matches(glob, name) for glob in self.config.filter) for name in names) / len(names)
        kept = 1.0 if op.inputs % self.config.multiple or op.outputs % self.config.multiple else kept
        if kept:
            yield replace(op, of_layers=op.of_layers * kept)
        if kept < 1:
            yield replace(op, of_layers=op.of_layers * (1 - kept), dtype="float8")

    def _casts(self, operations: Iterable[Operation], tokens: float) -> Elementwise:
        converted = [op for op in operations if isinstance(op, Matmul) and op.dtype]
        moved = sum(op.of_layers * op.used * (op.inputs + op.outputs) for op in converted)
        if not self.config.fsdp_all_gather:
            moved += sum(op.of_layers * op.inputs * op.outputs for op in converted) / tokens
        moved *= _PASSES[self.config.recipe]
        return Elementwise(region="tp_sharded", forward=moved, backward=moved)

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Swap the linears of the whole model; names and parameters stay.

        Raises:
            ConfigError: the device has no such products, and the options forbid to emulate them.
        """
        emulate = self._emulates(context)
        if not self.config.mx:  # maxima of blocks are many; a product is one of two matrices, in whatever format
            part.costly |= MAXIMA
        linears = _linears(part.module, context.spec)
        names = {name for name, linear in linears.items() if self._converts(name, linear)}
        _convert(part.module, names, self.config, emulate)
        if self.config.head:
            # The loss may project any number of tokens at a time, and computes with parameters of its own.
            high = self._high_precision() if self.config.mx else self.config.recipe
            head: Any = replace(self.config, recipe=high, fsdp_all_gather=False)
            _convert(part.module, {context.spec.head[-1]}, head, emulate, pad=True)
        if self.config.recipe != "tensorwise" and any(t.phase == "compile" for t in context.techniques):
            # A power of 2 is a step: what is recomputed in a backward must round as the forward did, or scales differ
            # by a factor of 2 and turn into NaN (github.com/pytorch/pytorch/issues/150859).
            import torch._inductor.config

            torch._inductor.config.emulate_precision_casts = True
        self._context = context

    def _emulates(self, context: BuildContext) -> bool:
        if self.config.emulate == "always":
            return True
        if context.device.type == "meta":  # a dry run, of any device
            return self.config.mx or bool(_lacks(context, self.config))
        said = _lacks(context, self.config)
        if said and (self.config.emulate == "never" or self.config.mx):
            raise ConfigError(
                f"[plugins.float8] recipe = {self.config.recipe!r} needs matrix products of {_needed(self.config)}, "
                f'but this device is {said}; use another device or recipe, or set emulate = "always" to rehearse it'
            )
        if said:
            _log.warning(
                f"float8 makes this run slower: products are emulated in float32, as they need {_needed(self.config)} "
                f"and this device is {said}; remove [plugins.float8] for speed"
            )
        return bool(said)

    def batch(self, batch: Batch) -> Batch:
        """Scale weights for a forward without gradients: an optimizer may have others for it than it trains."""
        if not torch.is_grad_enabled():
            self._scale()
        return batch

    def before_step(self, step: int) -> None:
        """Scale weights, which an update, another technique's exchange, a checkpoint or a validation has changed."""
        self._scale()

    def _scale(self) -> None:
        """One all-reduce for the scales of all gathered weights, instead of one for each."""
        if self.config.fsdp_all_gather:
            assert self._context is not None, "a step before the model was converted"
            for part in self._context.parts:
                _torchao().precompute_float8_dynamic_scale_for_fsdp(part.module)

    def close(self) -> None:
        """Forget the scales, which are of the last step: a sample made now scales each weight as it is gathered."""
        for part in self._context.parts if self._context is not None else ():
            for _, weight in part.parameters():
                # The very tensors that it holds: to_local() makes one of its own, of a parameter.
                for held in weight.__tensor_flatten__()[0] if isinstance(weight, DTensor) else ():
                    if hasattr(local := getattr(weight, held), "_precomputed_scale"):
                        local._precomputed_scale = None


def _linears(model: nn.Module, spec: ModelSpec) -> dict[str, nn.Linear]:
    """The linears inside layers by name, but for those whose weight is another's too."""
    tied = {name for pair in spec.tied for name in pair}
    layers = tuple(f"{name}." for name in spec.layer_names())
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(layers) and f"{name}.weight" not in tied
    }


def _check_slices(job: Job, spec: ModelSpec, linears: dict[str, nn.Linear], multiple: int) -> Iterator[str]:
    """Hold the slices that the spec makes of each linear against the multiple; a glob is said once."""
    axes = {axis: job.layout.degree(axis) for axis in job.layout.axes_of("slices")}
    ranks = job.layout.degree_of("slices")
    said = set()
    for name, linear in linears.items():
        glob, style = next(((g, s) for g, s in spec.tensor.items() if glob_matches(g, name)), ("", None))
        kind, features = ("input", linear.in_features) if style == "row" else ("output", linear.out_features)
        if style not in ("column", "row", "head") or glob in said or features % (multiple * ranks) == 0:
            continue
        said.add(glob)
        split = " x ".join(f"mesh.{axis} = {degree}" for axis, degree in axes.items() if degree > 1)
        fits = _nearest_degree(ranks, features // multiple)
        yield (
            f"{glob}: {features} {kind} features over {split} must be a multiple of {multiple} per rank; nearest "
            f"that fits: {fits}, or {'set head = false' if style == 'head' else 'name it in filter'}"
        )


def _nearest_degree(ranks: int, blocks: int) -> str:
    return nearest(ranks, lambda degree: blocks % degree == 0, most=blocks)


def _torchao(module: str = "torchao.float8") -> Any:
    """A module of torchao. Imported late: it takes seconds, and speaks of kernels that training does not use."""
    logging.disable(logging.WARNING)
    try:
        return import_module(module)
    finally:
        logging.disable(logging.NOTSET)


def _convert(module: nn.Module, names: Collection[str], config: Float8Config, emulate: bool, pad: bool = False) -> None:
    """Swap linears of a module by name. pad: products take any number of tokens."""
    if config.mx:
        for name in names:
            module.set_submodule(name, _mx_linear(module.get_submodule(name), config, emulate))
        return
    found = _torchao()
    settings = found.Float8LinearConfig.from_recipe_name(config.recipe)
    settings = replace(settings, enable_fsdp_float8_all_gather=config.fsdp_all_gather, emulate=emulate)
    settings = replace(settings, pad_inner_dim=pad)
    found.convert_to_float8_training(module, module_filter_fn=lambda _, name: name in names, config=settings)


def _copies(config: Float8Config) -> float:
    """float32 numbers per number of an operand while it is cast, uncompiled: two and two in float8, or with mxfp8 three
    and three per block."""
    return 3 + 3 / 32 if config.mx else 2 + 2 / 4


def _mx_linear(linear: Any, config: Float8Config, emulate: bool) -> nn.Module:
    """torchao's linear with the parameters of another; its blocks have scales rounded up, so that nothing overflows."""
    kinds = _torchao("torchao.quantization.quantize_.common").KernelPreference
    of: Any = _torchao("torchao.prototype.moe_training.mxfp8_linear").MXFP8Linear
    with torch.device("meta"):
        converted: nn.Module = of(
            linear.in_features,
            linear.out_features,
            bias=False,
            kernel_preference=kinds.EMULATED if emulate else kinds.AUTO,
            wgrad_with_hp=config.recipe.endswith("gw_hp"),
        )
    converted.register_parameter("weight", linear.weight)
    converted.register_parameter("bias", linear.bias)
    return converted


def _needed(config: Float8Config) -> str:
    return "a GPU of CUDA capability 10.0 or higher, in bf16" if config.mx else "a GPU of CUDA capability 8.9 or higher"


def _lacks(context: BuildContext, config: Float8Config) -> str:
    """The device, if it cannot do all products of a recipe, which is found out by doing them; else empty."""
    device = context.device
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        said = f"a {torch.cuda.get_device_name(device)} of capability {'.'.join(map(str, capability))}"
        if config.mx and capability < _MX_CAPABILITY:
            return said
    else:
        said = f"a {device.type}"
    settings: dict[str, Any] = {"device": device, "dtype": context.precision.param_dtype}
    with torch.device("meta"):
        linear = nn.Linear(64, 64, bias=False)
    linear.weight = nn.Parameter(torch.ones(64, 64, **settings))
    trial = nn.Sequential(linear)
    try:
        _convert(trial, {"0"}, replace(config, fsdp_all_gather=False), emulate=False)
        trial(torch.ones(config.multiple, 64, requires_grad=True, **settings)).sum().backward()
    except (RuntimeError, ValueError, AssertionError) as error:
        _log.debug(f"float8: asked for a product, the device said: {error}")
        return said
    return ""
