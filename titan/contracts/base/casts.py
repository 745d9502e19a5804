"""Parameters in the dtype of compute, on a rank that has all of them: there is nothing to gather or to reduce."""

import math
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Places = list[tuple[dict[str, Any], str]]
"""Where modules have a parameter: in which of their tables, by which name."""

PIECE = 2**26
"""Numbers of a table's gradient that are made at a time."""

_ALIGNED = 128
"""Tensors begin at multiples of so many numbers, as kernels load several at once."""


class CastParameters:
    """Casts the parameters of a module for its forward, and their gradients back in its backward, unit by unit.

    What data-parallel wrappers do in mixed precision. All copies are made as the forward begins, in one call, and the
    modules of a unit compute with them from its own forward on. When all gradients of the unit are there, they have
    their parameters back, and gradients are added up in the dtype of these. Hooks of a gradient see that of the first
    micro batch alone, as with FSDP2; hooks that run when gradients are accumulated see each sum. Of an embedding that
    shares no parameter, the rows looked up are cast, to the same bits; read outside of it, its table is not cast.

    Limit: a second forward before the backward of the first cannot be recomputed, as units are restored by then.

    units: of modules, as `ModelPart.units`. A parameter that several share is of the first, and those of none are one.
    """

    def __init__(self, module: nn.Module, units: Iterable[Sequence[nn.Module]], dtype: torch.dtype) -> None:
        self._module, self._dtype, self._modules = module, dtype, [*units, [module]]
        self._units: list[_Unit] = []
        self._evaluating = False
        module.register_forward_pre_hook(lambda *_: self._cast())

    def restore(self) -> None:
        """Give all modules their parameters back: those that no gradient has reached, and after evaluation."""
        self._evaluating = False
        for unit in self._units:
            unit.restore()

    def _cast(self) -> None:
        training = torch.is_grad_enabled()
        if self._evaluating and not training:
            return
        self._units = self._units or self._find_units()
        self.restore()
        parameters: list[Tensor] = [parameter for unit in self._units for parameter in unit.parameters]
        copies = [copy for unit in self._units for copy in _allocated(unit.parameters, self._dtype)]
        with torch.no_grad():
            if copies:
                torch._foreach_copy_(copies, parameters)
        for unit in self._units:
            unit.copies, copies = copies[: len(unit.parameters)], copies[len(unit.parameters) :]
            unit.training = training
        self._units[-1].lend()
        self._evaluating = not training

    def _find_units(self) -> list["_Unit"]:
        """At the first forward: techniques and the host replace parameters until these are initialised."""
        places: dict[Tensor, Places] = {}
        for module in self._module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point() and parameter.dtype != self._dtype:
                    places.setdefault(parameter, []).append((module._parameters, name))
        for module in self._module.modules():
            if _is_plain(module) and len(places.get(module.weight, ())) == 1:
                del places[module.weight]
                module.forward = partial(_LookUp.apply, module.weight, self._dtype)  # type: ignore[method-assign]
        units = [_Unit(places, modules) for modules in self._modules]
        return [*filter(None, units[:-1]), units[-1]]


class _Unit:
    """Parameters that modules compute with copies of from the first forward of one of them to its backward.

    places: of all parameters; those of this unit's modules are taken out.
    copies: of the parameters, until they are lent to the modules.  training: the model's forward has gradients.
    """

    def __init__(self, places: dict[Tensor, Places], modules: Sequence[nn.Module]) -> None:
        own = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
        self._places = {parameter: places.pop(parameter) for parameter in own if parameter in places}
        self.parameters, self.copies = list(self._places), list[Tensor]()
        self.training = self._lent = False
        for module in modules if self.parameters else ():
            module.register_forward_pre_hook(lambda *_: self.lend())

    def __len__(self) -> int:
        return len(self.parameters)

    def lend(self) -> None:
        """Let modules compute with the copies in place of parameters."""
        if self.copies:
            copies, self.copies, self._lent = self.copies, [], True
            with torch.set_grad_enabled(self.training):  # a unit's first forward may be one without
                self._put(_Cast.apply(self, copies, *self.parameters))  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Let modules have their parameters again."""
        self.copies = []
        if self._lent:
            self._lent = False
            self._put(self.parameters)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for tensor, places in zip(tensors, self._places.values(), strict=True):
            for table, name in places:
                table[name] = tensor


class _Cast(torch.autograd.Function):
    """Parameters of a unit -> their copies. The node is made when the unit begins: autograd runs the latest ones first,
    and would else keep the gradients of all units until the end."""

    @staticmethod
    def forward(ctx: Any, unit: _Unit, copies: list[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.dtype = unit, parameters[0].dtype
        ctx.set_materialize_grads(False)
        trained = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(copy for copy, needed in zip(copies, trained, strict=True) if not needed))
        return tuple(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.unit.restore()
        given = [(p, each) for p, each in zip(ctx.unit.parameters, gradients, strict=True) if each is not None]
        added = [(p.grad, each) for p, each in given if p.grad is not None]
        if added:  # here, as autograd would make another copy to add
            torch._foreach_add_(*zip(*added, strict=True))
        first = {p: each for p, each in given if p.grad is None}
        made = dict(zip(first, _allocated(first, ctx.dtype), strict=True))
        if made:
            torch._foreach_copy_(list(made.values()), list(first.values()))
        return (None, None, *map(made.get, ctx.unit.parameters))


def _is_plain(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether it is an embedding that does nothing else, with its own forward."""
    if type(module) is not nn.Embedding or "forward" in vars(module):
        return False
    return module.padding_idx is None and module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)


class _LookUp(torch.autograd.Function):
    """(table [V, D], dtype, ids) -> its rows, cast. The gradient is that of a table that was cast, made in pieces."""

    @staticmethod
    def forward(ctx: Any, table: nn.Parameter, dtype: torch.dtype, ids: Tensor) -> Tensor:
        ctx.table = table
        ctx.save_for_backward(ids)
        return F.embedding(ids, table).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (ids,), table = ctx.saved_tensors, ctx.table
        words, width = table.shape
        first = table.grad is None
        total = torch.empty_like(table) if first else table.grad
        for begin in range(0, words, max(1, PIECE // width)):
            piece = total[begin : begin + max(1, PIECE // width)]
            here = torch.where((ids >= begin) & (ids < begin + len(piece)), ids - begin, len(piece))
            narrow = torch.ops.aten.embedding_dense_backward(gradient, here, len(piece) + 1, len(piece), False)[:-1]
            piece.copy_(narrow) if first else piece.add_(narrow)
        return (total if first else None), None, None


def _allocated(like: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of these shapes, without values, in one piece of memory.

    Copies and gradients are of different widths: what is freed of ones is of use for the others if it is large.
    """
    like = list(like)
    if not like:
        return []
    size, places = _laid_out(tuple(tensor.shape for tensor in like))
    memory = torch.empty(size, dtype=dtype, device=like[0].device)
    return [memory.as_strided(*place) for place in places]


@cache
def _laid_out(shapes: tuple[torch.Size, ...]) -> tuple[int, list[tuple[torch.Size, tuple[int, ...], int]]]:
    """How many numbers tensors of these shapes take one after the other, and of each its shape, strides and start."""
    end, places = 0, []
    for shape in shapes:
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        places.append((shape, strides, end))
        end += -(-shape.numel() // _ALIGNED) * _ALIGNED
    return end, places
