"""manifest.json: name, size and SHA-256 of every other file of a checkpoint, so that damage is found before it is used.

It detects damage, not tampering: whoever can change a file can write a matching manifest. The code that reads each file
makes sure that an untrusted checkpoint executes nothing.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from titan.checkpoint.disk.plain import cannot_be_read, read_table, size_of, write_table
from titan.errors import CheckpointError, UnreadableError

MANIFEST = "manifest.json"
INDEX = "titan.index"
"""Which tensors there are, and in which files."""
STATE = "state.json"
"""Everything that is no tensor."""

TECHNIQUES = "techniques"
"""Folder with techniques' tensors: PyTorch's reader takes each safetensors file of a folder for a part of one state."""
TOKENIZER = "tokenizer"
"""Folder with copies of the tokenizer's files."""

_DATA = re.compile(rf"({TECHNIQUES}/)?rank-(\d{{5}}|[1-9]\d{{5,8}})\.safetensors", re.ASCII)
_COPY = re.compile(rf"{TOKENIZER}(/(?!\.{{1,2}}(/|$))[^/\0]{{1,255}}){{1,2}}")
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHOWN = 12


Progress = Callable[[int], object]


class FileEntry(NamedTuple):
    """An entry of a manifest: a file as it was written. size: bytes."""

    size: int
    sha256: str


def is_checkpoint_file(name: str) -> bool:
    """Whether a file's name is one that a manifest lists."""
    return name in (INDEX, STATE) or bool(_DATA.fullmatch(name) or (_COPY.fullmatch(name) and name.isprintable()))


def data_file(rank: int, of_technique: bool = False) -> str:
    """Name of the file with a rank's tensors, or with those of techniques that it writes."""
    return f"{TECHNIQUES}/" * of_technique + f"rank-{rank:05d}.safetensors"


def rank_of(file: str) -> int:
    """The rank that wrote a data file."""
    return int(file.rpartition("-")[2].removesuffix(".safetensors"))


def data_sizes(entries: Mapping[str, FileEntry]) -> dict[str, int]:
    """Bytes of each data file."""
    return {name: entry.size for name, entry in entries.items() if _DATA.fullmatch(name)}


def entry_of(file: Path, read: Progress = lambda count: None) -> FileEntry:
    """The entry of a file as it is; `read` hears how many bytes have been read since it was last told."""
    size, digest = size_of(file), hashlib.sha256()
    try:
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(4 << 20):
                digest.update(block)
                read(len(block))
    except OSError as error:
        raise cannot_be_read(file, error) from error
    return FileEntry(size, digest.hexdigest())


def write(path: Path, entries: Mapping[str, FileEntry], origin: Mapping[str, object] | None = None) -> None:
    """Write a checkpoint's manifest, its last file. origin: what it repeats of the state.json, in case of damage."""
    files = {name: entries[name]._asdict() for name in sorted(entries)}
    write_table(path / MANIFEST, {"files": files, **(origin or {})})


def read(path: Path) -> dict[str, FileEntry]:
    """The files a checkpoint is made of, by name; a CheckpointError where it lists what no checkpoint has."""
    table = read_table(path / MANIFEST)
    files = table.get("files")
    if not isinstance(files, dict) or table.keys() - {"files", "serial", "lineage"}:
        raise CheckpointError(f"{path / MANIFEST} is not a table of files")
    entries = {}
    for name, entry in files.items():
        if not is_checkpoint_file(name):
            raise CheckpointError(f"{path / MANIFEST} lists {name[:200]!r}, which is not the name of a checkpoint file")
        size, sha256 = (entry.get(key) for key in FileEntry._fields) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(sha256, str) or not _HASH.fullmatch(sha256):
            raise CheckpointError(f"{path / MANIFEST} gives no valid size and sha256 of {name}")
        entries[name] = FileEntry(size, sha256)
    if not {INDEX, STATE} <= entries.keys():
        raise CheckpointError(f"{path / MANIFEST} lacks {INDEX} or {STATE}")
    return entries


def wrong_sizes(path: Path, entries: Mapping[str, FileEntry]) -> dict[str, str]:
    """File -> what is seen without reading: missing, of another size, or data that the manifest does not list."""
    links = [path / name for name in (TECHNIQUES, TOKENIZER) if (path / name).is_symlink()]
    faults = {link.name: f"{link} is a link, which no checkpoint has" for link in links}
    for name, entry in entries.items():
        try:
            if (size := size_of(path / name)) != entry.size:
                faults[name] = f"{name} has {size:,} bytes, its manifest says {entry.size:,}"
        except UnreadableError:
            raise
        except CheckpointError as error:
            faults[name] = str(error)
    extra = filter(is_checkpoint_file, unlisted(path, entries))
    return faults | {name: f"{name} is not in its manifest" for name in extra}


def names_in(path: Path) -> list[str]:
    """Names, as in a manifest, of all that is in a checkpoint's folder."""
    folders = [path / name for name in (TECHNIQUES, TOKENIZER) if (path / name).is_dir()]
    files = [file for file in path.iterdir() if file not in folders]
    inside = itertools.chain(*(folder.rglob("*") for folder in folders))
    files += (file for file in inside if not file.is_dir() or not any(file.iterdir()))
    return sorted(file.relative_to(path).as_posix() for file in files)


def unlisted(path: Path, entries: Mapping[str, FileEntry]) -> list[str]:
    """What is in the folder and not of the checkpoint."""
    return [name for name in names_in(path) if name not in entries and name != MANIFEST]


def wrong_hashes(
    path: Path, entries: Mapping[str, FileEntry], names: Iterable[str], read: Progress = lambda count: None
) -> list[str]:
    """Which of these files are not what was written; `read` and errors as in `entry_of`."""
    faults = []
    for name in names:
        found, written = entry_of(path / name, read).sha256, entries[name].sha256
        if found != written:
            faults.append(f"{name} has SHA-256 {found[:_SHOWN]}, its manifest says {written[:_SHOWN]}")
    return faults
