"""Compressed data parallelism: replicas exchange few bits of their gradients, and keep what was lost for later steps.

Of the axis `dp_replicate`. Each rank has an error e of its own, at first 0, for each of its shards of matrices:

    m = g + e,    c = compress(m),    e = m - c,    the gradient of all = sum of c over the replicas.

So nothing is lost, only late: after any number of steps, what was sent and the errors add up to the gradients (error
feedback: Seide et al., Interspeech 2014; arXiv 1809.07599, 1901.09847). Gradients are summed, never averaged.

    method     what a rank sends of d numbers to n - 1 others, in bytes           source
    powersgd   two all-reduces of rank (rows + columns) numbers per matrix        1905.13727
    topk       the largest, 8 density d (n - 1), by magnitude, with their places  1809.07599
    randk      random ones, an all-reduce of density d numbers                    1809.07599
    sign       a bit per number, d / 8 (n - 1), and the mean magnitude            Seide et al.; 2102.02888
    int8       integers with a scale per block, 2 d (n - 1) / n                   blocks as in 2110.02861

An all-reduce sends 8 d (n - 1) / n. Vectors, matrices of which other ranks than replicas hold copies too (tied tables
of a pipeline, learned positions under tensor parallelism), and matrices whose factors of PowerSGD would be no smaller,
are all-reduced as they are. So is everything in the first `warmup_steps`, in which gradients turn fastest.

Within a replica all else stays: other data-parallel axes have been summed by then, and each rank compresses its own
shards. The exchange is once per step, after the last backward, in pieces of 2^25 numbers, before norm and clipping. A
step whose gradients are not finite on some rank leaves all errors as they were.

Cost: 4 bytes per parameter of a rank for the errors, 70 to 150 bytes read and written per parameter and step (`sign`:
97, and 20 per replica), and the bytes above, none of which overlap computation. It pays on slow networks.

Checkpoints have every replica's errors. At another number of replicas their sum is shared out anew; what is not
compressed at a layout is paid with the first step. PowerSGD's factors come back at the same layout, bit for bit, and
begin anew at another, as the log says. A run that is resumed without this technique drops the errors.

Limits: a loss that is not finite beside finite gradients skips the update after the exchange, so errors have moved by
then, and what was sent is lost. The curve is not that of the sum, and depends on the layout, as shards are compressed
each for itself. Sharding makes matrices flat, which leaves PowerSGD less to save. Replicas add up in one order and are
equal bit for bit if their devices compute alike: use one kind of device. `sign` sends more than an all-reduce from 64
replicas on, `topk` where density x replicas is above 1. 1-bit Adam also stops AdamW's second moments after its warm-up;
here AdamW sees signs, which make all second moments of a tensor alike: prefer `sgd` with `sign`.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.contracts import (
    BuildContext,
    Costs,
    Job,
    Measure,
    ModelPart,
    ModelSpec,
    Own,
    PerRank,
    Technique,
    option,
    register,
    shard_of,
)
from titan.contracts.base.cost import CollectiveCost, EmbeddingOp, Matmul, PersistentState

from .methods import Int8, Method, PowerSGD, RandK, Replicas, Sign, TopK

_log = logging.getLogger("titan.compressed_gradients")
_AXIS = "dp_replicate"
_PIECE = 2**25
"""Numbers that are exchanged together: their copies and sums take a few times 128 MiB for a moment."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[plugins.compressed_gradients]`; the number of replicas is `mesh.dp_replicate`."""

    method: Literal["powersgd", "topk", "randk", "sign", "int8"] = option(
        "powersgd",
        "what replicas send of a gradient: low-rank factors, a share of its numbers, signs or 8-bit integers",
    )
    rank: int = option(4, "powersgd: columns of the factors of a matrix", at_least=1)
    density: float = option(0.01, "topk, randk: share of the numbers of a matrix that is sent", above=0, at_most=1)
    block: int = option(256, "int8: numbers that share one scale", at_least=1)
    warmup_steps: int = option(
        100, "first steps in which gradients are all-reduced as they are", unit="steps", at_least=0
    )


@dataclass(frozen=True)
class _Matrix:
    """A matrix, or a stack of them, that is exchanged compressed. error: placed as the parameter is."""

    parameter: nn.Parameter
    error: Tensor


@register
class CompressedGradients(Technique):
    """Exchanges gradients between replicas compressed, with error feedback (PowerSGD, top-k, random-k, sign, int8)."""

    name = "compressed_gradients"
    Config = Config
    config: Config
    phase = "materialise"
    covers = (_AXIS,)
    provides = ("summed_replicas",)
    conflicts: ClassVar = {"summed_replicas": "both sum gradients over dp_replicate"}
    preserves_numerics = False
    measures: ClassVar = {
        "compression_error": Measure(
            "norm of what compression has left for later steps, relative to that of a rank's own gradients", "mean"
        )
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._method = _method(config)
        self._context: BuildContext | None = None
        self._replicas: Replicas | None = None
        self._matrices: dict[str, _Matrix] = {}
        self._plain: list[tuple[str, nn.Parameter]] = []
        self._too_small: list[Tensor] = []  # of these, shards of matrices that would be sent in no fewer numbers
        self._errors: dict[str, Tensor] = {}  # of all matrices until it is known whose errors were saved
        self._owed: list[str] = []
        self._step = 0
        self._own: Tensor | None = None

    def check(self, job: Job, spec: ModelSpec) -> Iterable[str]:
        """Ranks with weights of their own exchange no gradients; errors need float32."""
        for why in job.stating("narrow_weights"):
            yield f"errors add up what gradients lose, which takes float32: {why}"
        if job.layout.degree_of("own") > 1 and job.layout.degree(_AXIS) > 1:
            axis = job.layout.worker_axis
            yield (
                f"mesh.{axis} = {job.layout.degree(axis)} gives ranks weights of their own, and errors are kept per "
                f"rank of {_AXIS} alone; set mesh.{axis} = 1, or mesh.{_AXIS} = 1"
            )

    def cost(self, costs: Costs, job: Job) -> Costs:
        """The method's collectives in place of an all-reduce, its passes over memory, and the errors."""
        ranks = job.layout.degree(_AXIS)
        if ranks == 1:
            return costs
        shards = tuple(axis for axis in job.layout.axes_of("copies") if axis != _AXIS)
        state = PersistentState(component="optimizer", bytes_per_param=4, axes=costs.updated_over)
        settings: dict[str, Any] = {
            "axes": (_AXIS,),
            "where": "step",
            "when": "update",
            "per_parameter": True,
            "sharded_over": shards,
        }
        sent = (CollectiveCost(**settings, **each) for each in self._sent(costs, job, ranks))
        # 64 for the check, error and gradient; then what the method reads and writes, operation by operation.
        passes = 64 + {"powersgd": 16, "topk": 24, "randk": 8, "sign": 33 + 20 * ranks, "int8": 85}[self.config.method]
        return replace(
            costs,
            state=(*costs.state, state),
            collectives=(*costs.collectives, *sent),
            update_bytes=costs.update_bytes + passes,
        )

    def _sent(self, costs: Costs, job: Job, ranks: int) -> list[dict[str, Any]]:
        """Collective, numbers per parameter and bytes of each; vectors are counted as if they were compressed."""
        density, block = self.config.density, self.config.block
        match self.config.method:
            case "powersgd":
                share = _low_rank_share(costs, job, self.config.rank)
                return [{"collective": "all_reduce", "numel": share, "itemsize": 4}]
            case "topk":
                return [{"collective": "all_gather", "numel": ranks * density, "itemsize": 8}]
            case "randk":
                return [{"collective": "all_reduce", "numel": density, "itemsize": 4}]
            case "sign":
                return [{"collective": "all_gather", "numel": ranks / 8, "itemsize": 1}]
        each = {"numel": 1, "itemsize": 1 + 4 / block}
        return [{"collective": "all_to_all", **each}, {"collective": "all_gather", **each}]

    def apply(self, part: ModelPart, context: BuildContext) -> None:
        """Tell matrices from what is summed as it is, and make room for the errors of one part."""
        self._context = context
        degree = context.mesh.layout.degree(_AXIS)
        if degree > 1:
            self._replicas = Replicas(context.mesh.group(_AXIS), context.mesh.at(_AXIS), degree)
        tied = {name for pair in context.spec.tied for name in pair} if part.stages > 1 else set()
        for name, parameter in part.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim > 1 and name not in self._errors:
                self._errors[name] = torch.zeros_like(parameter.detach())
            copied = name in tied or _is_copied(parameter)
            compressible = degree > 1 and parameter.ndim > 1 and not copied and shard_of(parameter).numel() > 0
            if compressible and self._compresses(shard_of(parameter)):
                self._matrices[name] = _Matrix(parameter, self._errors[name])
                continue
            self._plain.append((name, parameter))
            if compressible:
                self._too_small.append(shard_of(parameter))
        if isinstance(self._method, PowerSGD):
            for name, matrix in self._matrices.items():
                self._method.begin(name, shard_of(matrix.parameter))

    @property
    def _layout(self) -> str:
        """What the factors fit: the degrees, and the columns that are wanted."""
        assert self._context is not None
        return f"{self._context.mesh.layout}, rank {self.config.rank}"

    def _compresses(self, shard: Tensor) -> bool:
        """Whether a shard is sent in fewer numbers than it has."""
        if self.config.method != "powersgd":
            return True
        rows, columns = shard.shape[-2:]
        return self.config.rank * (rows + columns) < rows * columns

    # --- a step -----------------------------------------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        """Number the step: the warm-up ends at one, and random places follow from it."""
        self._step = step

    @torch.no_grad()
    def after_backward(self) -> None:
        """Sum the gradients over the replicas: before those of copies within a replica are added up."""
        if self._replicas is None:
            return
        plain, warm = [_gradient(parameter) for _, parameter in self._plain], self._step > self.config.warmup_steps
        gradients = {name: _gradient(self._matrices[name].parameter) for name in sorted(self._matrices)}
        if not warm:
            self._sum([*plain, *gradients.values()], self._replicas)
            return
        finite = self._are_finite([*plain, *gradients.values()], list(gradients.values()))
        self._sum(plain, self._replicas)
        for names in _piecewise(gradients):
            self._exchange({name: gradients[name] for name in names}, finite, self._replicas)

    def _sum(self, gradients: list[Tensor], replicas: Replicas) -> None:
        """All-reduce as sharded data parallelism does it, in the dtype of reduction."""
        assert self._context is not None
        numbered = {str(number): gradient for number, gradient in enumerate(gradients)}
        for names in _piecewise(numbered):
            piece = [numbered[name] for name in names]
            reduced = replicas.summed([gradient.to(self._context.precision.reduce_dtype) for gradient in piece])
            torch._foreach_copy_(piece, reduced)

    def _are_finite(self, gradients: list[Tensor], compressed: list[Tensor]) -> Tensor:
        """Whether all gradients of all ranks are finite, a boolean on the device; notes the norm of the compressed."""
        assert self._context is not None
        mesh = self._context.mesh
        norms = torch._foreach_norm(gradients, dtype=torch.float32)
        squares = torch.stack([torch.zeros((), device=mesh.device), *norms]).double().square()
        own = squares[len(squares) - len(compressed) :].sum().sqrt()
        self._own = own if self._own is None else torch.where(own.isfinite(), own, self._own)
        bad = (~squares.sum().isfinite()).float()
        return mesh.sum(bad, "dealt", "sliced", "slices", "layers") == 0

    def _exchange(self, gradients: Mapping[str, Tensor], finite: Tensor, replicas: Replicas) -> None:
        """Replace gradients by the sum of what all replicas sent, and errors by what this one did not."""
        errors = {name: shard_of(self._matrices[name].error) for name in gradients}
        # Zeros in place of NaN: a method keeps factors, which must outlive the step.
        whole = {
            name: torch.where(finite, gradient + errors[name], 0.0).contiguous() for name, gradient in gradients.items()
        }
        sums, sent = self._method(whole, self._step, replicas)
        for name, gradient in gradients.items():
            torch.where(finite, whole[name] - sent[name], errors[name], out=errors[name])
            gradient.copy_(torch.where(finite, sums[name], torch.nan))

    @torch.no_grad()
    def before_update(self, grad_norm: Tensor) -> None:
        """Pay the saved errors of what is not compressed at this layout, once, where the update will be made."""
        if not self._owed or not bool(grad_norm.isfinite()):
            return
        while self._owed:
            name = self._owed.pop()
            error = self._errors.pop(name)
            (total,) = self._replicas.summed([shard_of(error)]) if self._replicas else (shard_of(error),)
            for other, parameter in self._plain:
                if other == name:
                    _gradient(parameter).add_(total)

    def measure(self) -> Mapping[str, Tensor | None]:
        """The relative norm of this rank's errors, and 1, for the mean over ranks."""
        if self._own is None or not self._matrices:
            return {"compression_error": None}
        norms = torch._foreach_norm([shard_of(matrix.error) for matrix in self._matrices.values()], dtype=torch.float32)
        relative = torch.stack(norms).double().square().sum().sqrt() / self._own.clamp(min=1e-30)
        return {"compression_error": torch.stack([relative, torch.ones_like(relative)])}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The errors, each replica's own; and the factors, which fit the shards of one layout."""
        errors = PerRank(self._errors, axis=_AXIS, join="sum")
        if self._replicas is None or not isinstance(self._method, PowerSGD):
            return {"errors": errors}
        return {"errors": errors, "factors": Own(flat=self._method.flat()), "layout": self._layout}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The saved errors, of what is compressed here; others are paid with the first step."""
        saved: Mapping[str, Tensor] = state.get("errors", {})
        for name, error in list(self._errors.items()):
            if name in saved:
                error.copy_(saved[name])
            elif name not in self._matrices:
                del self._errors[name]
        self._owed = [name for name in self._errors if name not in self._matrices]
        if self._replicas is None:
            _log.warning(f"compressed_gradients: mesh.{_AXIS} = 1, so no gradients are exchanged, nor compressed")
            return
        if isinstance(self._method, PowerSGD) and "layout" in state:
            if state["layout"] == self._layout:
                self._method.restore(state["factors"]["flat"])
            else:
                _log.info(f"compressed_gradients: the factors of {state['layout']} begin anew on {self._layout}")
        self._say(self._replicas)

    def _say(self, replicas: Replicas) -> None:
        """Tell what is compressed, and warn where options leave little of it."""
        assert self._context is not None
        compressed = sum(shard_of(matrix.parameter).numel() for matrix in self._matrices.values())
        numbers = compressed + sum(shard_of(parameter).numel() for _, parameter in self._plain)
        _log.info(
            f"compressed_gradients: {self.config.method} between {replicas.size} replicas, of "
            f"{compressed / max(numbers, 1):.1%} of this rank's gradients"
        )
        whole = sum(shard.numel() for shard in self._too_small)
        if whole > compressed:  # single matrices are small at any rank, such as those of routers
            _log.warning(
                f"[plugins.compressed_gradients] rank = {self.config.rank}: factors would be no smaller than "
                f"{len(self._too_small)} of {len(self._too_small) + len(self._matrices)} matrices, with "
                f"{whole / numbers:.1%} of this rank's gradients, which are sent as they are; set a lower rank"
            )
        warmup, steps = self.config.warmup_steps, self._context.job.train.steps
        if warmup >= steps:
            _log.warning(
                f"[plugins.compressed_gradients] warmup_steps = {warmup} and train.steps = {steps}: all steps are of "
                "the warm-up, which compresses nothing; set fewer warmup_steps"
            )


def _method(config: Config) -> Method:
    match config.method:
        case "powersgd":
            return PowerSGD(config.rank)
        case "topk":
            return TopK(config.density)
        case "randk":
            return RandK(config.density)
        case "sign":
            return Sign()
    return Int8(config.block)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's gradient; zeros where it has none, as other replicas may have one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return shard_of(parameter.grad)


def _is_copied(parameter: Tensor) -> bool:
    """Whether ranks within a replica hold copies of this rank's shard, whose gradients are yet to be added up."""
    if not isinstance(parameter, DTensor):
        return False
    mesh = parameter.device_mesh
    return any(p.is_replicate() and mesh.size(dim) > 1 for dim, p in enumerate(parameter.placements))


def _piecewise(tensors: Mapping[str, Tensor]) -> Iterable[list[str]]:
    """Names in order, in pieces of at most `_PIECE` numbers, or of one tensor."""
    piece: list[str] = []
    numbers = 0
    for name, tensor in tensors.items():
        if piece and numbers + tensor.numel() > _PIECE:
            yield piece
            piece, numbers = [], 0
        piece.append(name)
        numbers += tensor.numel()
    if piece:
        yield piece


def _low_rank_share(costs: Costs, job: Job, rank: int) -> float:
    """Numbers that PowerSGD sends per parameter: those of both factors, or the matrix where these are no fewer.

    A shard is taken for rows of its matrix, over all ranks that share its weights.
    """
    shards = job.layout.degree_of("copies", "slices") / job.layout.degree(_AXIS)
    operations = [*costs.embeddings, *[op for op in costs.layer for _ in range(job.spec.n_layers)], *costs.head]
    sent = numbers = 0.0
    for op in operations:
        if isinstance(op, Matmul | EmbeddingOp):
            rows, columns = (op.outputs, op.inputs) if isinstance(op, Matmul) else (op.rows, op.width)
            matrices = op.stack if isinstance(op, Matmul) else 1
            sent += matrices * min(rank * (rows / shards + columns), rows / shards * columns)
            numbers += matrices * rows / shards * columns
    return sent / numbers
