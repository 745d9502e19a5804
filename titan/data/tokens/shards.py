"""Token shards: how tokenized text lies on disk.

A shard is one file, little endian: a header of 64 bytes, the tokens (padded with zeros to a multiple of 8 bytes), then
for each document the position after its last token as int64. Every document ends with the tokenizer's end id.

    offset  bytes
         0      8  magic "TITANTOK"
         8      4  version, 1
        12      4  bytes of a token: 2 (uint16) or 4 (uint32)
        16      8  number of tokens
        24      8  number of documents
        32     32  SHA-256 of everything after the header

A run reads each header once, on one rank, and sends what it says to the others. Tokens are memory-mapped, by the ranks
that need them. A file whose size is not what its header says is refused, at either time. When a file is mapped, its
header must still be the one that was read before.
"""

import hashlib
import os
import secrets
import struct
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan.data.tokens.files import reading
from titan.errors import DataError
from titan.paths import refuse_lfs_pointer

MAGIC = b"TITANTOK"
VERSION = 1
HEADER_BYTES = 64
_HEADER = struct.Struct("<8sIIQQ32s")
_DTYPES: dict[int, npt.DTypeLike] = {2: "<u2", 4: "<u4"}


@dataclass(frozen=True)
class Shard:
    """A shard as its header describes it. `digest` (hex) stands for its content."""

    path: Path
    width: int
    tokens: int
    documents: int
    digest: str

    @property
    def bytes(self) -> int:
        """Size of a whole file with this header."""
        return HEADER_BYTES + _padded(self.tokens * self.width) + 8 * self.documents

    def map(self) -> tuple[npt.NDArray[np.uint16 | np.uint32], npt.NDArray[np.int64]]:
        """Memory-mapped tokens [tokens] and document ends [documents]; opens one file, and holds it. DataError: the
        file is absent, cut short, or not the one whose header this is: it has changed since the header was read, or
        another node, which read the header, sees another file."""
        if self.tokens == 0:
            return np.empty(0, np.uint16), np.empty(0, np.int64)
        try:
            with reading(f"shard {self.path}"):
                whole = np.memmap(self.path, dtype=np.uint8, mode="r")
        except ValueError:  # of a file without a byte
            raise DataError(f"shard {self.path} is empty") from None
        found = _parsed(self.path, whole[:HEADER_BYTES].tobytes(), whole.size)
        if found != self:
            raise DataError(
                f"shard {self.path} is not the file whose header was read at the start: {found.tokens:,} tokens with"
                f" SHA-256 {found.digest[:16]}..., at the start {self.tokens:,} with {self.digest[:16]}...; restore the"
                " file on every node, or start the run again"
            )
        ends = HEADER_BYTES + _padded(self.tokens * self.width)
        tokens = whole[HEADER_BYTES : HEADER_BYTES + self.tokens * self.width].view(_DTYPES[self.width])
        return tokens.view(np.ndarray), whole[ends:].view("<i8").view(np.ndarray)

    def verify(self) -> None:
        """Hold the whole file against the header; DataError: its content is another, or its documents have gaps."""
        with self.path.open("rb") as file:
            file.seek(HEADER_BYTES)
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.digest:
            raise DataError(f"shard {self.path} is damaged: its content has SHA-256 {found}, its header {self.digest}")
        _, ends = self.map()
        if np.any(np.diff(ends, prepend=0) <= 0) or (ends[-1] if self.documents else 0) != self.tokens:
            raise DataError(f"shard {self.path}: its {self.documents} documents are not contiguous")


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def open_shard(path: Path) -> Shard:
    """Read and check a shard's header. DataError: no such file, not a shard, another version, or shorter or longer than
    its header says."""
    with reading(f"shard {path}"), path.open("rb") as file:
        head, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    return _parsed(path, head, size)


def open_shards(paths: Iterable[Path]) -> list[Shard]:
    """Read and check the headers of many shards, several at a time; DataError: the first fault (see `open_shard`)."""
    with ThreadPoolExecutor(16) as pool:  # all ranks wait for this one, and a network file system takes its time
        return list(pool.map(open_shard, paths))


def _parsed(path: Path, head: bytes, size: int) -> Shard:
    """The shard of a file that begins with `head` and has `size` bytes; raises as `open_shard`."""
    if size == 0:
        raise DataError(f"shard {path} is empty")
    if not head.startswith(MAGIC):
        refuse_lfs_pointer(path)
        raise DataError(f"{path} is no token shard: it starts with {head[:8]!r}, a shard with {MAGIC!r}")
    if len(head) < HEADER_BYTES:
        raise DataError(f"shard {path} is cut short: {size} bytes, its header alone has {HEADER_BYTES}")
    _, version, width, tokens, documents, digest = _HEADER.unpack(head)
    if version != VERSION or width not in _DTYPES:
        readable = f"this titan reads version {VERSION} with tokens of 2 or 4 bytes"
        raise DataError(f"shard {path} has version {version} with tokens of {width} bytes; {readable}")
    shard = Shard(path, width, tokens, documents, digest.hex())
    if size != shard.bytes:
        fault = f"is {'cut short' if size < shard.bytes else 'too long'}: {size:,} bytes"
        needed = f"{tokens:,} tokens in {documents:,} documents need {shard.bytes:,}"
        raise DataError(f"shard {path} {fault}, but {needed}")
    return shard


class ShardWriter:
    """Writes one shard, document by document. The file appears at `path` complete, in `close`, or never. As a context
    manager it closes on success and removes what it wrote on an exception."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path, self.tokens, self._vocab_size = path, 0, vocab_size
        self._width = 2 if vocab_size <= 1 << 16 else 4
        self._ends = array("q")
        self._digest = hashlib.sha256()
        self._partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
        self._file = self._partial.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def add(self, ids: Sequence[int]) -> None:
        """Append a document, whose last id is the tokenizer's end; DataError: an id is outside the vocabulary."""
        wide = np.asarray(ids, dtype=np.int64)
        if wide.size == 0 or wide.min() < 0 or wide.max() >= self._vocab_size:
            ids_found = f"{wide.size} ids, from {wide.min(initial=0)} to {wide.max(initial=0)}"
            where = f"document {len(self._ends)} of shard {self.path}"
            raise DataError(f"{where} has {ids_found}; the vocabulary has {self._vocab_size}")
        self._put(wide.astype(_DTYPES[self._width]).tobytes())
        self.tokens += wide.size
        self._ends.append(self.tokens)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)

    def close(self) -> Shard:
        """Complete the file, flush it to disk and give it its name."""
        self._put(bytes(-self.tokens * self._width % 8))
        self._put(np.asarray(self._ends, dtype="<i8").tobytes())
        documents, digest = len(self._ends), self._digest
        self._file.seek(0)
        self._file.write(_HEADER.pack(MAGIC, VERSION, self._width, self.tokens, documents, digest.digest()))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self.path)
        return Shard(self.path, self._width, self.tokens, documents, digest.hexdigest())

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
            self._partial.unlink(missing_ok=True)
