"""Loss on samples of the validation split: the same samples each time, and the same value at any layout."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from titan.contracts import IGNORE, Batch, BuildContext, Engine
from titan.data.samples.samples import Sample, Samples, stacked, to_device
from titan.training.build import Run
from titan.training.engine import evaluating, valid_tokens, weights_to_use
from titan.training.phases import cut

Score = Callable[[Engine, Batch], Tensor | None]
"""Runs the engine on a micro batch as techniques have cut it -> values to sum over all batches, float64 [K]; None
on ranks that do not have the last stage."""


def totals(engine: Engine, context: BuildContext, batches: Iterable[Batch], score: Score, values: int) -> list[float]:
    """Sums of the `values` numbers that `score` gives, over the batches of all ranks. All ranks take part, with as many
    batches each, and get the same numbers. Training does not notice. Forwards run uncompiled."""
    sums = torch.zeros(values, dtype=torch.float64, device=context.device)
    with evaluating(context.parts):
        for whole in batches:
            found = score(engine, cut(whole, context))
            if found is not None:
                sums += found
    return context.mesh.sum(sums, "dealt", "sliced", "layers", "own").tolist()


def validate(run: Run) -> None:
    """Measure the loss on the validation split: to the trackers, and to `run.validation_loss`, in nats per token.

    The last stage ends with the loss, as in training: there are no more logits at a time than there.
    """
    assert run.validation_samples is not None
    batches = _batches(run, run.validation_samples)
    with weights_to_use(run.optimizer):
        nats, tokens = totals(run.engine, run.context, batches, _nats_and_tokens, 2)
    run.validation_loss = nats / max(tokens, 1.0)
    loss = {"validation_loss": run.validation_loss, "validation_perplexity": perplexity(run.validation_loss)}
    run.trackers.log({"step": run.step, **loss, "time": run.meter.unix_time()})


def _nats_and_tokens(engine: Engine, batch: Batch) -> Tensor | None:
    """The cross-entropy that the loss reports, and the number of tokens that it is of."""
    nats = engine.forward(batch, batch.labels)
    return None if nats is None else torch.stack([nats.double(), valid_tokens([batch]).double()])


def perplexity(nats: float) -> float:
    """e to this power; infinite where that is beyond a float."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def samples_used(run: Run) -> int:
    """How many samples of the validation split a validation takes: what the job asks for, or all there are."""
    available = len(run.validation_samples) if run.validation_samples is not None else 0
    return min(run.job.validation.samples or available, available)


def _batches(run: Run, samples: Samples) -> Iterator[Batch]:
    """This rank's micro batches of the samples, shaped as in training; as many on each rank.

    Samples go to workers in turn, so that each worker's weights see the same ones at any layout inside of it.
    """
    job, layout, count, size = run.job, run.job.layout, samples_used(run), run.job.micro_batch
    worker, workers = run.context.mesh.worker, run.context.mesh.workers
    first = layout.index_within_worker(run.rank.number, "dealt") * size
    for start in range(first, first + -(-count // workers), size * job.batch_ranks // layout.workers):
        numbers = [number * workers + worker for number in range(start, start + size)]
        rows = stacked([_sample(samples, number, count) for number in numbers])
        yield Batch(*to_device(rows, run.rank.device))


def _sample(samples: Samples, number: int, count: int) -> Sample:
    """A sample; beyond the last, one without labels, so that all ranks run as many forwards."""
    sample = samples[min(number, count - 1)]
    return sample if number < count else sample._replace(labels=torch.full_like(sample.labels, IGNORE))
