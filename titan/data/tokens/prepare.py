"""A dataset's token shards: found in the cache, or made once and kept there.

The cache is a folder per identity - content of the files, the dataset's options, the tokenizer - that is either
complete or absent: it is made under another name and renamed. If two processes prepare the same folder,
both succeed and one result is kept. Remnants of a killed process are removed a day after the last write
(`unfinished.py`).

The dataset consists of the files that exist at the beginning; a file that is added later gives the next run another
identity. If one of these files changes before its text has been read, it is refused and nothing is kept: the folder
would hold other text than its name says, for every run that shares the cache.
"""

import hashlib
import inspect
import json
import os
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan.contracts import Dataset, Tokenizer
from titan.contracts.plugin.options import as_table
from titan.data.tokens.hashes import Content, content_hashes, unchanged
from titan.data.tokens.identity import shown
from titan.data.tokens.shards import VERSION, Shard, open_shard, open_shards
from titan.data.tokens.tokenize import Lost, tokenize, units
from titan.data.tokens.unfinished import sweep, unfinished
from titan.errors import DataError, by_errno
from titan.log import log
from titan.paths import expanded, told

INDEX = "index.json"
LAYOUT = 2
"""Of a folder of the cache: what its index says."""


def prepare(
    dataset: Dataset, tokenizer: Tokenizer, *, cache: str | Path, workers: int, progress: bool, max_lost: float = 1.0
) -> list[Shard]:
    """The token shards of a dataset, in order; reads each header once.

    A dataset of shards gives its own. Text is tokenized once, by `workers` processes (0: one a core), into `cache`;
    what they make does not depend on how many they are. `progress` tells a person how far it is.

    max_lost: largest share of the bytes in a sample of the text that the tokenizer may lose.

    Raises:
        DataError: a file cannot be read or changes meanwhile, no text is in any, the tokenizer loses more than that, a
            shard is damaged, or the cache cannot be written.
    """
    made = open_made(dataset, tokenizer)
    if made is not None:
        return made
    workers = workers or _cores()
    files = dataset.files()
    cache = expanded(cache, "data.cache")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        contents = content_hashes(files, cache / "hashes.json", workers)
        folder = cache / _identity(dataset, tokenizer, [content.digest for content in contents])
        if not folder.exists():
            _make(dataset, tokenizer, contents, folder, workers, progress)
    except OSError as error:
        said = f"cannot tokenize into the cache {cache}: {told(error, cache)}"
        raise by_errno(error, DataError(f"{said}; set data.cache to another folder")) from None
    lost = loss_in(folder)
    if lost.share > max_lost:
        then = f"use a tokenizer for such text, or set data.max_lost above {lost.share:.4f}"
        raise DataError(f"dataset {dataset.name!r}, tokenizer {tokenizer.name!r}: {lost.shown()}; {then}")
    if lost.lost:
        log.warning(f"dataset {dataset.name!r}, tokenizer {tokenizer.name!r}: {lost.shown()}")
    return open_shards(_complete(folder))


def open_made(dataset: Dataset, tokenizer: Tokenizer) -> list[Shard] | None:
    """The token shards of a dataset that is tokenized already, each header read once; None for text.

    Raises:
        DataError: one cannot be read, or the index beside it, as this cache has one, names another tokenizer.
    """
    paths = dataset.shards()
    for folder in dict.fromkeys(path.parent for path in paths or ()):
        made_by = _tokenizer_of(folder)
        if made_by not in ("", tokenizer.fingerprint):
            what = f"the shards in {folder} are of the tokenizer with fingerprint {made_by[:16]}"
            raise DataError(f"{what}, but [tokenizer] {shown(tokenizer.name, tokenizer.fingerprint)}; use that one")
    return None if paths is None else open_shards(paths)


def _tokenizer_of(folder: Path) -> str:
    """The fingerprint of the tokenizer that made the shards of a folder; empty where no index of this cache says so."""
    try:
        made_by = json.loads((folder / INDEX).read_bytes())["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return made_by if isinstance(made_by, str) else ""


def loss_in(folder: Path) -> Lost:
    """What the tokenizer has lost of a sample of the text whose shards a folder of the cache holds.

    Raises:
        DataError: the folder is damaged.
    """
    index = _read_index(folder)
    return Lost(index["sampled_bytes"], index["lost_bytes"], Counter(index["lost_characters"]))


def prepare_node(
    dataset: Dataset, tokenizer: Tokenizer, found: Sequence[Shard], *, cache: Path, workers: int, max_lost: float = 1.0
) -> None:
    """See that a node has the shards that were found on another one; where its cache lacks them, tokenize on this node.

    For one process of the node. Looks for a single file where the nodes share their files, and opens no shard there.

    Raises:
        DataError: this node's files give other tokens, or raises as `prepare`.
    """
    if found[0].path.exists() or dataset.shards() is not None:
        return
    own = prepare(dataset, tokenizer, cache=cache, workers=workers, progress=False, max_lost=max_lost)
    if [shard.digest for shard in own] != [shard.digest for shard in found]:
        raise DataError(
            f"node {socket.gethostname()} found other samples of dataset {dataset.name!r} than the node of rank 0:"
            " files of the dataset changed while it was read, or the nodes see different files. Stop whatever writes to"
            " the dataset's files, then run again"
        )
    if own[0].path != found[0].path:
        raise DataError(
            f"node {socket.gethostname()} has its token shards in {own[0].path.parent}, the node of rank 0 in"
            f" {found[0].path.parent}; set data.cache to a path that is the same on all nodes"
        )


def _cores() -> int:
    """Those this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _identity(dataset: Dataset, tokenizer: Tokenizer, contents: Sequence[str]) -> str:
    """Name of the folder: equal when the tokens are. Where the files lie does not matter; the plugin's source does."""
    options = {key: value for key, value in as_table(dataset.config).items() if key != "path"}
    source = inspect.getsourcefile(type(dataset))
    code = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""
    parts = [VERSION, LAYOUT, dataset.name, options, code, tokenizer.fingerprint, list(contents)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _make(
    dataset: Dataset, tokenizer: Tokenizer, contents: Sequence[Content], folder: Path, workers: int, progress: bool
) -> None:
    sweep(folder.parent)
    files, sizes = [content.file for content in contents], [content.mark.size for content in contents]
    if empty := [content.file for content in contents if not content.mark.size]:
        log.warning(f"dataset {dataset.name!r}: {len(empty):,} of {len(files):,} files are empty, as {empty[0]}")
    partial = unfinished(folder.parent)
    partial.mkdir()
    try:
        with _Progress.shown(dataset, files, sizes, progress) as shown:
            work = units(files, sizes)
            lost = tokenize(dataset, tokenizer, work, partial, workers=workers, size=sum(sizes), done=shown.finished)
        unchanged(contents, workers)
        _seal(partial, dataset, tokenizer, len(files), lost)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _seal(partial: Path, dataset: Dataset, tokenizer: Tokenizer, files: int, lost: Lost) -> None:
    """Give the shards their names in the stream and write the index that says how many there are."""
    shards = []
    for number, path in enumerate(sorted(path for path in partial.iterdir() if path.suffix == ".bin")):
        named = partial / f"shard-{number:05d}.bin"
        path.rename(named)
        shards.append(open_shard(named))
    if not shards:
        raise DataError(f"dataset {dataset.name!r} holds no text: its {files} files give no token")
    index = {
        "shard_count": len(shards),
        "tokens": sum(shard.tokens for shard in shards),
        "documents": sum(shard.documents for shard in shards),
        "dataset": dataset.name,
        "files": files,
        "tokenizer": tokenizer.fingerprint,
        "sampled_bytes": lost.sampled,
        "lost_bytes": lost.lost,
        "lost_characters": dict(lost.characters.most_common(16)),
    }
    (partial / INDEX).write_text(json.dumps(index), encoding="utf-8")
    _flush(partial / INDEX)
    _flush(partial)
    log.info(f"tokenized {index['documents']:,} documents: {index['tokens']:,} tokens")


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        return  # somebody else made the same meanwhile
    _flush(folder.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_index(folder: Path) -> dict[str, Any]:
    keys = ("shard_count", "tokenizer", "sampled_bytes", "lost_bytes", "lost_characters")
    try:
        index = json.loads((folder / INDEX).read_bytes())
        return {key: index[key] for key in keys}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise DataError(f"{folder} is damaged: {INDEX} cannot be read; delete the folder to tokenize again") from None
    except OSError as error:
        raise by_errno(error, DataError(f"{folder / INDEX} cannot be read: {error.strerror}")) from None


def _complete(folder: Path) -> list[Path]:
    """The shards of a finished folder, all of them there."""
    paths, promised = sorted(folder.glob("shard-*.bin")), _read_index(folder)["shard_count"]
    if len(paths) != promised:
        raise DataError(f"{folder} is damaged: {len(paths)} of {promised} shards; delete the folder to tokenize again")
    return paths


class _Progress:
    """How many bytes of text are done: a bar on a terminal, elsewhere a line now and then."""

    EVERY_S = 10.0

    def __init__(self, files: Sequence[Path], sizes: Sequence[int], name: str, talks: bool) -> None:
        self._sizes = dict(zip(files, sizes, strict=True))
        self._total, self._done, self._said = sum(sizes), 0, time.monotonic()
        self._name, self._talks = name, talks
        self._bar = None
        if talks and sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

            self._bar = tqdm(total=self._total, unit="B", unit_scale=True, desc=f"tokenizing {name}", leave=False)

    @classmethod
    @contextmanager
    def shown(cls, dataset: Dataset, files: Sequence[Path], sizes: Sequence[int], talks: bool) -> Iterator["_Progress"]:
        shown = cls(files, sizes, dataset.name, talks)
        try:
            yield shown
        finally:
            if shown._bar is not None:
                shown._bar.close()

    def finished(self, file: Path) -> None:
        """Add the size of a tokenized file to what is done, and show the progress."""
        size = self._sizes[file]
        self._done += size
        if self._bar is not None:
            self._bar.update(size)
        elif self._talks and time.monotonic() - self._said > self.EVERY_S:
            self._said = time.monotonic()
            log.info(f"tokenizing {self._name}: {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB")
