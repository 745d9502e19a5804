"""The index of a checkpoint and the plan of a save: many ranks' shards become a grid of chunks, each written once."""

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import mutations
from tests.jobs import stored
from titan.checkpoint.disk import index, manifest, metadata, plan
from titan.checkpoint.disk.index import Index, StoredTensor
from titan.checkpoint.disk.manifest import FileEntry
from titan.checkpoint.disk.plan import Block, Table, Written
from titan.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]


def _table(*tensors: tuple[str, str, list[int], Box]) -> Table:
    header = [[name, dtype, shape] for name, dtype, shape, _ in tensors]
    numbers = [number for *_, box in tensors for part in box for number in part]
    return (Block(json.dumps(header).encode(), np.array(numbers, np.int64).tobytes()),)


def _cells(tensor: StoredTensor) -> list[Box]:
    return [tensor.cell(number) for number in range(tensor.chunks)]


def test_cells_of_an_uneven_grid() -> None:
    tensor = StoredTensor(torch.float32, torch.Size([5, 4]), (np.array([0, 3]), np.array([0, 1, 2])), 0)
    rows, columns = ((0, 3), (3, 2)), ((0, 1), (1, 1), (2, 2))
    wanted = [((row, column), (long, wide)) for row, long in rows for column, wide in columns]
    assert _cells(tensor) == list(tensor.cells()) == wanted


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (3, 1, 6)])
def test_chunks_that_a_box_needs(shape: tuple[int, ...]) -> None:
    """Against every cell that shares an element with the box."""
    cuts = tuple(np.array([0, *range(1, size, 2)], np.int64) for size in shape)
    tensor = StoredTensor(torch.int64, torch.Size(shape), cuts, 0)
    corners = [[(a, b) for a in range(size) for b in range(a + 1, size + 1)] for size in shape]
    for box in itertools.product(*corners):
        offsets, sizes = tuple(a for a, _ in box), tuple(b - a for a, b in box)
        wanted = [
            number
            for number, (at, long) in enumerate(_cells(tensor))
            if all(max(a, c) < min(a + b, c + d) for a, b, c, d in zip(offsets, sizes, at, long, strict=True))
        ]
        assert list(tensor.overlapping(offsets, sizes)) == wanted
    assert list(tensor.overlapping((0,) * len(shape), (0,) * len(shape))) == ([] if shape else [0])


def test_each_chunk_is_written_once_by_a_rank_that_holds_it() -> None:
    """Two stages; in each, shards on two ranks, and two replicas of them; a scalar and an empty tensor everywhere."""
    boxes = {0: ((0, 0), (3, 4)), 1: ((3, 0), (2, 4))}
    tables = [
        _table(
            ("model.tied", "torch.float32", [5, 4], boxes[rank % 2]),
            (f"model.stage{rank // 4}", "torch.bfloat16", [5, 4], boxes[rank % 2]),
            ("rest.scalar", "torch.int64", [], ((), ())),
            ("rest.empty", "torch.int64", [0, 3], ((0, 0), (0, 3))),
        )
        + _table((f"rest.rng.{rank}.cpu", "torch.uint8", [7], ((0,), (7,))))
        for rank in range(8)
    ]
    made = plan.make(tables)
    places = [np.array([(0, 100 * int(i), 100) for i in chosen]).reshape(-1, 3) for chosen in made.chosen]
    written = [Written({f"__{rank}_0.distcp": FileEntry(1000, "")}, each) for rank, each in enumerate(places)]
    found = made.index(written)
    index.check(found, {f"__{rank}_0.distcp": 1000 for rank in range(8)})
    assert {name: tensor.chunks for name, tensor in found.tensors.items()} == {
        "model.tied": 2,
        "model.stage0": 2,
        "model.stage1": 2,
        "rest.scalar": 1,
        "rest.empty": 1,
        **{f"rest.rng.{rank}.cpu": 1 for rank in range(8)},
    }
    for name, tensor in found.tensors.items():
        for number, (offsets, sizes) in enumerate(tensor.cells()):
            file, start, _ = found.place(tensor.first + number)
            rank, item = int(file[2]), start // 100
            [said, _, shape] = [entry for block in tables[rank] for entry in json.loads(block.header)][item]
            assert said == name and shape == list(tensor.shape)
            if len(shape) == 2 and shape[0]:
                assert boxes[rank % 2] == (offsets, sizes)
    assert sum(map(len, made.chosen)) == 16 and max(map(len, made.chosen)) <= 3


def test_a_rank_without_a_share_writes_nothing() -> None:
    tables = [_table(("model.a", "torch.float32", [1], box)) for box in (((0,), (1,)), ((1,), (0,)))]
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
    tables = [_table(("model.a", "torch.float32", [5, 4], box)) for box in boxes]
    with pytest.raises(CheckpointError, match=r"model\.a \[5, 4\] cannot be saved: its chunks do not make it up"):
        plan.make(tables)


def test_one_name_for_two_kinds_of_tensor() -> None:
    tables = [_table(("model.a", f"torch.{kind}", [1], ((0,), (1,)))) for kind in ("float32", "bfloat16")]
    with pytest.raises(CheckpointError, match=r"model\.a is \[1\] of torch.bfloat16 and \[1\] of torch.float32"):
        plan.make(tables)


def test_an_index_comes_back_from_disk(tmp_path: Path) -> None:
    tensor = StoredTensor(torch.float8_e4m3fn, torch.Size([5, 4]), (np.array([0, 3]), np.array([0])), 0)
    empty = StoredTensor(torch.int64, torch.Size([0, 3]), (np.array([0]), np.array([0])), 2)
    made = Index(("a", "b"), {"model.x": tensor, "rest.y": empty}, *np.array([[0, 1, 1], [0, 7, 99], [12, 50, 1]]))
    index.write(tmp_path / "index", made)
    assert index.read(tmp_path / "index", {"a": 12, "b": 100}).agrees_with(made)
    with pytest.raises(CheckpointError, match="ends behind the end of its file"):
        index.read(tmp_path / "index", {"a": 11, "b": 100})


def test_metadata_of_many_chunks_is_written_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "ASIDE", 0)
    monkeypatch.setattr(metadata, "_pickle", None)
    path = mutations.save(tmp_path)
    assert stored(path).agrees_with(metadata.read(path, manifest.read(path)))


def test_metadata_that_another_process_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    path = mutations.save(tmp_path)
    where, written = stored(path), (path / ".metadata").read_bytes()
    (path / ".metadata").unlink()
    (path / "titan.index").write_bytes(b"")
    monkeypatch.setattr(metadata, "ASIDE", 0)
    metadata.write(path, where)
    assert (path / ".metadata").read_bytes() == written
    [said] = told()
    assert "titan.index is not a valid index" in said and "; this one writes it" in said


def test_the_process_that_writes_metadata_hears_no_signal_and_ends_with_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe in place of the index holds the process up."""
    path = mutations.save(tmp_path)
    where = stored(path)
    (path / "titan.index").unlink()
    os.mkfifo(path / "titan.index")
    started, start = [], subprocess.Popen

    def note(*args: Any, **kwargs: Any) -> Any:
        started.append(start(*args, **kwargs))
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            started[0].send_signal(number)
        started[0].stdin.close()  # as the end of this process does
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", note)
    monkeypatch.setattr(metadata, "ASIDE", 0)
    monkeypatch.setattr(metadata, "_pickle", lambda path, index: None)
    metadata.write(path, where)
    assert started[0].returncode == 1, "ended by itself, not by a signal"
