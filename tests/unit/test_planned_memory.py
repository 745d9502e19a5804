"""What the planner computes against the dry run of the very job: memory, and every byte that collectives move."""

import re
from collections import Counter

import pytest

from tests.planned import CLUSTER, job_of
from titan.config import Job
from titan.dryrun import DryRun, dry_run
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import Memory
from titan.planner.step.predict import Planner, flops_per_token
from titan.planner.step.traffic import moved

# What the plugin says to this warning, pytest takes back before each test.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

LLAMA = ("--model.preset", "mini", "--model.n_layers", "4", "--data.seq_len", "256")
GROUPED = (*LLAMA, "--model.n_kv_heads", "2")
GPT = ("--model.name", "gpt", "--model.preset", "nano", "--data.seq_len", "128")
BF16 = ("--plugins.bf16.enabled", "true")
TWO = ("--train.global_batch_size", "16", "--train.micro_batch_size", "2")
PIPED = ("--mesh.pp", "2", "--mesh.dp_shard", "2", "--train.global_batch_size", "8", "--train.micro_batch_size", "1")
FULL, SELECTIVE, CORE = (("--plugins.activation_checkpoint.mode", mode) for mode in ("full", "selective", "attention"))
WHOLE = ("--plugins.tensor.sequence_parallel", "false")
UNFUSED = ("--model.attention", "unfused")
SCORES = (*LLAMA, "--data.seq_len", "1024", "--model.max_seq_len", "1024", *UNFUSED)


def zero(stage: int, *words: str) -> tuple[str, ...]:
    return ("--mesh.dp_shard", "4", "--plugins.fsdp.zero_stage", str(stage), *words)


def sliced(*words: str) -> tuple[str, ...]:
    return ("--mesh.tp", "2", "--mesh.dp_shard", "2", *words)


def schedule(name: str, *words: str) -> tuple[str, ...]:
    return (*PIPED, "--plugins.pipeline.schedule", name, *words)


JOBS = {
    "zero 1, two micro batches": (*LLAMA, *BF16, *TWO, *zero(1)),
    "zero 2, two micro batches": (*LLAMA, *BF16, *TWO, *zero(2)),
    "zero 3, two micro batches": (*LLAMA, *BF16, *TWO, *zero(3)),
    "zero 3, one micro batch, selective": (*LLAMA, *BF16, *zero(3), *SELECTIVE),
    "zero 3, full recompute": (*LLAMA, *BF16, *TWO, *zero(3), *FULL),
    "float32": (*LLAMA, *TWO, *zero(2)),
    "grouped heads": (*GROUPED, *BF16, *TWO, *zero(2)),
    "tensor parallel": (*LLAMA, *BF16, *TWO, *sliced()),
    "tensor parallel, selective": (*LLAMA, *BF16, *TWO, *sliced(), *SELECTIVE),
    "tensor parallel, full": (*LLAMA, *BF16, *TWO, *sliced(), *FULL),
    "tensor parallel, whole sequences": (*LLAMA, *BF16, *TWO, *sliced(*WHOLE)),
    "tensor parallel, whole sequences, selective": (*LLAMA, *BF16, *TWO, *sliced(*WHOLE), *SELECTIVE),
    "1F1B": (*LLAMA, *BF16, *schedule("1F1B")),
    "interleaved, full": (*LLAMA, *BF16, *schedule("Interleaved1F1B", *FULL)),
    "zero bubble": (*LLAMA, *BF16, *schedule("ZBVZeroBubble")),
    "gpt, tied ends on stages": (*GPT, *BF16, *schedule("1F1B")),
    "scores written": (*GROUPED, *UNFUSED, *BF16, *TWO, *zero(2)),
    "scores written, recomputed": (*GROUPED, *UNFUSED, *BF16, *TWO, *zero(2), *CORE),
    "long, scores written": (*SCORES, *BF16, *TWO, *zero(2)),
    "long, scores written, selective": (*SCORES, *BF16, *TWO, *zero(2), *SELECTIVE),
    "long, scores written, recomputed": (*SCORES, *BF16, *TWO, *zero(2), *CORE),
    "long, scores written, full": (*SCORES, *BF16, *TWO, *zero(2), *FULL),
    "gpt, tensor parallel, scores recomputed": (*GPT, *UNFUSED, *BF16, *TWO, *sliced(), *CORE),
    "gpt, tensor parallel": (*GPT, *BF16, *TWO, *sliced()),
}


@pytest.fixture(scope="module", params=JOBS.values(), ids=JOBS.keys())
def both(request: pytest.FixtureRequest) -> list[tuple[Job, Memory, DryRun]]:
    """The first and the last rank of a job, planned and dry-run."""
    job = job_of(*request.param)
    planned = Planner(CLUSTER).draft(costs_of(job), job.layout).memory()
    ranks = sorted({0, job.layout.world_size - 1}) if len(planned) > 1 else [0]
    return [(job, planned[job.layout.role_index(rank, "stage")], dry_run(job, rank)) for rank in ranks]


def test_memory_is_that_of_the_dry_run(both: list[tuple[Job, Memory, DryRun]]) -> None:
    for _, planned, exact in both:
        assert planned.parameters == exact.at_peak["parameters"]
        # Adam counts its steps, four bytes per tensor.
        assert planned.optimizer == pytest.approx(exact.at_peak["optimizer"], rel=2e-3)
        assert planned.total - planned.overhead == pytest.approx(exact.peak_bytes, rel=0.03)


KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}


def test_collectives_move_the_bytes_of_the_dry_run(both: list[tuple[Job, Memory, DryRun]]) -> None:
    for job, _, exact in both:
        costs = costs_of(job)
        expected = moved(job.layout.role_index(exact.rank, "stage"), costs, job.layout)
        counted: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for collective in exact.collectives:
            kind = re.sub(r"^_*|_+$", "", collective.kind)
            counted[KINDS.get(kind, kind), (collective.axes,)] += collective.bytes * collective.count
        for key, size in expected.items():
            assert size == pytest.approx(counted[key], rel=0.03), (key, counted)
        forgotten = {
            key: size for key, size in counted.items() if key not in expected and key[0] not in ("send", "recv")
        }
        # Gradients of replicated parameters, once per step, and the few numbers of the loss and of the norm.
        assert sum(forgotten.values()) < 0.005 * sum(counted.values()), forgotten


def test_flops_are_those_of_the_dry_run(both: list[tuple[Job, Memory, DryRun]]) -> None:
    job, _, exact = both[0]
    if job.layout.role_degree("stage", "model") > 1:
        return
    forward_and_backward = sum(f.forward + f.backward for f in exact.flops.values())
    tokens = job.micro_batch * job.data.seq_len * job.micro_batches
    assert forward_and_backward == pytest.approx(flops_per_token(costs_of(job))[0] * tokens, rel=1e-6)
