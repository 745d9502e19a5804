"""What a run asks of the planner before it is built: options that memory decides, and whether its state fits."""

import os
from collections.abc import Callable

from titan.config import Job
from titan.config.unset_options import described, left_to_memory, with_options
from titan.contracts.base.cost import PredictedStep
from titan.contracts.planner import PACKAGE, Values, find_planner
from titan.errors import ConfigError
from titan.log import log
from titan.machine import OFFLOADED, check_host_memory, device_name, host_memory_gib, total_gib
from titan.ranks.process import Rank, smallest_memory_gib
from titan.ranks.turns import from_first, together

MOST_BYTES_PER_PARAM, MOST_BYTES_PER_FEATURE = 64, 256
"""More than any state and any saved activations need, of a rank that holds all parameters, and of a token's features in
each layer. A job that fits with so many needs no closer look."""


def settled(job: Job, rank: Rank) -> Job:
    """The job with what the memory of the devices decides; rank 0 decides for all. ConfigError, on all ranks: the state
    of the job does not fit into the memory of a device or of this machine."""
    device_gib = smallest_memory_gib(rank)
    values, sentences = from_first(lambda: choose(job, device_gib), rank)
    job = with_options(job, values)
    for sentence in sentences:
        log.info(sentence)
    together(lambda: _refuse_what_cannot_fit(job, rank, device_gib), rank, job.comm.init_timeout_s)
    return job


def choose(job: Job, device_gib: float | None, cluster: str | None = None) -> tuple[Values, list[str]]:
    """`Planner.choose`, where the job leaves anything to memory, the memory is known, and there is a planner."""
    tables = left_to_memory(job)
    if not tables and cluster is None:
        return {}, []
    why = "the memory of the device is not known"
    if cluster is not None or device_gib is not None:
        if planner := find_planner():
            return planner.choose(job, device_gib, cluster)
        why = f"{PACKAGE} is not installed, which would choose by memory"
    usual = {name: each[0] for name, each in tables.items()}
    return {}, [f"{sentence}: {why}" for sentence in described(job, usual)]


def _refuse_what_cannot_fit(job: Job, rank: Rank, device_gib: float | None) -> None:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # not every launcher says: then at least this one
    spec, tokens = job.spec, job.tokens_per_step / job.batch_ranks
    features = tokens * (spec.n_layers * spec.dim + spec.vocab_size)
    most_gib = (MOST_BYTES_PER_PARAM * spec.params + MOST_BYTES_PER_FEATURE * features) / 2**30
    of_host = host_memory_gib()
    available = [(device_gib, 1), *((gib, ranks) for gib, _ in of_host)]
    fits = all(gib is None or most_gib * sharing <= gib for gib, sharing in available)
    if fits or not (planner := find_planner()):
        return
    least = planner.persistent_gib(job)
    on_device, on_host = (max(each) for each in zip(*least, strict=True))
    if rank.device.type == "cpu":
        mean = sum(map(sum, least)) / len(least)  # a node has ranks of all of the pipeline, or fewer ranks
        check_host_memory(mean, ranks, "weights and the optimizer's state take", of_host)
        return
    if device_gib is not None and on_device > device_gib:
        taken = f"{on_device:.4g} GiB on a rank, but its device has {device_gib:.4g} GiB"
        advice = "shard over more ranks, or use a smaller model"
        raise ConfigError(f"weights and the optimizer's state take {taken}; {advice}")
    check_host_memory(on_host, ranks, OFFLOADED, of_host)


def predictor(job: Job, rank: Rank) -> Callable[[str], PredictedStep | None]:
    """`BuildContext.predict` of this job: the step that `titan plan --cluster` predicts."""

    def predict(cluster: str) -> PredictedStep | None:
        if planner := find_planner():
            return planner.predict(job, device_name(rank.device), total_gib(rank.device) or 0.0, cluster)
        return None

    return predict
