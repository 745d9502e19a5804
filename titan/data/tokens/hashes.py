"""SHA-256 of files, remembered beside the tokenised text so that a second run does not read a corpus to know it."""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from titan.errors import DataError, by_errno


def content_hashes(files: Sequence[Path], memory: Path, threads: int) -> list[str]:
    """SHA-256 (hex) of each file. `memory` is a JSON file of what was hashed before, by path, size and time of change;
    one that cannot be understood is written anew.

    Raises:
        DataError: a file cannot be read.
    """
    known = _recall(memory)
    marks = [_mark(file) for file in files]
    unknown = [number for number, mark in enumerate(marks) if mark not in known]
    if unknown:
        with ThreadPoolExecutor(threads) as pool:
            found = pool.map(_hash, [files[number] for number in unknown])
            known.update({marks[number]: digest for number, digest in zip(unknown, found, strict=True)})
        _remember(memory, known)
    return [known[mark] for mark in marks]


def _mark(file: Path) -> str:
    try:
        status = file.stat()
    except OSError as error:
        raise by_errno(error, DataError(f"{file} cannot be read: {error.strerror}")) from None
    return f"{file.absolute()}|{status.st_size}|{status.st_mtime_ns}"


def _hash(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise by_errno(error, DataError(f"{file} cannot be read: {error.strerror}")) from None


def _recall(memory: Path) -> dict[str, str]:
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}  # absent or damaged: everything is hashed again
    if not isinstance(known, dict) or not all(isinstance(digest, str) for digest in known.values()):
        return {}
    return known


def _remember(memory: Path, known: dict[str, str]) -> None:
    partial = memory.with_name(f"{memory.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(known), encoding="utf-8")
    os.replace(partial, memory)
