"""Runs PyTorch code on the meta device (shapes and storages, no data) in place of the CPU."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from titan.contracts.base.collectives import Operation, schema_of, tensors_of
from titan.layers.products import FLASH
from titan.planner.dryrun.operations import ITEM

_PLAIN = {Tensor, nn.Parameter}
_META = torch.device("meta")
_CPU = torch.DispatchKeySet(torch.DispatchKey.CPU)
_LIFT = torch.ops.aten.lift_fresh.default
_TYPES = {torch.bool: bool, torch.float16: float, torch.bfloat16: float, torch.float32: float, torch.float64: float}

Look = Callable[[Operation, Any, Any, Any], None]
"""Called after each operation with (operation, args, kwargs, result)."""


class MetaTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allocates every tensor on the meta device, whatever device is requested; values read by the host are 1.

    The mode sees operations below autograd and below wrappers such as DTensor. PyTorch's fake tensors would report a
    CPU device, but take three times as long.

    look: called after each operation; None: not called.  stopped: set by another thread, which wants this one to end.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.look: Look | None = None
        self.stopped = False
        self._off = False
        self._made: dict[tuple[Any, ...], tuple[Any, Any, torch.dtype]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # nothing is compiled in a dry run, and a guard around each operation costs as much as the operation
        )

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the meta device, then call `look`."""
        if self._off:
            return function(*args, **(kwargs or {}))
        if types and not _PLAIN.issuperset(types):
            return NotImplemented  # a wrapper: it comes again, in the plain tensors it is made of
        if self.stopped:
            raise KeyboardInterrupt
        if function.namespace == "titan":
            with self:  # an operation written in Python: what it consists of is seen, one by one
                return library.get_kernel(function, "CPU").call_boxed(_CPU, *args, **(kwargs or {}))
        answer = _ANSWERS.get(function)
        if answer is not None:
            return answer(args)
        kwargs = kwargs or {}
        kind = _KINDS.get(function) or _kind(function)
        if kind.placed and (kind.made or kwargs.get("device") is not None):
            kwargs = {**kwargs, "device": _META}
        out = self._like_before(function, args, kwargs) if kind.pure else function(*args, **kwargs)
        if self.look is not None:
            self.look(function, args, kwargs, out)
        return out

    def unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with the mode off while it runs."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._off = self._off, True
            try:
                return function(*args, **kwargs)
            finally:
                self._off = before

        return call

    def _like_before(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation, from a cache by operation and shapes: running each operation is slow."""
        key: list[Any] = [function]
        if not (_describe(args, key) and _describe(kwargs.items(), key)):
            return function(*args, **kwargs)
        known = tuple(key)
        made = self._made.get(known)
        if made is not None:
            return torch.empty_strided(made[0], made[1], dtype=made[2], device=_META)
        out = function(*args, **kwargs)
        given = {id(tensor.untyped_storage()) for tensor in tensors_of((args, kwargs))}
        if id(out.untyped_storage()) not in given:
            self._made[known] = out.shape, out.stride(), out.dtype
        return out


@dataclass(frozen=True)
class _Kind:
    """Properties of an operation, from its schema.

    placed: has a `device` argument.  made: takes no tensor, so nothing implies a device.  pure: returns one new tensor
    (by its schema; some views do not declare that they alias).
    """

    placed: bool
    made: bool
    pure: bool


_KINDS: dict[Any, _Kind] = {}


def _kind(function: Operation) -> _Kind:
    try:
        schema = schema_of(function)
    except (NameError, ValueError):  # three operations of PyTorch have arguments that Python cannot have
        kind = _KINDS[function] = _Kind(placed=False, made=False, pure=False)
        return kind
    tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    alone = [str(result.type) for result in schema.returns] == ["Tensor"]
    touched = any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns))
    kind = _KINDS[function] = _Kind(
        placed=any(argument.name == "device" for argument in schema.arguments),
        made=not tensors,
        pure=tensors and alone and not touched and function.namespace == "aten",
    )
    return kind


def _describe(values: Iterable[Any], key: list[Any]) -> bool:
    """Add to a key all that determines the shape and dtype of a result.

    Returns False for a 0-dim tensor: whether it takes part in type promotion cannot be told.
    """
    for value in values:
        if isinstance(value, Tensor):
            if not value.ndim:
                return False
            key += value.shape, value.stride(), value.dtype
        elif isinstance(value, (list, tuple)):
            key += len(value), list
            if not _describe(value, key):
                return False
        else:
            key += type(value), value
    return True


def _item(args: Any) -> object:
    return _TYPES.get(args[0].dtype, int)(1)


def _lifted(args: Any) -> Tensor:
    """A tensor made of Python's numbers."""
    return torch.empty_like(args[0], device=_META)


_ANSWERS: dict[Any, Callable[[Any], Any]] = {ITEM: _item, _LIFT: _lifted}


@contextmanager
def accepted(mode: MetaTensorMode) -> Iterator[None]:
    """Make PyTorch accept meta tensors as real ones while the context is open.

    FSDP rejects them as not materialized, and fused optimizers as an unsupported device. From 2.15 on FSDP records the
    stream that uses a gradient, of which only CPU tensors need none. DTensor runs an operation on
    global tensors to infer the shape of its result; the mode is off meanwhile, as no such tensor exists in a step.
    """
    optimizers = import_module("torch.optim.optimizer")
    collectives = import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    patches: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", mode.unseen),
        (FSDPParamGroup, "_validate_no_meta_params", lambda _: lambda group: None),
        (FSDPParamGroup, "_validate_cpu_offload_params", lambda _: lambda group: None),
        (optimizers, "_get_fused_kernels_supported_devices", lambda asked: lambda: [*asked(), "meta"]),
    ]
    if hasattr(collectives, "record_grad_output_stream"):
        patches.append((collectives, "record_grad_output_stream", lambda _: lambda buffer, stream: None))
    originals = [getattr(owner, name) for owner, name, _ in patches]
    for (owner, name, instead), original in zip(patches, originals, strict=True):
        setattr(owner, name, instead(original))
    kernels = library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kernels.impl("scaled_dot_product_attention", _attention, "AutogradMeta")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        del kernels  # the last reference: PyTorch takes the kernel back
        for (owner, name, _), original in zip(patches, originals, strict=True):
            setattr(owner, name, original)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As one kernel, as a CPU and a GPU do it; for a device it does not know PyTorch would write all scores."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    out: Tensor = FLASH(query, key, value, dropout, causal, attn_mask=mask, scale=scale)[0]
    return out
