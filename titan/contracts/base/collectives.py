"""Collectives as PyTorch's dispatcher sees them: their kind, group and size, and the bytes that a rank sends.

`sent_bytes` is the one rule for bytes on the wire: of the metric `bytes_sent`, of the dry run, and of predicted times.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.operator_schemas import get_signature_for_torch_op

Operation: TypeAlias = Any
"""What a dispatch mode is called with, such as `torch.ops.aten.mm.default`; its class has no public name."""

PASSES: Mapping[str, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Kind -> how often a ring passes the whole tensor around."""

SILENT = ("recv", "recv_any_source", "barrier", "monitored_barrier")
"""Collectives in which a rank sends no numbers."""


@cache
def schema_of(operation: Operation) -> Any:
    """The arguments and the results of an operation: name and type of each."""
    found: Any = get_signature_for_torch_op(operation, return_schemas=True)
    return found[1][0]


def _name(operation: Operation) -> str:
    name: str = operation.name()
    return name.rpartition("::")[2].partition(".")[0]


def is_collective(operation: Operation) -> bool:
    """Whether an operation communicates with other ranks."""
    local = ("wait_tensor", "wait_tensors", "_wrap_tensor_autograd", "check_for_nan")
    name = _name(operation)
    namespace: str = operation.namespace
    return namespace in ("c10d", "_c10d_functional") and name not in local


def in_place(operation: Operation) -> bool:
    """Whether a collective writes to buffers passed in, as those of FSDP and the pipeline do."""
    return bool(operation.namespace == "c10d")


@cache
def kind_of(operation: Operation) -> str:
    """Name of a collective: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, ..."""
    name = _name(operation).strip("_").removesuffix("_out")
    flat = name.replace("_", "")  # PyTorch has other names too: allgather_base, all_gather_into_tensor_coalesced
    others = {"isend": "send", "irecv": "recv", "gather_into_tensor": "gather"}
    return next((kind for kind in PASSES if flat.startswith(kind.replace("_", ""))), others.get(name, name))


@cache
def _group_place(operation: Operation) -> int | None:
    """Which of its arguments is the process group; None: no argument is."""
    types = enumerate(str(argument.type) for argument in schema_of(operation).arguments)
    return next((place for place, kind in types if "ProcessGroup" in kind), None)


def group_of(operation: Operation, args: Any, named: Callable[[str], dist.ProcessGroup]) -> dist.ProcessGroup:
    """The process group of a collective with these arguments.

    named: finds a group by its name, which functional collectives are given.
    """
    place = _group_place(operation)
    if place is not None:
        return dist.ProcessGroup.unbox(args[place])
    group = next(arg for arg in reversed(args) if isinstance(arg, (str, dist.ProcessGroup)))
    return named(group) if isinstance(group, str) else group


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in arguments or results, nested containers included."""
    if isinstance(values, Tensor):
        return [values]
    inner = values.values() if isinstance(values, Mapping) else values if isinstance(values, (list, tuple)) else ()
    return [tensor for value in inner for tensor in tensors_of(value)]


def payload(args: Any, out: Any) -> int:
    """Bytes of a collective's whole tensor: the result of an all-gather, the input of a reduce-scatter."""
    groups = (values for values in (*args, out) if isinstance(values, (Tensor, list, tuple)))
    return max((sum(t.nbytes for t in tensors_of(group)) for group in groups), default=0)


def sent_bytes(kind: str, whole: float, ranks: int) -> float:
    """Bytes that a rank sends in a collective, the mean over the ranks of its group; without headers and retries.

    whole: bytes of the whole tensor (`payload`).  ranks: of the group.

    All-gather, reduce-scatter, all-to-all, broadcast and reduce: (n - 1) / n of the tensor. All-reduce: twice that.
    It is the least that ranks can send where no switch adds for them: what rings send (Patarasu and Yuan, J. Parallel
    Distrib. Comput. 69, 2009), and in an all-to-all each rank to each other one.
    """
    if kind == "send" or kind in SILENT:
        return whole if kind == "send" else 0.0
    return PASSES.get(kind, 1.0) * (ranks - 1) / ranks * whole


def bytes_to_others(operation: Operation, args: Any, ranks: int, rank: int) -> float:
    """`sent_bytes` of a collective that this rank calls with these arguments.

    ranks, rank: of its group. Exact for an all-to-all, whose shares may differ: all but what stays on this rank.
    """
    kind = kind_of(operation)
    if kind == "all_to_all":
        given = {argument.name: value for argument, value in zip(schema_of(operation).arguments, args, strict=False)}
        if "input_tensors" in given:
            return float(sum(tensor.nbytes for place, tensor in enumerate(given["input_tensors"]) if place != rank))
        whole: int = given["input"].nbytes
        splits = given["input_split_sizes"]
        return float(whole * (1 - splits[rank] / max(1, sum(splits)))) if splits else sent_bytes(kind, whole, ranks)
    if kind in ("gather", "scatter"):  # the rank with all pieces sees them; a piece leaves every rank but one
        return sent_bytes(kind, min((size for values in args if (size := payload([values], ()))), default=0), ranks)
    return sent_bytes(kind, payload(args, ()), ranks)


Around = Callable[[Operation, Sequence[Any], dist.ProcessGroup], AbstractContextManager[Any]]
"""(operation, its arguments, its group) -> a context in which the collective is called; from any thread."""

C10D = (
    "allreduce_ allreduce_coalesced_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ _allgather_base_ "
    "alltoall_ alltoall_base_ barrier monitored_barrier_ broadcast_ gather_ gather_into_tensor_ scatter_ reduce_ "
    "reduce_scatter_ reduce_scatter_tensor_coalesced_ _reduce_scatter_base_ send recv_ recv_any_source_"
)
"""The collectives of the namespace `c10d`, of which a PyTorch may lack some."""

_around: list[Around] = []
_kernels: list[Any] = []


def around_each(around: Around) -> Callable[[], None]:
    """Let each collective of this process pass `around`, until the function that this returns is called.

    Whoever issues a collective, it passes PyTorch's dispatcher as an operation of the namespace `c10d`; functional
    ones too. A kernel there calls `around`, and dispatches on. Its key is BackendSelect, which every call has, and for
    which no collective has a kernel of its own. The key of autograd would miss what DTensor sends; a dispatch mode
    would cost every operation; a kernel in place of the device's own would hold Python's lock: a deadlock.
    """
    if not _around:
        kernels: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name in filter(partial(hasattr, torch.ops.c10d), C10D.split()):
            operation = getattr(torch.ops.c10d, name).default
            place = _group_place(operation)
            assert place is not None
            kernel = partial(_pass, operation, place)
            kernels.impl(name, kernel, "BackendSelect", with_keyset=True)
        _kernels.append(kernels)
    _around.append(around)

    def stop() -> None:
        _around.remove(around)
        if not _around:
            _kernels.clear()  # a library whose last reference goes takes its kernels along

    return stop


def _pass(operation: Operation, place: int, keys: Any, *args: Any) -> Any:
    """A collective that has its group at this place of its arguments goes on to the device's kernel."""
    with ExitStack() as contexts:
        for around in tuple(_around):
            contexts.enter_context(around(operation, args, dist.ProcessGroup.unbox(args[place])))
        return operation.redispatch(keys.remove(keys.highestPriorityTypeId()), *args)
