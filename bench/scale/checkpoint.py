"""Planning and loading checkpoints of a faked job on 2,048 ranks, through titan's arrays and through PyTorch's DCP.

The job is Llama 65B with pp 4, tp 8 and the rest in dp_shard: names, shapes and shards are those of such a job. titan
needs no data file, DCP's reader sparse ones. Nothing but rank 0's work is timed; what all ranks do alike, once.
"""

import json
import math
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from bench.headlines import READ_HEADERS, READ_INDEX
from titan.checkpoint.disk import index, plan
from titan.checkpoint.disk.index import Index
from titan.checkpoint.disk.manifest import data_file
from titan.checkpoint.disk.plan import Block, Table
from titan.checkpoint.disk.tensor_file import METADATA, OFFSETS, SHARDING, WORDS

PP, TP = 4, 8
LAYERS, DIM, HIDDEN, VOCAB = 80, 8192, 22016, 32000
"""Of the preset 65b."""

FRACTION = 16
"""DCP is timed on this part of the ranks: its time is linear in the number of chunks."""

LEAST = PP * TP * FRACTION
"""Ranks of which DCP's part still has whole stages; a job has a multiple of it."""

Box = tuple[tuple[int, ...], tuple[int, ...]]


def _weights() -> Iterator[tuple[str, tuple[int, ...], int | None, int]]:
    """Name, shape, the dimension that tp shards, and stage of each parameter."""
    yield "embed.weight", (VOCAB, DIM), 0, 0
    for layer in range(LAYERS):
        stage = layer * PP // LAYERS
        for name in ("attention_norm", "mlp_norm"):
            yield f"layers.{layer}.{name}.weight", (DIM,), None, stage
        for name in ("wq", "wk", "wv"):
            yield f"layers.{layer}.attention.{name}.weight", (DIM, DIM), 0, stage
        yield f"layers.{layer}.attention.wo.weight", (DIM, DIM), 1, stage
        for name in ("w1", "w3"):
            yield f"layers.{layer}.mlp.{name}.weight", (HIDDEN, DIM), 0, stage
        yield f"layers.{layer}.mlp.w2.weight", (DIM, HIDDEN), 1, stage
    yield "norm.weight", (DIM,), None, PP - 1
    yield "head.weight", (VOCAB, DIM), 0, PP - 1


def _box(shape: tuple[int, ...], tp_dim: int | None, tp: int, shard: int, shards: int) -> Box:
    """The part of a parameter on one rank: tp cuts it first, FSDP cuts the rows that are left."""
    offsets, sizes = [0] * len(shape), list(shape)
    if tp_dim is not None:
        sizes[tp_dim] //= TP
        offsets[tp_dim] = tp * sizes[tp_dim]
    each = math.ceil(sizes[0] / shards)
    first = min(sizes[0], shard * each)
    offsets[0] += first
    sizes[0] = min(each, sizes[0] - first)
    return tuple(offsets), tuple(sizes)


def _held(ranks: int) -> Iterator[list[tuple[str, tuple[int, ...], Box]]]:
    """Of each rank: name, shape and part of every tensor that it saves, AdamW's state included."""
    shards = ranks // (PP * TP)
    weights = list(_weights())
    for rank in range(ranks):
        stage, rest = divmod(rank, shards * TP)
        shard, tp = divmod(rest, TP)
        held = []
        for name, shape, tp_dim, where in weights:
            if where == stage:
                box = _box(shape, tp_dim, tp, shard, shards)
                held += [(f"model.{name}", shape, box), (f"optimizer.{name}.exp_avg", shape, box)]
                held += [(f"optimizer.{name}.exp_avg_sq", shape, box), (f"optimizer.{name}.step", (), ((), ()))]
        yield held


def _table(rank: int, held: list[tuple[str, tuple[int, ...], Box]]) -> Table:
    """A rank's table: the tensors above, and the states of its random number generators."""
    states = [(f"rest.rng.{rank}.{kind}", (size,), ((0,), (size,))) for kind, size in (("cpu", 5056), ("cuda", 16))]
    return _block(held), _block(states)


def _block(held: list[tuple[str, tuple[int, ...], Box]]) -> Block:
    header = [[name, "F32", list(shape)] for name, shape, _ in held]
    numbers = [number for *_, box in held for part in box for number in part]
    return Block(json.dumps(header).encode(), np.array(numbers, np.int64).tobytes())


def _timed(seconds: dict[str, float], what: str, began: float) -> None:
    seconds[what] = round(time.perf_counter() - began, 3)


def ours(ranks: int, folder: Path) -> dict[str, float]:
    """Seconds of each part of a save and a load by titan's index, which is left in a folder."""
    seconds: dict[str, float] = {}
    sent = pickle.dumps(_tables(ranks))
    began = time.perf_counter()
    made = plan.make(pickle.loads(sent))
    _timed(seconds, "plan a save (first save alone)", began)
    began = time.perf_counter()
    index.write(folder / "titan.index", made.index)
    _timed(seconds, "write the index", began)
    sizes = {data_file(rank): 1 << 50 for rank in range(ranks)}
    began = time.perf_counter()
    read = index.read(folder / "titan.index", sizes)
    _timed(seconds, READ_INDEX, began)
    began = time.perf_counter()
    read = pickle.loads(pickle.dumps(read))
    _timed(seconds, "send the index", began)
    began = time.perf_counter()
    for name, _, (offsets, lengths) in next(_held(ranks)):
        for number in read.tensors[name].overlapping(offsets, lengths):
            read.place(read.tensors[name], number)
    _timed(seconds, "find a rank's chunks, on every rank", began)
    return seconds


def _tables(ranks: int) -> list[Table]:
    return [_table(rank, held) for rank, held in enumerate(_held(ranks))]


def dcp_save(ranks: int) -> dict[str, float]:
    """Seconds of DCP's planner for a save: gathering plans of objects, uniting them, pickling the metadata."""
    seconds: dict[str, float] = {}
    sent = [pickle.dumps(SavePlan([_item(*one) for one in held])) for held in _held(ranks)]
    began = time.perf_counter()
    plans = [pickle.loads(one) for one in sent]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    _, united = planner.create_global_plan(plans)
    _timed(seconds, "DCP: plan a save (every save)", began)
    began = time.perf_counter()
    places = [(item.index, item.index.fqn) for one in plans for item in one.items]
    united.storage_data = dict(places)
    pickle.dumps(united)
    _timed(seconds, "DCP: pickle the metadata", began)
    return seconds


def _item(name: str, shape: tuple[int, ...], box: Box) -> WriteItem:
    offsets, sizes = (torch.Size(part) for part in box)
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=torch.float32), torch.Size(shape)
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def dcp_load(ranks: int, folder: Path) -> dict[str, float]:
    """Seconds of DCP's reader for the headers of all files, from which it learns where what lies."""
    seconds: dict[str, float] = {}
    _write_headers(folder, plan.make(_tables(ranks)).index, ranks)
    began = time.perf_counter()
    HuggingFaceStorageReader(str(folder)).read_metadata()
    _timed(seconds, READ_HEADERS, began)
    return seconds


def _write_headers(folder: Path, made: Index, ranks: int) -> None:
    """The data files of a checkpoint, sparse: nothing but the headers takes room."""
    for file in map(data_file, range(ranks)):
        entries = made.header(file)
        offsets = {name: {OFFSETS: entry.chunk.offsets} for name, entry in entries.items()}
        header: dict[str, Any] = {METADATA: {SHARDING: json.dumps(offsets)}}
        for name, (chunk, begin) in entries.items():
            ends = [begin, begin + chunk.bytes]
            header[name] = {"dtype": WORDS[chunk.dtype], "shape": chunk.shape, "data_offsets": ends}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + sum(entry.chunk.bytes for entry in entries.values()))


def measure(ranks: int = 2048) -> dict[str, float]:
    """Seconds of rank 0 for the faked job; those of DCP on 1/16 of the ranks, times 16."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as sparse:
        found = ours(ranks, Path(folder))
        few = dcp_save(ranks // FRACTION) | dcp_load(ranks // FRACTION, Path(sparse))
    return found | {what: round(FRACTION * value, 3) for what, value in few.items()}
