"""Evaluation of a trained model on text: perplexity per token and per word, bits per byte, last-word accuracy.

The definitions are those of the Language Model Evaluation Harness (lm-eval), so that results can be compared:

    loss             -(sum of log p of all predicted tokens) / tokens, in nats; perplexity is exp(loss)
    word_perplexity  exp(-(the same sum) / words), where words are the pieces of `re.split(r"\\s+", text)`; whitespace
                     at either end of a text leaves an empty piece there, which counts
    bits_per_byte    -(the same sum) / (bytes of the texts in UTF-8 * ln 2)

Each document is scored on its own. All its tokens are predicted (`first_token` "predict"), or all but the first
("skip", as transformers shift labels); an end id after the text is not. The first one is predicted from the BOS token
where a published model has one, as in lm-eval, else from the end id, as in titan's training. Tokens that a published
tokenizer puts around a text, which may be BOS once more, are scored as its own, also as in lm-eval. A document
longer than `seq_len` is read in windows of that many tokens whose ends lie `stride` apart; each predicts the tokens
that earlier windows have not, with the whole window as context. The last one is moved back so that it is full. With the
stride that is seq_len, the default, a window's first prediction sees one token (lm-eval's rolling windows); with a
smaller one each sees at least seq_len - stride + 1 tokens, and costs as much more.

The last word is that of LAMBADA (arXiv 1606.06031): what follows the last whitespace of a text. It counts as known if
each of its tokens is the most probable one, given the true ones before it.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.checkpoint.disk.index import MODEL
from titan.checkpoint.state import model_tensors
from titan.config import Job
from titan.contracts import IGNORE, Batch, Document, Engine, Loss, Mesh, shard_of
from titan.data.samples.stream import Stream
from titan.data.tokens.prepare import open_made
from titan.data.tokens.shards import Shard
from titan.data.tokens.tokenize import Lost, encode_document
from titan.errors import ConfigError, DataError, DivergedError
from titan.inference.load_model import Trained, missing_row
from titan.log import log
from titan.ranks.turns import from_first
from titan.training.validation import perplexity, totals

ROUND = 16
"""Batches are as long as their longest window, rounded up to this many tokens."""

Score = Callable[[Tensor, Tensor], Tensor]
"""(logits [B, S, V], labels [B, S]) -> values to be summed over all batches, float64 [K]."""
Numbers = dict[str, float | int | None]
Watch = Callable[[int], None]
"""Told of so many tokens that are done."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How documents are read. stride 0: seq_len.  batch_size: windows per forward on a rank.  limit: of documents."""

    stride: int = 0
    first_token: Literal["predict", "skip"] = "predict"
    batch_size: int = 8
    limit: int = 0


class Window(NamedTuple):
    """Ids of at most seq_len + 1 tokens, and how many of the last of them are predicted."""

    ids: list[int]
    predicted: int


@dataclass
class Counted:
    """What has been read: documents, words and bytes, and what the tokenizer has lost of them."""

    documents: int = 0
    words: int = 0
    bytes: int = 0
    lost: Lost = field(default_factory=Lost)

    def add(self, text: str) -> None:
        """Count the words and UTF-8 bytes of one more document."""
        self.words += len(re.split(r"\s+", text))
        self.bytes += len(text.encode("utf-8", errors="replace"))


def evaluate(trained: Trained, reading: Reading, watch: Watch) -> Numbers:
    """Loss, perplexities and bits per byte on the data of the job; all ranks together. word_perplexity, bits_per_byte,
    words and bytes are None where the data are tokens already.

    ConfigError: the stride is longer than a window.  DataError: the data cannot be read, or hold nothing to predict.
    DivergedError: the model's logits are no finite numbers.
    """
    job, counted = trained.job, Counted()
    length = job.data.seq_len
    if reading.stride > length:
        raise ConfigError(f"--stride {reading.stride}: must be at most the window length --seq-len, {length}")
    start = [trained.delimiters.start] if reading.first_token == "predict" else []
    shards = from_first(lambda: open_made(job.sources[0].plugin, job.tokenizer), trained.rank)
    documents = islice(_documents(trained, counted, shards), reading.limit or None)
    pieces = (w for ids in documents for w in windows([*start, *ids], length, reading.stride or length))
    nats, tokens = _scored(pieces, trained, reading, watch, _nats_and_tokens(job.loss), 2)
    if not tokens:
        raise DataError(f"dataset {job.sources[0].plugin.name!r} holds no token to score")
    if counted.lost.lost:
        log.warning(f"tokenizer {job.tokenizer.name!r}: {counted.lost.shown()}; bits per byte count them")
    return {
        "loss": nats / tokens,
        "perplexity": perplexity(nats / tokens),
        "word_perplexity": perplexity(nats / counted.words) if counted.words else None,
        "bits_per_byte": nats / (counted.bytes * math.log(2)) if counted.bytes else None,
        "tokens": int(tokens),
        "words": counted.words if shards is None else None,
        "bytes": counted.bytes if shards is None else None,
        "lost": counted.lost.share if shards is None else None,
        "documents": counted.documents,
    }


def last_words(trained: Trained, reading: Reading, watch: Watch) -> Numbers:
    """Accuracy on the last word of each document of the job's data, and how probable it was; all ranks together.
    Raises ConfigError where the data are tokens already, else the same as `evaluate`."""
    job, counted = trained.job, Counted()
    dataset = job.sources[0].plugin
    if dataset.shards() is not None:
        raise ConfigError(f"--last-word needs text, but dataset {dataset.name!r} holds tokens")
    pieces = islice(_last_words(trained, counted), reading.limit or None)
    nats, tokens, known = _scored(pieces, trained, reading, watch, _known_words(job, trained.context.mesh), 3)
    if not counted.documents:
        raise DataError(f"dataset {dataset.name!r} holds no text")
    return {
        "accuracy": known / counted.documents,
        "loss": nats / tokens,
        "perplexity": perplexity(nats / tokens),
        "word_perplexity": perplexity(nats / counted.documents),
        "tokens": int(tokens),
        "documents": counted.documents,
    }


def _scored(
    pieces: Iterable[Window], trained: Trained, reading: Reading, watch: Watch, score: Score, values: int
) -> list[float]:
    """The sums of all ranks, nats first; where these are not finite, names a weight of this rank that is not either."""
    batches = _dealt(pieces, trained, reading.batch_size, watch)

    def of_logits(engine: Engine, batch: Batch) -> Tensor | None:
        logits = engine.forward(batch)
        return None if logits is None else score(logits, batch.labels)

    sums = totals(trained.engine, trained.context, batches, of_logits, values)
    if math.isfinite(sums[0]):
        return sums
    for name, tensors in model_tensors(trained.parts).items():
        if not all(shard_of(tensor).isfinite().all() for tensor in tensors):
            raise DivergedError(f"the model's logits are NaN or infinite; so is {name.removeprefix(MODEL)} in part")
    raise DivergedError("the model's logits are NaN or infinite")


def windows(ids: list[int], length: int, stride: int) -> Iterator[Window]:
    """Windows that predict all but the first id of a document, each id once."""
    last, done = len(ids) - 1, 0
    while done < last:
        end = min(last, done + (stride if done else length))
        yield Window(ids[max(0, end - length) : end + 1], end - done)
        done = end


def _documents(trained: Trained, counted: Counted, shards: list[Shard] | None) -> Iterator[list[int]]:
    """Ids of each document that has any, and those around it, without the end id."""
    job, around = trained.job, trained.delimiters
    if shards is None:
        for document in _texts(job):
            ids = encode_document(job.tokenizer, document)
            counted.add(document.text)
            counted.lost.look(document.text, job.tokenizer.decode(ids))
            if ids:
                counted.documents += 1
                yield [*around.before, *_checked(ids, job), *around.after]
        return
    stream = Stream(shards, job.spec.vocab_size)
    for number in range(stream.documents):
        ids = stream.read(*stream.document(number)).tolist()
        counted.documents += 1
        yield [*around.before, *(ids[:-1] if ids[-1] == job.tokenizer.end else ids), *around.after]


def _last_words(trained: Trained, counted: Counted) -> Iterator[Window]:
    """The end of each text, as much as there is room for, with its last word to be predicted.

    As lm-eval does it, the word's tokens are those that the whole text has beyond the tokens of what comes before it.
    """
    job, prefix = trained.job, trained.delimiters.before
    for document in _texts(job):
        place, whole = document.place, document.text.rstrip()
        *before, word = whole.rsplit(maxsplit=1) or [""]
        if not before:
            this = document.text[:40]
            raise DataError(f"{place}: --last-word needs documents of at least two words; this one is {this!r}")
        all_but_last = Document(whole.removesuffix(word).rstrip(), place)
        ids = _checked(encode_document(job.tokenizer, Document(whole, place)), job)
        asked = len(ids) - len(encode_document(job.tokenizer, all_but_last))
        if not 0 < asked <= job.data.seq_len:
            fit = f"1 to --seq-len {job.data.seq_len} fit"
            raise DataError(f"{place}: the last word, {word[:40]!r}, has {asked} tokens; {fit}")
        counted.documents += 1
        yield Window([*prefix, *ids][-job.data.seq_len - 1 :], asked)


def _texts(job: Job) -> Iterator[Document]:
    dataset = job.sources[0].plugin
    for file in dataset.files():
        yield from dataset.documents(file)


def _checked(ids: list[int], job: Job) -> list[int]:
    if why := missing_row(ids, job, "the text"):
        raise DataError(f"the text {why}")
    return ids


def _dealt(pieces: Iterable[Window], trained: Trained, size: int, watch: Watch) -> Iterator[Batch]:
    """This rank's batches of the windows, which are dealt out in turn; as many batches, of one shape, on each rank."""
    left, ranks = iter(pieces), trained.job.batch_ranks
    index = trained.job.layout.index_of(trained.rank.number, "dealt")
    even = math.lcm(ROUND, trained.parts[0].length_multiple)
    while group := list(islice(left, size * ranks)):
        longest = max(len(window.ids) - 1 for window in group)
        width = min(trained.job.data.seq_len, -(-longest // even) * even)
        # Padded to the right, where attention does not look, and with rows that nothing is asked of.
        shape = -(-len(group) // ranks), width
        tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE)
        for row, (ids, predicted) in enumerate(group[index::ranks]):
            last = len(ids) - 1
            tokens[row, :last] = torch.tensor(ids[:-1])
            labels[row, last - predicted : last] = torch.tensor(ids[-predicted:])
        yield Batch(tokens.to(trained.rank.device), labels.to(trained.rank.device))
        watch(sum(window.predicted for window in group))


def _nats_and_tokens(loss: Loss) -> Score:
    """The cross-entropy that a loss reports, and the number of tokens that it is of."""

    def score(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([loss.compute(logits, labels)[1].double(), (labels != IGNORE).sum().double()])

    return score


def _known_words(job: Job, mesh: Mesh) -> Score:
    """Nats, tokens, and the number of rows whose labels are all most probable, wherever their positions are."""
    summed = _nats_and_tokens(job.loss)
    counts = mesh.layout.index_of(mesh.rank, "sliced") == 0  # a row is one, on however many ranks it lies

    def score(logits: Tensor, labels: Tensor) -> Tensor:
        asked = labels != IGNORE
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        missed = asked & (whole.argmax(-1) != labels)
        all_asked, all_missed = mesh.sum(torch.stack([asked.sum(-1), missed.sum(-1)]), "sliced")
        known = ((all_asked > 0) & (all_missed == 0)).sum() * counts
        return torch.cat([summed(logits, labels), known.double()[None]])

    return score
