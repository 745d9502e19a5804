"""The data of a job, opened by all ranks together: the samples to train and to validate on, and the tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from titan.config import Job
from titan.contracts import Dataset
from titan.data.samples.loader import Loader
from titan.data.samples.samples import Samples
from titan.data.tokens.identity import Identity, identify
from titan.data.tokens.prepare import prepare, prepare_node
from titan.errors import ConfigError
from titan.ranks.process import Rank
from titan.ranks.turns import from_first, together


def open_data(job: Job, rank: Rank) -> tuple[Samples, Samples | None]:
    """The samples to train on and to validate on; all ranks together.

    Rank 0 lists the files, tokenizes text and reads the header of each shard, once in all. The other ranks are sent the
    samples, and open a shard when they read from it. A node whose cache lacks the shards makes its own.

    DataError: they cannot be used, or a node has others than rank 0; on all ranks alike.  ConfigError: the tokenizer
    has ids that the model has no row for.
    """
    samples, validation = from_first(lambda: (open_samples(job, rank), open_validation(job, rank)), rank)
    found = list(zip((source.plugin for source in job.sources), samples.shards, strict=True))
    if job.validation_data is not None and validation is not None:
        found.append((job.validation_data, validation.shards[0]))

    def prepare_here() -> None:
        if rank.local == 0 and rank.number != 0:  # the first rank of another node
            for dataset, shards in found:
                prepare_node(dataset, job.tokenizer, shards, **preparing(job))

    together(prepare_here, rank, job.comm.init_timeout_s)
    return samples, validation


def identify_tokenizer(job: Job, rank: Rank) -> tuple[Identity, Mapping[str, bytes]]:
    """What checkpoints say of the tokenizer, and on rank 0 the files that they keep, if any; all ranks together.
    DataError, on all ranks alike: a file of the tokenizer cannot be read."""
    copies: dict[str, bytes] = {}

    def identified() -> Identity:
        known, files = identify(job.tokenizer)
        copies.update(files if job.checkpoint.enabled else {})
        return known

    return from_first(identified, rank), copies


def open_loader(job: Job, rank: Rank, samples: Samples, first: int) -> Loader:
    """The loader of a job's micro batches on this rank. first: number of the first sample not trained on yet."""
    return Loader(
        samples, global_batch=job.train.global_batch_size, micro_batch=job.micro_batch, first=first,
        index=job.layout.index_of(rank.number, "dealt"), ranks=job.batch_ranks, workers=job.data.workers,
        device=rank.device,
        limits=((job.comm.init_timeout_s, "comm.init_timeout_s"), (job.comm.timeout_s, "comm.timeout_s")),
    )  # fmt: skip


def open_samples(job: Job, rank: Rank) -> Samples:
    """The samples of a job's sources, tokenized first where they are text. DataError: the text or the tokens cannot be
    used.  ConfigError: the tokenizer has ids that the model has no row for."""
    needed = job.tokenizer.min_vocab_size
    if needed > job.spec.vocab_size:
        sizes = f"= {job.spec.vocab_size}, but the tokenizer has {needed} ids"
        raise ConfigError(f"[model] vocab_size {sizes}; set vocab_size to at least {needed}")
    sources = [(source.plugin, source.weight) for source in job.sources]
    return _samples(sources, job, rank, seed=job.run.seed, shuffle=job.data.shuffle)


def open_validation(job: Job, rank: Rank) -> Samples | None:
    """What a job validates on, in an order no seed changes; None: nothing. DataError: text or tokens are unusable."""
    if job.validation_data is None or not job.validation.every:
        return None
    return _samples([(job.validation_data, 1.0)], job, rank, seed=0, shuffle=True)


def _samples(sources: Sequence[tuple[Dataset, float]], job: Job, rank: Rank, *, seed: int, shuffle: bool) -> Samples:
    first = rank.number == 0
    made = [(prepare(data, job.tokenizer, progress=first, **preparing(job)), weight) for data, weight in sources]
    length, packing, words = job.data.seq_len, job.data.packing, job.spec.vocab_size
    return Samples(made, seq_len=length, packing=packing, seed=seed, shuffle=shuffle, vocab_size=words)


def preparing(job: Job) -> dict[str, Any]:
    """What `prepare` is told of a job's `[data]`."""
    data = job.data
    return {"cache": data.cache, "workers": data.prepare_workers, "max_lost": data.max_lost}
