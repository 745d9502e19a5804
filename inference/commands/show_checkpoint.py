"""`titan checkpoint show`: the tensors of one checkpoint, where their chunks lie, and on demand their norms."""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk import manifest
from titan.checkpoint.disk.plain import shown
from titan.errors import EXIT_DONE, CheckpointError, ConfigError

if TYPE_CHECKING:
    from titan.checkpoint.disk.index import Index
    from titan.inference.stored_tensors import Norm, Row

ABOUT = """Show the tensors of one checkpoint, of a folder its newest: names, dtypes, shapes, bytes, chunks and files.
Weights have the model's names, the optimizer's state is optimizer.PARAMETER.SLOT, and techniques' state, in files of
its own, TECHNIQUE.NAME. `2 x 1` chunks are cut in two along the first dimension. Without --norms no data file is read:
their sizes are checked, but not their hashes. `titan checkpoint verify` checks these. Parameters include persistent
buffers. A stacked tensor begins with a dimension for the ranks that each saved one of their own."""
_NORMS = """read the tensors of floating point, a part at a time: L2 norm, root mean square and largest magnitude of
their finite elements, and the number of elements that are NaN or infinite; of a stacked tensor for each rank"""

_NUMBERS = ("bytes", "l2", "rms", "max_abs", "non_finite")
"""Columns that are aligned to the right."""
_HEADINGS = {"max_abs": "max abs", "non_finite": "non-finite"}
_FILES = 3
"""Ranges of ranks that a row names."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `show` takes beside a folder and `--json`."""
    about = "show only these names; a pattern of the shell, as 'layers.0.*'; case-sensitive"
    parser.add_argument("--tensor", metavar="GLOB", help=about)
    parser.add_argument("--norms", action="store_true", help=_NORMS)


def show(args: argparse.Namespace) -> int:
    """Print the header and the tensors of a checkpoint; the exit code."""
    # Imported here: `titan --help` has no use for PyTorch.
    from titan.checkpoint.disk import index as indexes
    from titan.inference import stored_tensors

    path = _chosen(args.where)
    with folders.named():
        entries = folders.check_sizes(path)
        state = folders.read_state(path)
        index = indexes.read(path / manifest.INDEX, manifest.data_sizes(entries))
    whole = stored_tensors.rows_of(index)
    head = _head(path, state, whole)
    every = stored_tensors.rows_of(index, by_rank=True) if args.norms else whole
    rows = every if args.tensor is None else _matching(every, args.tensor)
    norms = _norms(path, index, rows) if args.norms else None
    tensors = [_about(row) for row in rows]
    for table, norm in zip(tensors, norms or [], strict=False):
        table |= dict.fromkeys(_NUMBERS[1:]) if norm is None else norm.table()
    if args.json:
        print(json.dumps({**head, "tensors": tensors}))
    else:
        _print_head(head)
        if args.tensor is not None:
            print(f"shown       {len(rows):,} of {len(every):,} rows")
        print()
        _print_tensors(tensors, norms is not None)
    return EXIT_DONE


def layout_of(state: dict[str, Any]) -> str | None:
    """The degrees of a checkpoint's mesh that are not 1, as in `dp_shard 4 tp 2`; None where its state has no mesh."""
    mesh = state.get("rest", {}).get("config", {}).get("mesh")
    if not isinstance(mesh, dict):
        return None
    degrees = (f"{axis} {degree}" for axis, degree in mesh.items() if type(degree) is int and degree != 1)
    return " ".join(degrees) or "one"


def _chosen(where: Path) -> Path:
    if folders.is_hf(where):
        mend = "`titan convert --from DIR --format titan --output NEW` makes a checkpoint of it"
        raise CheckpointError(f"{where} is a Hugging Face folder; {mend}")
    return folders.choose(str(where), "DIR")


def _matching(rows: Sequence[Row], glob: str) -> list[Row]:
    from titan.inference import stored_tensors

    if found := stored_tensors.matching(rows, glob):
        return found
    near = difflib.get_close_matches(glob, [row.name for row in rows], n=1)
    part = f"'*{glob.strip('*')}*'"
    hint = f"did you mean {near[0]!r}?" if near else f"a pattern is for whole names; {part} is for a part"
    raise ConfigError(f"no name of the {len(rows):,} tensors matches {glob!r} ({hint})", "--tensor")


def _norms(path: Path, index: Index, rows: Sequence[Row]) -> list[Norm | None]:
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    from titan.inference import stored_tensors

    total = sum(row.bytes for row in rows if row.stored.dtype.is_floating_point)
    with tqdm(total=total, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:
        return stored_tensors.norms(path, index, rows, bar.update)


def _head(path: Path, state: dict[str, Any], rows: Iterable[Row]) -> dict[str, Any]:
    """What `--json` has beside tensors. rows: of all tensors, of a stacked one all ranks' together."""
    kinds: dict[str, dict[str, int]] = {}
    parameters = stacked = 0
    for row in rows:
        kind = kinds.setdefault(row.kind, {"tensors": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["bytes"] += row.bytes
        stacked += row.stored.stacked
        if row.kind == "weights":
            parameters += row.stored.shape[row.stored.stacked :].numel()
    made_by = {name: state[name] for name in ("step", "saved", "world_size")} | {"layout": layout_of(state)}
    about = {name: state[name] for name in ("torch", "format", "optimizer")}
    return {"path": str(path), **made_by, **about, "parameters": parameters, "stacked": stacked, "kinds": kinds}


def _about(row: Row) -> dict[str, Any]:
    """A tensor in `--json`. chunks: how many each dimension is cut into."""
    stored = row.stored
    kind = {"name": row.name, "kind": row.kind, "dtype": str(stored.dtype).removeprefix("torch.")}
    shape = {"shape": list(stored.shape), "stacked": stored.stacked, "bytes": row.bytes}
    return {**kind, **shape, "chunks": [len(cuts) for cuts in stored.cuts], "files": row.files}


def _print_head(head: dict[str, Any]) -> None:
    layout = "" if head["layout"] in (None, "one") else f" ({shown(head['layout'])})"
    ranks = f"{head['world_size']:,} rank{'s'[: head['world_size'] != 1]}{layout}"
    lines = {"path": head["path"], "step": f"{head['step']:,}, saved {shown(head['saved'])}"}
    lines["saved by"] = f"{ranks}, PyTorch {shown(head['torch'])}, format {head['format']}"
    extra = {"weights": f"{head['parameters']:,} parameters, "}
    extra["optimizer"] = f"{shown(head['optimizer'])}, " if head["optimizer"] else ""
    for kind, total in head["kinds"].items():
        lines[kind] = f"{extra.get(kind, '')}{_tensors(total['tensors'])}, {total['bytes'] / 1e6:,.1f} MB"
    if stacked := head["stacked"]:
        what = "the first dimension has an entry for each rank that saved one of its own"
        lines["stacked"] = f"{_tensors(stacked)}: {what}"
    for name, line in lines.items():
        print(f"{name:<11} {line}")


def _tensors(count: int) -> str:
    return f"{count:,} tensor{'s'[: count != 1]}"


def _print_tensors(tensors: Sequence[dict[str, Any]], with_norms: bool) -> None:
    columns = ["name", "dtype", "shape", "bytes", "chunks", *_NUMBERS[1:] * with_norms, "files"]
    rows = [[_HEADINGS.get(column, column) for column in columns]]
    rows += [[_cell(column, tensor) for column in columns] for tensor in tensors]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.rjust if column in _NUMBERS else str.ljust for column in columns]
    for texts in rows:
        print("  ".join(align(text, width) for align, text, width in zip(aligned, texts, widths, strict=True)).rstrip())


def _cell(column: str, tensor: dict[str, Any]) -> str:
    value = tensor[column]
    if column == "shape":
        return f"{value}{' stacked' * tensor['stacked']}"
    if column == "chunks":
        return " x ".join(map(str, value)) if max(value, default=1) > 1 else "1"
    if column == "files":
        return _files(value)
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _files(files: Sequence[str]) -> str:
    """The files in short, as `rank-00000..00003` for those of four ranks."""
    numbers = sorted(map(manifest.rank_of, files))
    ranges = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *others = (number for _, number in run)
        ranges.append(f"{first:05d}..{others[-1]:05d}" if others else f"{first:05d}")
    more = f" and {len(ranges) - _FILES:,} more ranges" * (len(ranges) > _FILES)
    return f"{files[0].rpartition('-')[0]}-{','.join(ranges[:_FILES])}{more}"
