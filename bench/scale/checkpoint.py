"""Planning and loading checkpoints of a faked job on 2,048 ranks, through titan's arrays and through DCP's planner.

The job is Llama 65B with pp 4, tp 8 and the rest in dp_shard: names, shapes and shards are those of such a job, and the
data files are sparse. Nothing but rank 0's work is timed; what all ranks do alike is timed once.
"""

import json
import math
import pickle
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from bench.headlines import PARSE_BEFORE, READ_AFTER
from titan.checkpoint.disk import index, metadata, plan
from titan.checkpoint.disk.manifest import FileEntry
from titan.checkpoint.disk.plan import Block, Table, Written

PP, TP = 4, 8
LAYERS, DIM, HIDDEN, VOCAB = 80, 8192, 22016, 32000
"""Of the preset 65b."""

FRACTION = 16
"""DCP's planner is timed on this part of the ranks: its time and memory are linear in the number of chunks."""

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
    header = [[name, "torch.float32", list(shape)] for name, shape, _ in held]
    numbers = [number for *_, box in held for part in box for number in part]
    return Block(json.dumps(header).encode(), np.array(numbers, np.int64).tobytes())


def _timed(seconds: dict[str, float], what: str, began: float) -> None:
    seconds[what] = round(time.perf_counter() - began, 3)


def after(ranks: int, folder: Path) -> dict[str, float]:
    """Seconds of each part of a save and a load by titan's index; leaves `.metadata` and the index in a folder."""
    seconds: dict[str, float] = {}
    tables = [_table(rank, held) for rank, held in enumerate(_held(ranks))]
    sent = pickle.dumps(tables)
    began = time.perf_counter()
    made = plan.make(pickle.loads(sent))
    _timed(seconds, "plan a save (first save alone)", began)
    said = [
        Written(
            {f"__{rank}_0.distcp": FileEntry(0, "")},
            np.column_stack([0 * chosen, np.arange(len(chosen)), 0 * chosen + 1]),
        )
        for rank, chosen in enumerate(made.chosen)
    ]
    began = time.perf_counter()
    found = made.index(said)
    needed = _sizes(found)
    found.start[:] = _starts(found, needed)
    found.length[:] = needed
    index.write(folder / "titan.index", found)
    _timed(seconds, "gather the places and write the index", began)
    for name, size in zip(found.files, np.bincount(found.file, needed, len(found.files)), strict=True):
        with (folder / name).open("wb") as file:
            file.truncate(int(size))
    began = time.perf_counter()
    metadata.write(folder, found)
    _timed(seconds, "write .metadata, in a process of its own", began)
    sizes = {name: (folder / name).stat().st_size for name in found.files}
    began = time.perf_counter()
    read = index.read(folder / "titan.index", sizes)
    _timed(seconds, READ_AFTER, began)
    began = time.perf_counter()
    read = pickle.loads(pickle.dumps(read))
    _timed(seconds, "send the index", began)
    began = time.perf_counter()
    for name, _, (offsets, lengths) in next(_held(ranks)):
        for number in read.tensors[name].overlapping(offsets, lengths):
            read.place(read.tensors[name].first + number)
    _timed(seconds, "find a rank's chunks, on every rank", began)
    return seconds


def _sizes(found: index.Index) -> np.ndarray:
    """Bytes of each chunk."""
    each = [math.prod(sizes) for tensor in found.tensors.values() for _, sizes in tensor.cells()]
    return np.maximum(1, 4 * np.array(each, np.int64))


def _starts(found: index.Index, needed: np.ndarray) -> np.ndarray:
    """The first byte of each chunk where the chunks of a file follow each other."""
    order = np.argsort(found.file, kind="stable")
    ends = np.cumsum(needed[order])
    begins = ends - needed[order]
    first = np.searchsorted(found.file[order], found.file[order])
    starts = np.empty_like(begins)
    starts[order] = begins - begins[first]
    return starts


def before_save(ranks: int) -> dict[str, float]:
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


def before_load(folder: Path) -> dict[str, float]:
    """Seconds to parse `.metadata`, which every rank did; and how much memory one rank took for it, in GB."""
    files = {file.name: FileEntry(file.stat().st_size, "") for file in folder.iterdir()}
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    metadata.read(folder, files)
    seconds: dict[str, float] = {}
    _timed(seconds, PARSE_BEFORE, began)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - taken
    return seconds | {"memory of parsing it (GB)": round(more / 2**20, 2)}


def measure(ranks: int = 2048) -> dict[str, float]:
    """Seconds of rank 0 for the faked job, DCP's planner on 1/16 of the ranks times 16."""
    with tempfile.TemporaryDirectory() as folder:
        found = after(ranks, Path(folder))
        found |= before_load(Path(folder))
    few = before_save(ranks // FRACTION)
    return found | {f"{what}, {FRACTION} x {ranks // FRACTION} ranks": FRACTION * value for what, value in few.items()}
