"""`titan checkpoint`: list checkpoints and their branches, verify their files, show their tensors, remove some."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk import manifest
from titan.checkpoint.disk.lineage import Found, branch, parent
from titan.checkpoint.disk.plain import shown
from titan.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, by_errno
from titan.inference.commands import show_checkpoint
from titan.paths import no_folder, told

HELP = "list checkpoints, verify their files, show their tensors, or remove some"

_FORMER = re.compile(r"\.metadata|__\d{1,9}_\d{1,9}\.distcp", re.ASCII)
"""Files that checkpoints had before they were safetensors, and that can be removed with them."""

COMPLETE, ABANDONED, DAMAGED, UNFINISHED = "complete", "abandoned", "damaged", "unfinished"

_LIST = f"""List checkpoints, oldest first: step, when it was saved (UTC), size, ranks, layout, and one of
  {COMPLETE}    all files are present and have the size in the manifest
  {ABANDONED}   complete, but the run has gone back to an older checkpoint: neither the newest nor its ancestor
  {DAMAGED}     a file is missing or has another size; `titan checkpoint verify` also detects flipped bits
  {UNFINISHED}  being written, or left by a run that was killed; the next save or resume removes it
The column `branch` draws which checkpoint goes on from which, like `git log --graph`, the oldest on top. The newest and
its ancestors stand in the first column. `resume = "auto"` and retention follow that branch."""
_VERIFY = """Read every file and compare its SHA-256 with the manifest of its checkpoint. Then read the index and the
headers of the data files, which must agree. Prints each problem; exits with 1 if there is one. The manifest detects
damage, not tampering: whoever changes a file on purpose can change the manifest too. Verifying or loading an untrusted
checkpoint never executes code from it."""
_RM = """Remove one checkpoint; with --keep N all but the newest N complete checkpoints of a folder's branch; with
--abandoned those of other branches. --keep removes other branches and damaged checkpoints too, and leaves unfinished
ones. Asks for confirmation. The only complete checkpoint of a folder is removed only with --yes. A folder that is no
checkpoint, or holds other files, is never touched."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One parser for each action."""
    kinds = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = ("show", show_checkpoint.ABOUT, show_checkpoint.show)
    for name, about, does in (("list", _LIST, _list), ("verify", _VERIFY, _verify), show, ("rm", _RM, _rm)):
        first, raw = about.partition(":")[0].partition(".")[0], argparse.RawDescriptionHelpFormatter
        line = first[0].lower() + first[1:].replace("\n", " ")
        kind = kinds.add_parser(name, help=line, description=about, formatter_class=raw)
        kind.add_argument("where", type=Path, metavar="DIR", help="a run, its checkpoints folder, or one checkpoint")
        kind.add_argument("--json", action="store_true", help="one JSON object")
        kind.set_defaults(does=does)
    show_checkpoint.add_options(kinds.choices["show"])
    which = kind.add_mutually_exclusive_group()
    which.add_argument("--keep", type=int, metavar="N", help="remove all but the N newest complete ones of the branch")
    which.add_argument(
        "--abandoned", action="store_true", help="remove all but the newest checkpoint and its ancestors"
    )
    kind.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def run(args: argparse.Namespace) -> int:
    """List, verify, show or remove; the exit code."""
    try:
        return int(args.does(args))
    except OSError as error:
        if error.filename is None:  # not a file's: a reader of our output that has left
            raise
        raise by_errno(error, CheckpointError(told(error))) from error


def _list(args: argparse.Namespace) -> int:
    found = _checkpoints(args.where)
    checkpoints = _about_each(found)
    if args.json:
        print(json.dumps({"checkpoints": checkpoints}))
        return EXIT_DONE
    rows = [["branch", "step", "saved", "size", "ranks", "layout", "state", "path"]]
    for each, line in zip(checkpoints, _graph(found), strict=True):
        state = ABANDONED if each["abandoned"] and each["state"] == COMPLETE else each["state"]
        row = {**each, "branch": line, "size": _megabytes(each["bytes"]), "ranks": each["world_size"], "state": state}
        row |= {key: each[key] and shown(each[key]) for key in ("saved", "layout")}
        rows.append(["-" if row[key] is None else str(row[key]) for key in rows[0]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for texts in rows:
        print("  ".join(map(str.ljust, texts, widths)).rstrip())
    for each in checkpoints:
        if each["fault"]:
            print(each["fault"], file=sys.stderr)
    return EXIT_DONE


def _verify(args: argparse.Namespace) -> int:
    checkpoints = [each.path for each in _checkpoints(args.where) if each.path.suffix != ".tmp"]
    total = sum(map(_bytes, checkpoints))
    if not checkpoints:
        raise CheckpointError(f"{args.where} holds no finished checkpoint")
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    with tqdm(total=total, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:
        faults = {path: _faults(path, bar.update) for path in checkpoints}
    if args.json:
        told = [{"path": str(path), "faults": some} for path, some in faults.items()]
        print(json.dumps({"checkpoints": told, "bytes": total}))
    else:
        for path, some in faults.items():
            print(f"{path}: {DAMAGED if some else 'verified'}, {_megabytes(_bytes(path))}")
            for fault in some:
                print(f"  {fault}")
    return EXIT_FAILED if any(faults.values()) else EXIT_DONE


def _rm(args: argparse.Namespace) -> int:
    doomed, spared = _doomed(args.where, args.keep, args.abandoned)
    if not args.yes and not any(map(_sound, spared)) and (last := [path for path in doomed if _sound(path)]):
        raise CheckpointError(f"{last[-1]} is the only complete checkpoint in its folder; add --yes to remove it")
    for path in doomed:
        names = manifest.names_in(path)
        parts = {name for name in names if manifest.is_checkpoint_file(name) or _FORMER.fullmatch(name)}
        parts.add(manifest.MANIFEST)
        foreign = [name for name in names if name not in parts or not (path / name).is_file()]
        if path.is_symlink() or foreign:
            what = f"holds {min(foreign)}, which is no part of a checkpoint" if foreign else "is a link"
            raise CheckpointError(f"{path} {what}; nothing was removed")
    if revived := _revived(args.where, doomed):
        print(f"{revived} will be the newest then, of a branch that was abandoned", file=sys.stderr)
    if doomed and not args.yes:
        print(*(f"{path}, {_megabytes(_bytes(path))}" for path in doomed), sep="\n", file=sys.stderr)
        print(f"remove {len(doomed)} checkpoint{'s'[: len(doomed) != 1]}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing removed", file=sys.stderr)
            return EXIT_FAILED
    freed = {}
    for path in doomed:
        size = _bytes(path)
        if folders.sweep(path) if path.suffix == ".tmp" else folders.remove(path):
            freed[path] = size
    if args.json:
        print(json.dumps({"removed": [str(path) for path in freed], "bytes": sum(freed.values())}))
    else:
        print(f"{len(freed)} removed, {_megabytes(sum(freed.values()))} freed")
    return EXIT_DONE if len(freed) == len(doomed) else EXIT_FAILED


def _revived(where: Path, doomed: Sequence[Path]) -> Path | None:
    """The checkpoint that becomes the newest by removing others, though the run has not gone on from it."""
    if len(doomed) != 1 or not _is_checkpoint(where):
        return None
    found = folders.survey(where.parent, sizes=False)
    left = branch([each for each in found if each.path.resolve() != where.resolve()])
    return left[-1].path if left and left[-1] not in branch(found) else None


def _doomed(where: Path, keep: int | None, abandoned: bool) -> tuple[list[Path], list[Path]]:
    """Which checkpoints to remove, and which others stand beside them."""
    if keep is None and not abandoned:
        if not _is_checkpoint(where):
            _inside(where)
            hint = "to remove all but the newest N of a folder, add --keep N; other branches, --abandoned"
            raise CheckpointError(f"{where} is not one checkpoint; {hint}")
        beside = folders.sound(folders.survey(where.parent, sizes=False))
        return [where], [path for path in beside if path.resolve() != where.resolve()]
    if keep is not None and keep < 1:
        raise CheckpointError(f"--keep {keep}: must be at least 1")
    if _is_checkpoint(where):
        raise CheckpointError(f"{where} is one checkpoint; --keep and --abandoned need a run or its checkpoints folder")
    found = folders.survey(_inside(where))
    kept = branch(found)
    spared = folders.sound(kept)[-(keep or 0) :]
    if not spared:
        others = folders.on_other_branches(found)
        raise CheckpointError(f"{where} holds no sound checkpoint of the newest branch; nothing was removed{others}")
    if abandoned:
        return [each.path for each in found if each.lineage and each not in kept], spared
    return [each.path for each in found if each.path not in spared], spared


def _checkpoints(where: Path) -> list[Found]:
    """All checkpoints a path means: in the order of commits, then those that say no order and the unfinished."""
    if _is_checkpoint(where):
        return [Found(0, where, ())]
    inside = _inside(where)
    found = sorted(folders.survey(inside), key=lambda each: (not each.lineage, each))
    unfinished = sorted(path for path in inside.iterdir() if folders.is_unfinished(path))
    if not (checkpoints := [*found, *(Found(0, path, ()) for path in unfinished)]):
        raise CheckpointError(f"{where} is not a checkpoint and contains none")
    return checkpoints


def _inside(where: Path) -> Path:
    if not where.is_dir():
        raise CheckpointError(f"{where}: {no_folder(where)}")
    return where / "checkpoints" if (where / "checkpoints").is_dir() else where


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and (folders.is_complete(path) or folders.is_unfinished(path) or folders.is_step(path))


def _sound(path: Path) -> bool:
    return path.suffix != ".tmp" and not _fault(path)


def _fault(path: Path) -> str:
    """What is wrong with its file sizes and its state.json, without hashing; empty if nothing is."""
    try:
        folders.check_sizes(path)
        folders.read_state(path)
    except CheckpointError as error:
        return str(error)
    return ""


def _faults(path: Path, read: Callable[[int], object]) -> list[str]:
    """A sentence for each file or record that differs from what was written; empty if the checkpoint is sound."""
    # Imported here: `titan --help` has no use for PyTorch.
    from titan.checkpoint import storage
    from titan.checkpoint.disk import index

    if lacks := folders.lacking(path):
        return [f"it lacks {' and '.join(lacks)}"]
    try:
        entries = folders.listed(path)
        wrong = manifest.wrong_sizes(path, entries)
        faults = [*wrong.values(), *manifest.wrong_hashes(path, entries, entries.keys() - wrong.keys(), read)]
        if not faults:
            folders.read_state(path)
            where = index.read(path / manifest.INDEX, manifest.data_sizes(entries))
            faults += storage.wrong_headers(path, where, sorted(manifest.data_sizes(entries)))
    except CheckpointError as error:
        return [str(error)]
    return faults


def _about(path: Path) -> dict[str, Any]:
    fault = "" if path.suffix == ".tmp" else _fault(path)
    state = UNFINISHED if path.suffix == ".tmp" else DAMAGED if fault else COMPLETE
    stored = folders.read_state(path) if state == COMPLETE else {}
    saved = {"path": str(path), "step": stored.get("step", _step_of(path)), "saved": stored.get("saved")}
    made_by = {"world_size": stored.get("world_size"), "layout": show_checkpoint.layout_of(stored)}
    return {**saved, "bytes": _bytes(path), **made_by, "state": state, "fault": fault}


def _about_each(found: list[Found]) -> list[dict[str, Any]]:
    """What there is to say of checkpoints; those that are removed meanwhile are taken out of `found`."""
    kept, rows = branch(found), list[dict[str, Any]]()
    for each in [*found]:
        try:
            about = _about(each.path)
        except FileNotFoundError:
            if each.path.exists():
                raise
            found.remove(each)
            continue
        before = parent(each, found[: len(rows)])
        related = {"parent": before and str(before.path), "abandoned": bool(each.lineage) and each not in kept}
        rows.append({**about, **related})
    return rows


def _graph(found: Sequence[Found]) -> list[str]:
    """A line for each checkpoint, which stand in order: `*` in the lane of its branch, `|` in lanes that go on."""
    kept = branch(found)
    lanes: dict[Path, int] = {}
    forks: dict[int, int] = {}  # row in which a lane begins -> the lane that it leaves
    rows: dict[int, list[int]] = {}  # of each lane
    followed: set[Path] = set()
    for row, each in enumerate(found):
        before = parent(each, found[:row])
        lane = 0 if each in kept else 1 + max(lanes.values(), default=0)
        if before is not None:
            left = lanes[before.path]
            lane = left if left and before.path not in followed else lane
            forks |= {row: left} if left != lane else {}
            followed.add(before.path)
        if each.lineage:
            lanes[each.path] = lane
            for number in {lane, forks.get(row, lane)}:
                rows.setdefault(number, []).append(row)
    drawn = ((row, lanes.get(each.path)) for row, each in enumerate(found))
    return ["" if lane is None else _line(row, lane, forks, rows) for row, lane in drawn]


def _line(row: int, lane: int, forks: Mapping[int, int], rows: Mapping[int, Sequence[int]]) -> str:
    goes_on = {number for number, those in rows.items() if those[0] <= row <= those[-1]}
    cells = ["*" if number == lane else "|" if number in goes_on else " " for number in range(max(rows) + 1)]
    left = forks.get(row, lane)
    begins = [*"".join(f"{cell} " for cell in cells)]
    begins[2 * left + 1 : 2 * lane] = "-" * (2 * (lane - left) - 1)
    return "".join(begins).rstrip()


def _bytes(path: Path) -> int:
    return sum((path / name).lstat().st_size for name in manifest.names_in(path))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint, complete or not; None where the name says none."""
    match = re.match(r"step-(\d{8})(?!\d)", path.name, re.ASCII)
    return None if match is None else int(match[1])
