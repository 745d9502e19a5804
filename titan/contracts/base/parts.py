"""The parts of a model on one rank, and the precision of compute and reduction."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from titan.contracts.base.batch import Batch
from titan.contracts.base.casts import CastParameters
from titan.contracts.base.collectives import Operation
from titan.contracts.base.mesh import Mesh
from titan.contracts.base.spec import ModelSpec
from titan.errors import PluginError
from titan.packages import torch_release


@dataclass(frozen=True)
class Precision:
    """Dtypes of the run, with every wrapper and with none.

    param_dtype: of parameters and activations in forward and backward.
    reduce_dtype: of gradients while they are summed over micro batches and ranks.
    store_dtype: of parameters between uses, and so of their gradients once these are reduced. Buffers keep their own.

    Loss and gradient norm stay in float32, and so do master weights and optimizer state where `store_dtype` does.
    """

    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    store_dtype: torch.dtype = torch.float32

    def policy(self) -> MixedPrecisionPolicy:
        """The same for FSDP2. Inputs are not cast: a model that passes float32 between modules does so on purpose."""
        if self.param_dtype is torch.float32:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, cast_forward_inputs=False)


def sum_gradients(root: nn.Module) -> None:
    """Make FSDP2 sum gradients instead of averaging: the loss is already divided by the global number of tokens."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


SPARE_COPIES = torch_release() < (2, 15)
"""Whether FSDP2 keeps gradients beside the copies that it reduces, and copies those of a rank that shards with no other
once more, divided by 1; see `cost.GatherPolicy`."""

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
WrapPlace = Literal["recompute", "compile", "call"]
WRAP_ORDER: tuple[WrapPlace, ...] = get_args(WrapPlace)
"""Order of the wrappers around a layer's forward, innermost first: what a compiler is told to recompute, the compiler,
and what is around each call of the compiled layer."""


@dataclass
class ModelPart:
    """The modules of one pipeline stage on this rank; the whole model where there is no pipeline.

    module: on the meta device until phase `materialise`; modules of other stages are None. Until then submodules may be
        replaced, under the same names.
    stage: global number of the stage.  stages: of the whole pipeline.
    shared: canonical names of tied parameters that another stage counts; left out of the gradient norm here.
    hidden_split: ranks over which a technique has split the hidden states between layers along the sequence.
    length_multiple: lengths of sequences must be multiples of this. A technique that splits positions multiplies it.
    costly: operations of techniques whose results are dear, put in before phase `recompute`. Recomputation that keeps
        any results keeps these.
    used_gradients: canonical name -> norm of this rank's share of a gradient, a float32 scalar on the device, of those
        that a technique has used and freed during backward.
    runner: the module that an engine calls; a technique may set a wrapper of `module`.
    """

    module: nn.Module
    stage: int = 0
    stages: int = 1
    shared: frozenset[str] = frozenset()
    hidden_split: int = 1
    length_multiple: int = 1
    costly: set[Operation] = field(default_factory=set)
    used_gradients: dict[str, Tensor] = field(default_factory=dict)
    runner: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.runner = self.module
        self._casts: CastParameters | None = None
        arguments = inspect.signature(type(self.module).forward).parameters
        takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
        self._inputs = ["documents", *(name for name in ("seeds", "lengths") if takes_any or name in arguments)]
        self._wraps: dict[str, dict[str, Wrap]] = {}

    def forward(self, x: Tensor, batch: Batch, labels: Tensor | None = None) -> Tensor:
        """Run the part on tokens [B, S] or hidden states [B, S, D] of a batch, through `runner`, to hidden states.

        The last stage returns logits [B, S, V], or with labels [B, S] the objective: a scalar, this micro batch's share
        of the step's mean; without gradients the reported loss, a sum over tokens in nats.
        """
        more = {} if labels is None else {"labels": labels}
        result: Tensor = self.runner(x, batch.positions, **{"documents": None, **self.inputs(batch), **more})
        return result

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Of a batch what the model's forward takes beside x and positions, by the name of its argument."""
        return {name: value for name in self._inputs if (value := getattr(batch, name)) is not None}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(canonical name, parameter) of this part, each tensor once; a DTensor where a technique has sharded it.

        Techniques replace parameters, and titan allocates them before phase `materialise`: a technique of an earlier
        phase keeps the part and asks again in each hook.
        """
        return self.module.named_parameters()

    def holds(self, name: str) -> bool:
        """Whether this part has the module of this canonical name."""
        return dict(self.module.named_modules()).get(name) is not None

    def units(self, spec: ModelSpec) -> list[list[nn.Module]]:
        """The shard units of the spec that this part has, in forward order, as lists of modules."""
        here = dict(self.module.named_modules())
        units = ([here[name] for name in unit if name in here] for unit in spec.shard_units())
        return list(filter(None, units))

    def folded(self, mesh: Mesh) -> list[tuple[nn.Module, str]]:
        """(module, axis) of the modules whose parameters are all slices along an axis of `mesh` that folds others.

        Such a module is a shard unit of its own, inside of the one around it: its gradients are summed over what the
        axis leaves of the axes that it folds, `mesh.flat(..., without=axis)`. A module that has both such slices and
        parameters of another kind of its own, or of another axis, is a PluginError.
        """
        return list(_folded(self.module, "", mesh))

    def layers(self, spec: ModelSpec) -> list[tuple[str, nn.Module]]:
        """(canonical name, module) of the layers on this part, in order."""
        here = dict(self.module.named_modules())
        return [(name, here[name]) for name in spec.layer_names() if name in here]

    def wrap_forward(self, name: str, place: WrapPlace, wrap: Wrap) -> None:
        """Put `wrap` around the forward of a module at a place in WRAP_ORDER, one each; names do not change."""
        module = self.module.get_submodule(name)
        wraps = self._wraps.setdefault(name, {})
        assert place not in wraps, f"two techniques wrap {name} at {place}"
        wraps[place] = wrap
        forward: Callable[..., Any] = type(module).forward.__get__(module)
        for at in WRAP_ORDER:
            forward = wraps[at](forward) if at in wraps else forward
        module.forward = forward

    def cast_parameters(self, spec: ModelSpec, precision: Precision) -> None:
        """Compute in mixed precision without a wrapper: in phase "shard", on a rank that has nothing to gather."""
        if precision.param_dtype != precision.store_dtype:
            self._casts = CastParameters(self.module, self.units(spec), precision.param_dtype)

    def restore(self) -> None:
        """Take copies back from modules that no gradient has reached, after the backwards of a step."""
        if self._casts is not None:
            self._casts.restore()

    def release(self) -> None:
        """Free what a forward without a backward has gathered or cast: steps and state dicts need the shards."""
        self.restore()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def retie(self, spec: ModelSpec) -> None:
        """Make tied parameters one tensor again after a technique has replaced them."""
        for alias, owner in spec.tied:
            (to, to_name), (source, source_name) = alias.rpartition(".")[::2], owner.rpartition(".")[::2]
            if self.holds(to) and self.holds(source):
                tensor = self.module.get_submodule(source)._parameters[source_name]
                self.module.get_submodule(to).register_parameter(to_name, tensor)


def _folded(module: nn.Module, name: str, mesh: Mesh) -> Iterator[tuple[nn.Module, str]]:
    axes = {key: mesh.fold_of(parameter) for key, parameter in module.named_parameters()}
    if len(set(axes.values())) == 1:
        if axis := next(iter(axes.values())):
            yield module, axis
        return
    for key, _ in module.named_parameters(recurse=False):
        if axes[key]:
            other = next(one for one, axis in axes.items() if axis != axes[key])
            way_out = "put slices into a module of their own, whose gradients are summed over other ranks"
            raise PluginError(
                f"{name} has {key}, a slice along mesh.{axes[key]}, and {other}, which is none; {way_out}"
            )
    for child, inner in module.named_children():
        yield from _folded(inner, f"{name}.{child}".lstrip("."), mesh)
