"""Compressed gradients before a run: what is refused, what is planned, and whose hook comes first."""

from collections import Counter

import pytest

from tests.planned import job_of
from titan.config import Job
from titan.errors import ConfigError
from titan.planner.dryrun import dry_run
from titan.planner.picture.traffic import moved
from titan.planner.step.layout import costs_of
from titan.training.phases import reducing

# What the plugin says to this warning, pytest takes back before each test.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

LLAMA = ("--model.preset", "mini", "--model.n_layers", "4", "--data.seq_len", "256", "--train.global_batch_size", "8")
METHODS = ("powersgd", "topk", "randk", "sign", "int8")


def on(method: str, *words: str) -> tuple[str, ...]:
    begin = "--plugins.compressed_gradients."
    return (*LLAMA, f"{begin}method", method, f"{begin}warmup_steps", "0", *words)


def between_replicas(job: Job) -> dict[str, float]:
    sent = moved(0, costs_of(job), job.layout).items()
    return {kind: size for (kind, axes), size in sent if "dp_replicate" in axes}


@pytest.mark.parametrize("method", METHODS)
def test_planned_bytes_are_those_of_the_dry_run(method: str) -> None:
    job = job_of(*on(method), "--mesh.dp_replicate", "4", "--mesh.dp_shard", "2")
    planned = between_replicas(job)
    counted: Counter[str] = Counter()
    for collective in dry_run(job, 0).collectives:
        if collective.axes == "dp_replicate":
            counted[collective.kind] += collective.bytes * collective.count
    for kind, size in planned.items():
        # Vectors are counted as if they were compressed, and the shards of small matrices are sent whole.
        assert size == pytest.approx(counted[kind], rel=0.05), (kind, counted)
    others = sum(size for kind, size in counted.items() if kind not in planned)
    assert others < 0.02 * sum(counted.values()), counted


@pytest.mark.parametrize("method", METHODS)
def test_less_is_sent_than_by_an_all_reduce(method: str) -> None:
    def sent(*words: str) -> float:
        found = between_replicas(job_of(*words, "--mesh.dp_replicate", "4"))
        return sum(found.values()) + found.get("all_reduce", 0.0)  # which sends all of it twice

    assert 0 < sent(*on(method)) < 0.3 * sent(*LLAMA)


def test_errors_are_state_and_another_that_sums_replicas_is_refused() -> None:
    job = job_of(*on("topk"), "--mesh.dp_replicate", "2")
    assert {technique.name for technique in job.techniques} == {"compressed_gradients"}
    more, less = (sum(s.bytes_per_param for s in costs_of(j).state) for j in (job, job_of(*LLAMA)))
    assert more == less + 4
    with pytest.raises(ConfigError, match="cannot be enabled together: both sum gradients over dp_replicate"):
        job_of(*on("topk"), "--mesh.dp_replicate", "2", "--plugins.ddp.enabled", "true")


def test_ranks_with_weights_of_their_own_are_refused() -> None:
    words = (*on("topk"), "--plugins.local_steps.enabled", "true", "--mesh.worker", "2")
    assert job_of(*words).layout.worker_axis == "worker"  # each worker without replicas
    said = r"mesh\.worker = 2 gives ranks weights of their own, .* set mesh\.worker = 1"
    with pytest.raises(ConfigError, match=said):
        job_of(*words, "--mesh.dp_replicate", "2")


def test_sums_over_replicas_come_before_those_within_one() -> None:
    words = ("--mesh.dp_replicate", "2", "--mesh.dp_shard", "2", "--mesh.tp", "2", "--mesh.pp", "2")
    words = (*words, "--plugins.pipeline.enabled", "true", "--plugins.activation_checkpoint.enabled", "true")
    job = job_of("--plugins.tensor.enabled", "true", *words, *on("topk"))
    order = [technique.name for technique in reducing(job.techniques)]
    assert order == ["compressed_gradients", "fsdp", "tensor", "pipeline", "activation_checkpoint"]
