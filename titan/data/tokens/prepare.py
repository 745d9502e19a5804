"""A dataset's token shards: found in the cache, or made once and kept there.

The cache is a folder per identity - content of the files, the dataset's options, the tokenizer - that is either
complete or absent: it is made under another name and renamed. If two processes prepare the same folder, both succeed
and one result is kept. Remnants of a killed process are removed a day after the last write (`unfinished.py`).

The dataset consists of the files that exist at the beginning. If one of them changes before its text has been read, it
is refused and nothing is kept: the folder would hold other text than its name says, for every run that shares it.
"""

import hashlib
import inspect
import json
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from titan.contracts import Dataset, Tokenizer
from titan.contracts.plugin.options import as_table
from titan.data.tokens.hashes import Content, content_hashes, unchanged
from titan.data.tokens.identity import shown
from titan.data.tokens.shards import VERSION, Shard, open_shard, open_shards
from titan.data.tokens.tokenize import Done, Lost, tokenize, units
from titan.data.tokens.unfinished import sweep, unfinished
from titan.errors import DataError, by_errno
from titan.log import log
from titan.paths import expanded, sync, told
from titan.ranks.meeting.launch_env import cores

INDEX = "index.json"
LAYOUT = 2  # of a folder of the cache: what its index says


def prepare(
    dataset: Dataset, tokenizer: Tokenizer, *, cache: str | Path, workers: int, progress: bool, max_lost: float = 1.0
) -> list[Shard]:
    """The token shards of a dataset, in order; reads each header once.

    A dataset of shards gives its own. Text is tokenized once, by `workers` processes (0: one a core), into `cache`;
    what they make does not depend on how many they are. `progress` tells a person how far it is. max_lost: largest
    share of the bytes in a sample of the text that the tokenizer may lose.

    DataError: a file cannot be read or changes meanwhile, no text is in any, the tokenizer loses more than that, a
    shard is damaged, or the cache cannot be written.
    """
    if (made := open_made(dataset, tokenizer)) is not None:
        return made
    workers = workers or cores()
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
    """The token shards of a dataset that is tokenized already, each header read once; None for text. DataError: one
    cannot be read, or the index beside it, as this cache has one, names another tokenizer."""
    paths = dataset.shards()
    for folder in dict.fromkeys(path.parent for path in paths or ()):
        made_by = _tokenizer_of(folder)
        if made_by not in ("", tokenizer.fingerprint):
            what = f"the shards in {folder} are of the tokenizer with fingerprint {made_by[:16]}"
            raise DataError(f"{what}, but [tokenizer] {shown(tokenizer.name, tokenizer.fingerprint)}; use that one")
    return None if paths is None else open_shards(paths)


def _tokenizer_of(folder: Path) -> str:
    """The fingerprint of the tokenizer that made the shards of a folder; empty where no index of this cache says so."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        made_by = json.loads((folder / INDEX).read_bytes())["tokenizer"]
        return made_by if isinstance(made_by, str) else ""
    return ""


def loss_in(folder: Path) -> Lost:
    """What the tokenizer has lost of a sample of the text whose shards a folder of the cache holds."""
    index = _read_index(folder)
    return Lost(index["sampled_bytes"], index["lost_bytes"], Counter(index["lost_characters"]))


def prepare_node(
    dataset: Dataset, tokenizer: Tokenizer, found: Sequence[Shard], *, cache: Path, workers: int, max_lost: float = 1.0
) -> None:
    """See that a node has the shards that were found on another one; where its cache lacks them, tokenize on this node.
    For one process of the node. Looks for a single file where the nodes share their files, and opens no shard there.

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
        here, there = (f"{shards[0].path.parent}" for shards in (own, found))
        what = f"node {socket.gethostname()} has its token shards in {here}, the node of rank 0 in {there}"
        raise DataError(f"{what}; set data.cache to a path that is the same on all nodes")


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
        with _progress(dataset, files, sizes, progress) as done:
            work = units(files, sizes)
            lost = tokenize(dataset, tokenizer, work, partial, workers=workers, size=sum(sizes), done=done)
        unchanged(contents, workers)
        _seal(partial, dataset, tokenizer, len(files), lost)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else somebody else made the same meanwhile
                raise
        else:
            sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _seal(partial: Path, dataset: Dataset, tokenizer: Tokenizer, files: int, lost: Lost) -> None:
    """Give the shards their names in the stream and write the index that says how many there are."""
    shards = []
    for number, path in enumerate(sorted(partial.glob("*.bin"))):
        shards.append(open_shard(path.rename(partial / f"shard-{number:05d}.bin")))
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
    sync(partial / INDEX)
    sync(partial)
    log.info(f"tokenized {index['documents']:,} documents: {index['tokens']:,} tokens")


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


@contextmanager
def _progress(dataset: Dataset, files: Sequence[Path], sizes: Sequence[int], talks: bool) -> Iterator[Done]:
    """Yields what is to be told of each tokenized file. It shows how many bytes are done: by a bar on a terminal,
    elsewhere by a line every ten seconds."""
    size_of, total, done, shown_at = dict(zip(files, sizes, strict=True)), sum(sizes), 0, time.monotonic()
    with ExitStack() as stack:
        bar: Any = None
        if talks and sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

            bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"tokenizing {dataset.name}", leave=False)
            stack.enter_context(bar)

        def finished(file: Path) -> None:
            nonlocal done, shown_at
            done += size_of[file]
            if bar is not None:
                bar.update(size_of[file])
            elif talks and time.monotonic() - shown_at > 10.0:
                shown_at = time.monotonic()
                log.info(f"tokenizing {dataset.name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

        yield finished
