"""FLOPs of an operation, and bytes of a collective."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""PyTorch's names of the same collective; names that are not listed stay."""

_LOCAL = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
"""Functional-collective operations that do not communicate."""


def attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, products: tuple[int, int]) -> int:
    """FLOPs of matrix products of attention.

    q [B, H, S, N], k [B, K, T, N], v [B, K, T, M]: shapes.  products: how many products have the size of q k', and how
    many the size of scores times v. Masked positions count as well, also causal ones, as is usual.
    """
    batch, heads, rows, width = q
    return 2 * batch * heads * rows * k[-2] * (products[0] * width + products[1] * v[-1])


def flops_of(operation: OpOverload, args: Any, kwargs: Mapping[str, Any], out: Any) -> tuple[int, int]:
    """(FLOPs, FLOPs among them that are recomputation) of a matrix product or attention; (0, 0) for other operations.

    Attention saves no scores: its backward recomputes them, one product in five.
    """
    packet = operation._overloadpacket
    if packet is _ATTENTION:
        return attention_flops(args[0].shape, args[1].shape, args[2].shape, (1, 1)), 0
    if packet is _ATTENTION_BACKWARD:
        shapes = args[1].shape, args[2].shape, args[3].shape
        return attention_flops(*shapes, (3, 2)), attention_flops(*shapes, (1, 0))
    formula = flop_registry.get(packet)
    return (0, 0) if formula is None else (int(formula(*args, **kwargs, out_val=out)), 0)


def computes(packet: object) -> bool:
    """Whether `flops_of` counts FLOPs for this operation."""
    return packet in (_ATTENTION, _ATTENTION_BACKWARD) or packet in flop_registry


def is_collective(operation: OpOverload) -> bool:
    """Whether an operation communicates with other ranks."""
    return operation.namespace in ("c10d", "_c10d_functional") and operation._schema.name not in _LOCAL


def in_place(operation: OpOverload) -> bool:
    """Whether a collective writes to buffers passed in, as those of FSDP and the pipeline do."""
    return operation.namespace == "c10d"


def kind_of(operation: OpOverload) -> str:
    """Name of a collective: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, ..."""
    name = operation._schema.name.rpartition("::")[2].strip("_").removesuffix("_out")
    return _KINDS.get(name, name)


def group_of(args: Any) -> str:
    """Name of the process group in a collective's arguments; "" if there is none."""
    for arg in reversed(args):
        if isinstance(arg, str):
            return arg
        if isinstance(arg, torch.ScriptObject):
            group = torch._C._distributed_c10d.ProcessGroup.unbox(arg) if "ProcessGroup" in str(arg._type()) else None
            if group is not None:
                return group.group_name
    return ""


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in arguments or results, nested containers included."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def payload(args: Any, out: Any) -> int:
    """Bytes of a collective's whole tensor: the result of an all-gather, the input of a reduce-scatter."""
    groups = [values if isinstance(values, (list, tuple)) else [values] for values in (*args, out)]
    return max((sum(t.nbytes for t in tensors_of(group)) for group in groups), default=0)
