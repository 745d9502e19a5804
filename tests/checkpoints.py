"""Small models, their optimizers and checkpoints, of one process and of ranks on any layout; and what fails there."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from titan.checkpoint import Checkpointer
from titan.checkpoint.disk.plan import Block, Table
from titan.contracts import ModelPart


class Toy(nn.Module):
    """Sizes that no degree divides: a vocabulary of 251, and 6 rows, of which the fourth of 4 ranks gets none."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(251, hidden)
        self.up = nn.Linear(hidden, 10)
        self.down = nn.Linear(10, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, 251, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("rope", torch.zeros(4), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        return self.out(self.norm(self.down(self.up(self.embed(tokens)))) * self.scale)


def made(hidden: int = 6, **adamw: Any) -> tuple[list[ModelPart], torch.optim.Optimizer]:
    model = Toy(hidden)
    return [ModelPart(model)], torch.optim.AdamW(model.parameters(), lr=1e-2, **adamw)


def train(parts: list[ModelPart], optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        parts[0].module(torch.arange(11)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def copied(parts: list[ModelPart], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What a checkpoint of them has to hold, by the names in the files."""
    state = {name: tensor.detach().clone() for name, tensor in parts[0].module.state_dict().items()}
    for name, parameter in parts[0].parameters():
        state |= {f"optimizer.{name}.{slot}": value.clone() for slot, value in optimizer.state[parameter].items()}
    return state


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(local_part(tensor), local_part(other[name])), name


def assert_same_rest(found: Any, wanted: Any) -> None:
    """Of tables and lists with tensors in them."""
    plain = partial(tree_map_only, Tensor, lambda tensor: (tensor.dtype, tensor.tolist()))
    assert plain(found) == plain(wanted)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def raising(error: BaseException) -> Callable[..., Any]:
    """In place of a function: one that always fails."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


Box = tuple[tuple[int, ...], tuple[int, ...]]


def table_of(*tensors: tuple[str, str, list[int], Box]) -> Table:
    """What a rank holds: name, type, shape and the offsets and sizes of its part of each tensor."""
    header = [[name, dtype, shape] for name, dtype, shape, _ in tensors]
    numbers = [number for *_, box in tensors for part in box for number in part]
    return (Block(json.dumps(header).encode(), np.array(numbers, np.int64).tobytes()),)


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def halve(file: Path) -> None:
    """Cut off the second half of a file."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


LAYOUTS = {"one rank": (1, 1, 1), "sharded": (1, 4, 1), "hybrid": (2, 2, 1), "tensor": (2, 1, 2), "both": (1, 2, 2)}
"""Degrees of replicated data, sharded data and tensor parallelism."""

SCALED = {"exp_avg": 3.0, "exp_avg_sq": 5.0, "max_exp_avg_sq": 7.0}

TENSOR_PLAN = dict(
    embed=RowwiseParallel(), up=ColwiseParallel(), down=RowwiseParallel(), out=ColwiseParallel(output_layouts=Shard(-1))
)


def model_on(layout: str) -> Toy:
    """The same weights on every layout."""
    torch.manual_seed(1)
    model = Toy()
    replicate, shard, tensor = LAYOUTS[layout]
    if tensor > 1:
        mesh = init_device_mesh("cpu", (replicate * shard, tensor), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, mesh["tensor"], TENSOR_PLAN)
        if shard > 1:
            fully_shard(model, mesh=mesh["shard"])
    elif replicate * shard > 1:
        degrees, names = ((replicate, shard), ("replicate", "shard")) if replicate > 1 else ((shard,), ("shard",))
        fully_shard(model, mesh=init_device_mesh("cpu", degrees, mesh_dim_names=names))
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True, foreach=False)


def known(model: nn.Module, *stage: int) -> tuple[list[ModelPart], torch.optim.Optimizer]:
    """A part and its optimizer, whose state every rank of every layout can tell from the weights alone."""
    optimizer = adamw(model)
    for parameter in model.parameters():
        slots = {slot: parameter.detach() * factor for slot, factor in SCALED.items()}
        optimizer.state[parameter] = {**slots, "step": torch.tensor(7.0)}
    return [ModelPart(model, *stage)], optimizer


def checkpointer_of(folder: Path, asynchronous: bool = False, keep: int = 0) -> Checkpointer:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Checkpointer(folder, keep=keep, asynchronous=asynchronous, rank=rank, world_size=size)


def local_part(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def save(folder: Path, layout: str, asynchronous: bool = False, steps: Sequence[int] = (7,)) -> None:
    checkpointer = checkpointer_of(folder, asynchronous)
    for step in steps:
        checkpointer.save(step, *known(model_on(layout)), {"layout": layout})
    checkpointer.wait()
