"""Text to token shards, on several processes.

The files of a dataset are grouped, in order, into units by their size alone, and each unit becomes its own shards. So
the shards do not depend on the number of processes.
"""

import importlib.util
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from signal import SIG_UNBLOCK, pthread_sigmask
from typing import Any
from unicodedata import normalize

from titan.contracts import Dataset, Document, Tokenizer
from titan.contracts.plugin.registry import Plugin
from titan.data.tokens.processes import context, end_with_parent
from titan.data.tokens.shards import ShardWriter
from titan.errors import DataError, PreemptedError, ResourceError
from titan.ranks.meeting import signals

UNIT_BYTES = (16 << 20, 256 << 20)  # least and most text of a unit; between them, a 256th of the whole

SHARD_TOKENS = 64 << 20
WORTH_A_PROCESS = 8 << 20  # bytes of text that take longer to tokenize than a process takes to start
LOOK_S = 0.2  # between two looks of whoever waits for processes that tokenize

PIECE, PIECE_EVERY = 4 << 10, 64 << 10
"""Of a long document in the sample that is decoded again, the first PIECE of each PIECE_EVERY characters are."""
SAMPLE_FIRST, SAMPLE_EVERY = 16, 64  # the first documents of a unit are in the sample, and of the others one in so many

Unit = tuple[int, tuple[Path, ...]]
Done = Callable[[Path], None]


def units(files: Sequence[Path], sizes: Sequence[int]) -> list[Unit]:
    """(number, files) of each unit: neighboring files whose sizes add up to about a unit."""
    least, most = UNIT_BYTES
    enough = min(max(sum(sizes) // 256, least), most)
    made: list[list[Path]] = [[]]
    held = 0
    for file, size in zip(files, sizes, strict=True):
        if made[-1] and held + size > enough:
            made.append([])
            held = 0
        made[-1].append(file)
        held += size
    return [(number, tuple(unit)) for number, unit in enumerate(made)]


@dataclass
class Lost:
    """What encoding and decoding lose of text. sampled, lost: bytes of UTF-8.  characters: those lost, and how often.
    They are counted wherever they are, so a text whose order alone changes loses nothing. Neither does one whose
    characters are composed (Unicode NFC), which look the same."""

    sampled: int = 0
    lost: int = 0
    characters: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Bytes lost per byte in the sample."""
        return self.lost / self.sampled if self.sampled else 0.0

    def look(self, text: str, decoded: str) -> None:
        """Count a text and what its ids decode to."""
        self.sampled += len(text.encode("utf-8", errors="replace"))
        if decoded != text:
            missing = Counter(normalize("NFC", text)) - Counter(normalize("NFC", decoded))
            self.lost += sum(number * len(one.encode("utf-8", errors="replace")) for one, number in missing.items())
            self.characters += missing

    def add(self, other: "Lost") -> None:
        """Count what another one has counted."""
        self.sampled += other.sampled
        self.lost += other.lost
        self.characters += other.characters

    def shown(self) -> str:
        """The share and the most frequent of the characters lost."""
        most = ", ".join(f"{one!r} {number:,} times" for one, number in self.characters.most_common(4))
        return f"{self.share:.2%} of the bytes in a sample of {self.sampled:,} are lost: {most}"


def tokenize(
    dataset: Dataset, tokenizer: Tokenizer, work: Sequence[Unit], folder: Path, *, workers: int, size: int, done: Done
) -> Lost:
    """Write the shards of all units to `folder`, named by unit and place. `done` is told of each finished file.
    Returns what the tokenizer loses of a sample of the documents, the same for any number of processes.

    Small work stays in this process, where spare workers are threads: most tokenizers let go of the interpreter.

    DataError: text cannot be read.  ResourceError: a process was killed.
    """
    processes, lost = min(workers, len(work), size // WORTH_A_PROCESS), Lost()
    if processes <= 1:
        for unit in work:
            lost.add(_make(dataset, tokenizer, unit, folder, workers, done))
        return lost
    plugins = (dataset, tokenizer)
    recipe = Recipe(tuple((type(plugin), plugin.config) for plugin in plugins), tokenizer.fingerprint)
    modules = [sys.modules[type(plugin).__module__] for plugin in plugins]
    homes = tuple((module.__name__, str(module.__file__)) for module in modules if module.__name__ != "__main__")
    others = multiprocessing.active_children()
    try:
        executor = ProcessPoolExecutor(processes, context(), initializer=_begin, initargs=(homes,))
    except OSError as error:  # its queues need /dev/shm
        what = f"tokenizing processes cannot be started ({error.strerror or error})"
        raise ResourceError(f"{what}; set data.prepare_workers = 1 to tokenize in this process") from error
    with executor as pool:
        try:
            threads = max(1, workers // processes)
            pending = {pool.submit(_serve, recipe, unit, folder, threads) for unit in work}
            while pending:
                finished, pending = wait(pending, LOOK_S, FIRST_COMPLETED)
                for each in finished:
                    files, of_unit = each.result()
                    lost.add(of_unit)
                    for file in files:
                        done(file)
                signals.check()
        except BrokenProcessPool:
            what = "a tokenizing process was killed, possibly for lack of memory"
            raise ResourceError(f"{what}; set data.prepare_workers below {processes}") from None
        except PreemptedError:  # nobody waits for what they have begun
            for child in multiprocessing.active_children():
                if child not in others:
                    child.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return lost


@dataclass(frozen=True)
class Recipe:
    """Two plugins as a process that never saw them can make them: class and options. fingerprint: of the tokenizer,
    which reads its file once more in each process."""

    plugins: tuple[tuple[type[Plugin], Any], ...]
    fingerprint: str

    def make(self) -> tuple[Dataset, Tokenizer]:
        """The two plugins; DataError: the tokenizer is not the one that the tokens are named by."""
        dataset, tokenizer = (plugin(config) for plugin, config in self.plugins)
        assert isinstance(dataset, Dataset) and isinstance(tokenizer, Tokenizer)
        if tokenizer.fingerprint != self.fingerprint:
            what = f"tokenizer {tokenizer.name!r}: its file changed while text was tokenized; no tokens were kept"
            raise DataError(f"{what}. Stop whatever writes to that file, then run again")
        return dataset, tokenizer


def _begin(homes: tuple[tuple[str, str], ...]) -> None:
    """First thing in a worker: a plugin from a user's folder is importable only once its file was loaded by name."""
    pthread_sigmask(SIG_UNBLOCK, signals.SIGNALS)  # a pool whose process was killed ends the others by SIGTERM
    end_with_parent()
    for name, file in homes:
        if importlib.util.find_spec(name) is None:
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])


def _serve(recipe: Recipe, unit: Unit, folder: Path, threads: int) -> tuple[list[Path], Lost]:
    dataset, tokenizer = recipe.make()
    finished: list[Path] = []
    return finished, _make(dataset, tokenizer, unit, folder, threads, finished.append)


def _make(dataset: Dataset, tokenizer: Tokenizer, unit: Unit, folder: Path, threads: int, done: Done) -> Lost:
    (number, files), lost = unit, Lost()
    encoded = _encoded(tokenizer, _looked_at(tokenizer, _documents(dataset, files, done), lost), threads)
    shards, ids = 0, next(encoded, None)
    while ids is not None:
        with ShardWriter(folder / f"unit-{number:06d}-{shards:06d}.bin", tokenizer.vocab_size) as writer:
            while ids is not None and (writer.tokens == 0 or writer.tokens + len(ids) < SHARD_TOKENS):
                writer.add([*ids, tokenizer.end])
                ids = next(encoded, None)
        shards += 1
    return lost


def _encoded(tokenizer: Tokenizer, documents: Iterator[Document], threads: int) -> Iterator[list[int]]:
    """Ids of all documents in order, those without any left out."""
    encode = partial(encode_document, tokenizer)
    with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
        while batch := list(islice(documents, 512 if pool else 1)):
            encoded = pool.map(encode, batch) if pool else map(encode, batch)
            yield from (ids for ids in encoded if ids)


def encode_document(tokenizer: Tokenizer, document: Document) -> list[int]:
    """Ids of a document's text, without the end id; DataError, with the place: the tokenizer has none for it."""
    try:
        return tokenizer.encode(document.text)
    except DataError as error:
        raise DataError(f"{document.place}: {error}") from None


def _looked_at(tokenizer: Tokenizer, documents: Iterator[Document], lost: Lost) -> Iterator[Document]:
    """The documents; a sample of them is decoded again, and what is lost counted."""
    for number, document in enumerate(documents):
        if number < SAMPLE_FIRST or number % SAMPLE_EVERY == 0:
            for at in range(0, len(document.text), PIECE_EVERY):
                piece = Document(document.text[at : at + PIECE], document.place)
                lost.look(piece.text, tokenizer.decode(encode_document(tokenizer, piece)))
        yield document


def _documents(dataset: Dataset, files: Iterable[Path], done: Done) -> Iterator[Document]:
    for file in files:
        for document in dataset.documents(file):
            signals.check()
            yield document
        done(file)
