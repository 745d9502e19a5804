"""The index of a checkpoint and the plan of a save: many ranks' shards become a grid of chunks, each written once."""

import itertools

import numpy as np
import pytest
import torch

from tests.checkpoints import Box, table_of
from titan.checkpoint.disk import index, plan
from titan.checkpoint.disk.index import StoredTensor, stored_name
from titan.checkpoint.disk.manifest import data_file
from titan.errors import CheckpointError


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (3, 1, 6)])
def test_chunks_that_a_box_needs(shape: tuple[int, ...]) -> None:
    """Those of which some element is in the box."""
    cuts = tuple(np.array([0, *range(1, size, 2)], np.int64) for size in shape)
    tensor, owner = StoredTensor("model.x", torch.int64, torch.Size(shape), cuts, 0), np.empty(shape, int)
    for number in range(tensor.chunks):
        at, sizes = tensor.cell(number)
        owner[tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))] = number
    corners = [[(a, b) for a in range(size) for b in range(a + 1, size + 1)] for size in shape]
    for box in itertools.product(*corners):
        needed = tensor.overlapping([a for a, _ in box], [b - a for a, b in box])
        assert list(needed) == np.unique(owner[tuple(slice(a, b) for a, b in box)]).tolist()
    assert list(tensor.overlapping((0,) * len(shape), (0,) * len(shape))) == ([] if shape else [0])


def test_each_chunk_is_written_once_by_a_rank_that_holds_it() -> None:
    """Two stages; in each, shards on two ranks, and two replicas of them; a scalar and an empty tensor everywhere."""
    boxes = {0: ((0, 0), (3, 4)), 1: ((3, 0), (2, 4))}
    held = [
        [
            ("model.tied", "F32", [5, 4], boxes[rank % 2]),
            (f"model.stage{rank // 4}", "BF16", [5, 4], boxes[rank % 2]),
            ("rest.scalar", "I64", [], ((), ())),
            ("rest.empty", "I64", [0, 3], ((0, 0), (0, 3))),
            (f"rest.rng.{rank}.cpu", "U8", [7], ((0,), (7,))),
        ]
        for rank in range(8)
    ]
    made = plan.make([table_of(*tensors[:-1]) + table_of(tensors[-1]) for tensors in held])
    index.check(made.index, {data_file(rank): 60 for rank in range(8)})
    chunks = {"model.tied": 2, "model.stage0": 2, "model.stage1": 2, "rest.scalar": 1, "rest.empty": 1}
    chunks |= {f"rest.rng.{rank}.cpu": 1 for rank in range(8)}
    assert {name: tensor.chunks for name, tensor in made.index.tensors.items()} == chunks
    for rank, numbers in enumerate(made.chosen):
        header, end = made.index.header(data_file(rank)), 0
        for name, _, _, box in (held[rank][number] for number in numbers):
            chunk, begin = header[stored_name(name)]
            assert ((chunk.offsets, chunk.shape), begin) == (box, end)
            end += chunk.bytes
    assert sum(map(len, made.chosen)) == len(made.index.ranks) == 16 and max(map(len, made.chosen)) <= 4


def test_a_rank_without_a_share_writes_nothing() -> None:
    tables = [table_of(("model.a", "F32", [1], box)) for box in (((0,), (1,)), ((1,), (0,)))]
    assert [chosen.tolist() for chosen in plan.make(tables).chosen] == [[0], []]


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (3, 4))],
        [((0, 0), (3, 4)), ((2, 0), (3, 4))],
        [((0, 0), (3, 2)), ((0, 2), (3, 2)), ((3, 0), (2, 4))],
        [((1, 0), (4, 4))],
    ],
    ids=["one is missing", "they overlap", "no grid", "the first rows are missing"],
)
def test_boxes_that_do_not_make_up_the_tensor(boxes: list[Box]) -> None:
    with pytest.raises(CheckpointError, match=r"model\.a \[5, 4\] cannot be saved: its chunks do not make it up"):
        plan.make([table_of(("model.a", "F32", [5, 4], box)) for box in boxes])


def test_ranks_that_differ_and_names_of_two_lines_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"model\.a is \[1\] of BF16 and \[2\] of F32 on different ranks"):
        plan.make([table_of(("model.a", *kind, ((0,), (1,)))) for kind in (("F32", [2]), ("BF16", [1]))])
    with pytest.raises(CheckpointError, match=r"no tensor can be called model\.a\\nb in"):
        plan.make([table_of(("model.a\nb", "F32", [1], ((0,), (1,))))])


def test_a_rank_below_zero_has_no_file() -> None:
    tensor = StoredTensor("rest.techniques.x.y", torch.float32, torch.Size([1]), (np.zeros(1, np.int64),), 0)
    with pytest.raises(ValueError, match="which its manifest does not list"):
        index.check(index.Index({tensor.name: tensor}, np.full(1, -1, np.int32), np.zeros(1, np.int64)), {})
