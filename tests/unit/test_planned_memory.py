"""What the planner computes against the dry run of the very job: memory, and every byte that collectives move."""

import re
from collections import Counter
from importlib.util import find_spec

import pytest

from tests.planned import CLUSTER, job_of
from tests.sweeps import sweep_but
from titan.config import Job
from titan.contracts.base.cost import Matmul
from titan.planner.dryrun import DryRun, dry_run
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.picture.traffic import moved, passed_on
from titan.planner.step.arithmetic import flops_per_token
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import Memory, memories
from titan.planner.step.predict import Planner

# What the plugin says to this warning, pytest takes back before each test.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

LLAMA = ("--model.preset", "mini", "--model.n_layers", "4", "--data.seq_len", "256")
KV2 = ("--model.n_kv_heads", "2")
GROUPED = (*LLAMA, *KV2)
GPT = ("--model.name", "gpt", "--model.preset", "nano", "--data.seq_len", "128")
QWEN3 = ("--model.name", "qwen3", "--model.preset", "nano", "--model.head_dim", "64", "--data.seq_len", "128")
OLMO2 = ("--model.name", "olmo2", "--model.preset", "nano", "--data.seq_len", "128")
BLOOM = ("--model.name", "bloom", "--model.preset", "nano", "--model.tied", "false", "--data.seq_len", "128")
GEMMA = ("--model.name", "gemma", "--model.preset", "nano", "--model.tied", "false", "--data.seq_len", "128")
NEOX = ("--model.name", "neox", "--model.preset", "nano", "--data.seq_len", "128")
BF16 = ("--plugins.bf16.enabled", "true")
PURE = ("--plugins.bf16.pure", "true", "--plugins.bf16.rounding")
TWO = ("--train.global_batch_size", "16", "--train.micro_batch_size", "2")
PIPED = ("--mesh.pp", "2", "--mesh.dp_shard", "2", "--train.global_batch_size", "8", "--train.micro_batch_size", "1")
FULL, SELECTIVE, CORE = (("--plugins.activation_checkpoint.mode", mode) for mode in ("full", "selective", "attention"))
WHOLE = ("--plugins.tensor.sequence_parallel", "false")
NESTEROV = ("--plugins.local_steps.outer", "nesterov")
WITHIN = ("--plugins.update_in_backward.enabled", "true", "--train.grad_clip", "0")
TP = ("--mesh.tp", "2")
EMA = ("--plugins.ema.enabled", "true")
FEW = ("--data.seq_len", "16")
UNFUSED = ("--model.attention", "unfused")
CONTEXT = (*LLAMA, *BF16, *TWO, "--mesh.cp", "4", "--mesh.dp_shard", "2", "--plugins.fsdp.zero_stage", "2")
SCORES = (*LLAMA, "--data.seq_len", "1024", "--model.max_seq_len", "1024", *UNFUSED)

MOE = ("--model.name", "moe", "--model.preset", "moe-tiny", "--model.dim", "256", "--model.n_heads", "8")
MOE += ("--model.n_layers", "4", "--model.expert_dim", "256", "--model.vocab_size", "2048")
MOE += ("--model.max_seq_len", "256", "--data.seq_len", "256", "--mesh.ep", "2")
DENSE = ("--model.n_dense_layers", "1", "--model.n_shared_experts", "2", "--model.ffn_dim", "512")

WIDE = ("--model.preset", "mini", "--model.dim", "1024", "--model.n_layers", "8", "--model.n_heads", "16")
WIDE += ("--model.ffn_dim", "2816", "--model.vocab_size", "32000", "--data.seq_len", "64")
WIDE += ("--train.global_batch_size", "1", "--train.micro_batch_size", "1")
TINY = ("--model.preset", "mini", "--model.n_layers", "8", "--model.vocab_size", "1024", "--data.seq_len", "32")
TINY += ("--train.global_batch_size", "4", "--train.micro_batch_size", "1")
TABLE = (*TINY, "--model.n_layers", "4", "--model.vocab_size", "32768")
REPLICAS = ("--mesh.dp_shard", "2", "--mesh.dp_replicate", "2", "--plugins.fsdp.zero_stage", "3")
TWICE = (*REPLICAS, "--plugins.fsdp.zero_stage", "2", "--train.global_batch_size", "8")
SHARDS = ("--mesh.dp_shard", "2", "--plugins.fsdp.zero_stage", "3", "--train.global_batch_size", "2")
SIXTEEN = ("--train.micro_batch_size", "16")
WORDS = (*LLAMA, "--model.vocab_size", "65536", "--train.global_batch_size", "256", "--train.micro_batch_size", "32")
HEAD = ("--plugins.float8.head", "true")
CHUNKS = ("--data.seq_len", "256", "--loss.chunk_tokens", "64", "--train.micro_batch_size", "2")
MX = (*HEAD, "--plugins.float8.recipe", "mxfp8", "--plugins.float8.emulate", "always")
MUON, LION, BITS = (("--optimizer.name", name) for name in ("muon", "lion", "adamw_8bit"))
UPDATED = (*LLAMA, *FEW, "--train.global_batch_size", "1", "--train.micro_batch_size", "1")
FREE = ("--optimizer.name", "schedule_free_adamw", "--lr_schedule.name", "constant")

LONG = (*LLAMA, "--data.seq_len", "1024", "--model.max_seq_len", "1024")
PACKED, WINDOW = ("--data.packing", "document_mask"), ("--model.sliding_window", "64")
AUTO, MATH = (("--plugins.attention.backend", backend) for backend in ("auto", "math"))


def zero(stage: int, *words: str) -> tuple[str, ...]:
    return ("--mesh.dp_shard", "4", "--plugins.fsdp.zero_stage", str(stage), *words)


def sliced(*words: str) -> tuple[str, ...]:
    return ("--mesh.tp", "2", "--mesh.dp_shard", "2", *words)


def workers(*words: str, exchange: str = "fp32") -> tuple[str, ...]:
    given = ("--plugins.local_steps.every", "1", "--plugins.local_steps.exchange", exchange)
    return ("--mesh.worker", "2", *given, *words)


def context(method: str, *words: str) -> tuple[str, ...]:
    return (*CONTEXT, "--plugins.context.method", method, *words)


def schedule(name: str, *words: str) -> tuple[str, ...]:
    return (*PIPED, "--plugins.pipeline.schedule", name, *words)


JOBS = {
    "zero 1, two micro batches": (*LLAMA, *BF16, *TWO, *zero(1)),
    "pure, zero 1": (*LLAMA, *PURE, "stochastic", *TWO, *zero(1)),
    "pure, zero 3, compensated, average of weights": (*LLAMA, *PURE, "kahan", *TWO, *zero(3), *EMA),
    "pure, 1F1B, to nearest": (*LLAMA, *PURE, "nearest", *schedule("1F1B")),
    "pure, the update needs most": (*LLAMA, *PURE, "kahan", *sliced("--mesh.dp_shard", "1"), "--data.seq_len", "16"),
    "zero 1, average of weights": (*LLAMA, *BF16, *TWO, *zero(1), *EMA),
    "tensor parallel, average of weights": (*LLAMA, *BF16, *TWO, *sliced(), *EMA),
    "zero 2, two micro batches": (*LLAMA, *BF16, *TWO, *zero(2)),
    "zero 3, two micro batches": (*LLAMA, *BF16, *TWO, *zero(3)),
    "zero 3, one micro batch, selective": (*LLAMA, *BF16, *zero(3), *SELECTIVE),
    "zero 3, full recompute": (*LLAMA, *BF16, *TWO, *zero(3), *FULL),
    "float32": (*LLAMA, *TWO, *zero(2)),
    "float32, stages": (*LLAMA, *PIPED, "--mesh.dp_shard", "1"),
    "float32, stages, a table's two gradients": (*GPT, *FEW, *PIPED, "--mesh.dp_shard", "1"),
    "float32, tensor parallel, one micro batch": (*LLAMA, "--mesh.tp", "2", "--train.global_batch_size", "2"),
    "grouped heads": (*GROUPED, *BF16, *TWO, *zero(2)),
    "tensor parallel": (*LLAMA, *BF16, *TWO, *sliced()),
    "tensor parallel, selective": (*LLAMA, *BF16, *TWO, *sliced(), *SELECTIVE),
    "tensor parallel, full": (*LLAMA, *BF16, *TWO, *sliced(), *FULL),
    "tensor parallel, four ranks, many words": (*LLAMA, *BF16, *TWO, "--mesh.tp", "4", "--model.vocab_size", "32000"),
    "tensor parallel, whole sequences": (*LLAMA, *BF16, *TWO, *sliced(*WHOLE)),
    "tensor parallel, whole sequences, selective": (*LLAMA, *BF16, *TWO, *sliced(*WHOLE), *SELECTIVE),
    "ring": context("ring"),
    "ring, selective": context("ring", *SELECTIVE),
    "ring, full": context("ring", *FULL),
    "ring, tensor parallel, grouped heads": context("ring", "--mesh.tp", "2", *KV2),
    "gather": context("gather"),
    "gather, tensor parallel": context("gather", "--mesh.tp", "2"),
    "ulysses": context("ulysses"),
    "ulysses, selective": context("ulysses", *SELECTIVE),
    "ulysses, full, shared heads": context("ulysses", *KV2, *FULL),
    "ring, pipeline": (*context("ring"), "--mesh.pp", "2", "--mesh.dp_shard", "1", "--plugins.fsdp.zero_stage", "1"),
    "ring, replicas": (*context("ring"), "--mesh.dp_replicate", "2", "--mesh.dp_shard", "2"),
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
    "gpt, tensor parallel, dropout": (*GPT, *BF16, *TWO, *sliced(), "--model.dropout", "0.1"),
    "documents": (*LLAMA, *BF16, *TWO, *zero(2), *PACKED),
    "long documents": (*LONG, *BF16, *TWO, *zero(2), *PACKED),
    "long documents, float32": (*LONG, *TWO, *zero(2), *PACKED),
    "long documents, grouped heads": (*LONG, *BF16, *TWO, *zero(2), *PACKED, *KV2),
    "long documents, grouped heads, full": (*LONG, *BF16, *TWO, *zero(2), *PACKED, *KV2, *FULL),
    "long documents, selective": (*LONG, *BF16, *TWO, *zero(2), *PACKED, *SELECTIVE),
    "long documents, 1F1B": (*LONG, *BF16, *schedule("1F1B", *PACKED)),
    "documents, 1F1B, full": (*LLAMA, *BF16, *schedule("1F1B", *PACKED, *FULL)),
    "long documents, interleaved": (*LONG, *BF16, *schedule("Interleaved1F1B", *PACKED)),
    "window, grouped heads": (*LONG, *BF16, *TWO, *zero(2), *WINDOW, *KV2),
    "window, 1F1B": (*LONG, *BF16, *schedule("1F1B", *WINDOW)),
    "ring, documents": context("ring", *PACKED),
    "ring, window": context("ring", *WINDOW),
    "gather, documents": context("gather", *PACKED),
    "ring, long documents": context("ring", *LONG, *PACKED),
    "gather, long documents": context("gather", *LONG, *PACKED),
    "ulysses, documents": context("ulysses", *PACKED),
    "ulysses, long documents, shared heads": context("ulysses", *LONG, *PACKED, *KV2),
    "ulysses, window, full": context("ulysses", *LONG, *WINDOW, *FULL),
    "long documents, grouped heads, no mask": (*LONG, *BF16, *TWO, *zero(2), *PACKED, *KV2, *AUTO),
    "long documents, no mask, float32": (*LONG, *TWO, *zero(2), *PACKED, *AUTO),
    "long documents, no mask, selective": (*LONG, *BF16, *TWO, *zero(2), *PACKED, *SELECTIVE, *AUTO),
    "long documents, no mask, 1F1B": (*LONG, *BF16, *schedule("1F1B", *PACKED, *AUTO)),
    "window, no mask": (*LONG, *BF16, *TWO, *zero(2), *WINDOW, *AUTO),
    "long, math, recomputed": (*LONG, *BF16, *TWO, *zero(2), *CORE, *MATH),
    "ulysses, long documents, no mask": ("--plugins.attention.backend", "varlen", *context("ulysses", *LONG, *PACKED)),
    "ring, documents, backend unchanged": context("ring", *PACKED, *AUTO),
    "soft caps, no scores": (*GEMMA, "--model.head_dim", "32", *BF16, *TWO, *zero(2), *AUTO),
    "slopes, no mask": (*BLOOM, *BF16, *TWO, *zero(2), *AUTO),
    "norms after": (*OLMO2, *BF16, *TWO, *zero(2)),
    "norms after, float32": (*OLMO2, *TWO, *zero(2)),
    "norms after, selective": (*OLMO2, *BF16, *TWO, *zero(2), *SELECTIVE),
    "norms after, full": (*OLMO2, *BF16, *TWO, *zero(2), *FULL),
    "norms over all heads, tensor parallel": (*OLMO2, *BF16, *TWO, *sliced()),
    "norms over all heads, tensor parallel, float32": (*OLMO2, *TWO, *sliced()),
    "norms over all heads, whole sequences, selective": (*OLMO2, *BF16, *TWO, *sliced(*WHOLE), *SELECTIVE),
    "norms over all heads, grouped, full": (*OLMO2, *BF16, *TWO, *sliced(*FULL), *KV2),
    "soft caps": (*GEMMA, *BF16, *TWO, *zero(2)),
    "soft caps, float32": (*GEMMA, *TWO, *zero(2)),
    "soft caps, tensor parallel": (*GEMMA, *BF16, *TWO, *sliced()),
    "soft caps, full": (*GEMMA, *BF16, *TWO, *sliced(), *FULL),
    "slopes": (*BLOOM, *BF16, *TWO, *zero(2)),
    "slopes, float32": (*BLOOM, *TWO, *zero(2)),
    "slopes, tensor parallel": (*BLOOM, *BF16, *TWO, *sliced()),
    "slopes, documents, full": (*BLOOM, *BF16, *TWO, *sliced(), *FULL, *PACKED),
    "slopes, scores written": (*BLOOM, *BF16, *TWO, *zero(2), "--model.attention", "unfused"),
    "parallel branches": (*NEOX, *BF16, *TWO, *zero(2)),
    "parallel branches, float32": (*NEOX, *TWO, *zero(2)),
    "parallel branches, tensor parallel": (*NEOX, *BF16, *TWO, *sliced()),
    "parallel branches, whole sequences, selective": (*NEOX, *BF16, *TWO, *sliced(*WHOLE), *SELECTIVE),
    "parallel branches, full": (*NEOX, *BF16, *TWO, *sliced(), *FULL),
    "experts": (*MOE, *BF16, *TWO, *zero(2), "--mesh.ep", "1"),
    "experts, jitter": (*MOE, *BF16, *TWO, *zero(2), "--model.router_jitter", "0.1"),
    "experts, zero 1": (*MOE, *BF16, *TWO, *zero(1)),
    "experts, zero 2": (*MOE, *BF16, *TWO, *zero(2)),
    "experts, zero 3": (*MOE, *BF16, *TWO, *zero(3)),
    "experts, zero 3, full": (*MOE, *BF16, *TWO, *zero(3), *FULL),
    "experts, selective": (*MOE, *BF16, *TWO, *zero(2), *SELECTIVE),
    "experts, float32": (*MOE, *TWO, *zero(2)),
    "experts, dense and shared ones": (*MOE, *BF16, *TWO, *zero(2), *DENSE),
    "experts, tensor parallel": (*MOE, *BF16, *TWO, *sliced("--mesh.dp_shard", "4")),
    "experts, ulysses": (*MOE, *BF16, *TWO, *zero(2), "--mesh.cp", "2", "--plugins.context.method", "ulysses"),
    "experts, replicas": (*MOE, *BF16, *TWO, *zero(2), "--mesh.dp_replicate", "2"),
    "experts, 1F1B": (*MOE, *BF16, *schedule("1F1B", "--mesh.dp_shard", "4", "--train.global_batch_size", "16")),
    "workers, zero 1": (*LLAMA, *BF16, *TWO, *workers("--mesh.dp_shard", "2", "--plugins.fsdp.zero_stage", "1")),
    "workers alone": (*LLAMA, *BF16, *TWO, *workers("--mesh.worker", "4")),
    "workers, int8": (*LLAMA, *BF16, *TWO, *workers(exchange="int8")),
    "workers, nesterov": (*LLAMA, *BF16, *TWO, *workers(*NESTEROV)),
    "workers, nesterov in int4, tensor parallel": (*LLAMA, *BF16, *TWO, *workers(*TP, *NESTEROV, exchange="int4")),
    "workers, 1F1B": (*LLAMA, *BF16, *schedule("1F1B", *workers(), "--train.global_batch_size", "16")),
    "updates in backward": (*LLAMA, *BF16, *zero(2), *WITHIN),
    "updates in backward, zero 3, few tokens": (*LLAMA, *FEW, *BF16, *zero(3), *WITHIN),
    "updates in backward, float32, few tokens": (*LLAMA, *FEW, *zero(2), *WITHIN),
    "pure, updates in backward, zero 3, few tokens": (*LLAMA, *FEW, *PURE, "nearest", *zero(3), *WITHIN),
    "wide, few tokens, zero 3": (*WIDE, *BF16, *zero(3, "--train.global_batch_size", "4")),
    "wide, few tokens, zero 2, pure": (*WIDE, *PURE, "nearest", *zero(2, "--train.global_batch_size", "4")),
    "updates in backward, replicas": (*TINY, *BF16, *REPLICAS, *WITHIN),
    "pure, updates in backward, replicas": (*TINY, *PURE, "nearest", *REPLICAS, *WITHIN),
    "pure, replicas": (*TABLE, *PURE, "nearest", *REPLICAS),
    "pure, replicas, two micro batches": (*TABLE, *PURE, "nearest", *TWICE),
    "pure, whole replicas": (*TINY, *PURE, "nearest", "--plugins.ddp.enabled", "true", "--mesh.dp_replicate", "4"),
    "sums of a large table, once per step": (*TABLE, *BF16, "--mesh.dp_shard", "2", "--plugins.fsdp.zero_stage", "1"),
    "pure, sums of a large table, once per step": (*TABLE, *PURE, "nearest", "--mesh.dp_shard", "2"),
    "sums of a large table, one rank per stage": (*TABLE, *BF16, "--mesh.pp", "2"),
    "pure, the first layer's sums": (*TINY, *PURE, "nearest", *SHARDS, "--model.n_layers", "16"),
    "many words": (*WORDS, *zero(2)),
    "many words, zero 3": (*WORDS, *BF16, *zero(3)),
    "many words, tensor parallel": (*WORDS, *BF16, *sliced()),
    "many words, 1F1B": (*WORDS, *BF16, *schedule("1F1B", *SIXTEEN, "--train.global_batch_size", "128")),
    "many words, logits kept": (*WORDS, *BF16, *zero(2), "--loss.chunk_tokens", "8192"),
    "muon, zero 2": (*LLAMA, *BF16, *TWO, *zero(2), *MUON),
    "muon, tied, tensor parallel": (*GPT, *BF16, *TWO, *sliced(), *MUON),
    "muon, replicas": (*LLAMA, *BF16, *TWO, *MUON, "--mesh.dp_replicate", "2", "--mesh.dp_shard", "2"),
    "muon, experts": (*MOE, *BF16, *TWO, *zero(2), *MUON),
    "muon, 1F1B": (*LLAMA, *BF16, *schedule("1F1B", *MUON)),
    "lion": (*LLAMA, *BF16, *TWO, *sliced(), *LION),
    "schedule-free": (*LLAMA, *BF16, *TWO, *sliced(), *FREE),
    "norms of heads": (*QWEN3, *BF16, *TWO, *zero(2)),
    "norms of heads, float32": (*QWEN3, *TWO, *zero(2)),
    "norms of heads, tensor parallel": (*QWEN3, *BF16, *TWO, *sliced()),
    "norms of heads, whole sequences, selective": (*QWEN3, *BF16, *TWO, *sliced(*WHOLE), *SELECTIVE),
    "norms of heads, full": (*QWEN3, *BF16, *TWO, *sliced(), *FULL),
}

if find_spec("torchao") is not None:
    JOBS |= {
        "many words, head in float8": (*WORDS, *BF16, *zero(2), *HEAD),
        "many words, head in mxfp8": (*WORDS, *BF16, *zero(2), *MX),
        "many words, head in float8, logits kept": (*WORDS, *BF16, *zero(2), *HEAD, "--loss.chunk_tokens", "8192"),
        "head in float8, in small chunks": (*TABLE, *BF16, *HEAD, "--mesh.dp_shard", "2", *CHUNKS),
    }


KEPT = {
    "gather", "zero bubble", "lion", "gpt, tensor parallel, dropout", "many words, head in mxfp8",
    "float32, stages, a table's two gradients", "tensor parallel, four ranks, many words",
    "tensor parallel, whole sequences, selective", "ring, tensor parallel, grouped heads", "1F1B", "interleaved, full",
    "ulysses, window, full", "long documents, no mask, selective", "slopes, documents, full",
    "norms over all heads, tensor parallel", "norms over all heads, grouped, full", "experts, tensor parallel",
    "experts, replicas", "workers, int8", "pure, zero 3, compensated, average of weights", "pure, replicas",
    "pure, the first layer's sums", "updates in backward, replicas", "sums of a large table, one rank per stage",
    "muon, tied, tensor parallel", "many words, head in float8", "head in float8, in small chunks",
}  # fmt: skip
"""What planted faults name, each method and each kind of optimizer but those of `ALONE` once."""


@pytest.fixture(
    scope="module", params=sweep_but(JOBS, *(KEPT if find_spec("torchao") else KEPT & JOBS.keys())), ids=str
)
def both(request: pytest.FixtureRequest) -> list[tuple[Job, Memory, DryRun]]:
    """The first and the last rank of a job, planned and dry-run."""
    job = job_of(*JOBS[request.param])
    planned = Planner(CLUSTER).draft(costs_of(job), job.layout).memory()
    ranks = sorted({0, job.layout.world_size - 1}) if len(planned) > 1 else [0]
    # A job of its own for each rank, as in a run: techniques have state.
    exact = [dry_run(job_of(*JOBS[request.param]), rank) for rank in ranks]
    return [(job, planned[job.layout.index_of(run.rank, "layers")], run) for run in exact]


def test_memory_is_that_of_the_dry_run(both: list[tuple[Job, Memory, DryRun]]) -> None:
    for _, planned, exact in both:
        assert planned.parameters == exact.at_peak["parameters"]
        # Adam counts its steps, four bytes per tensor.
        assert planned.optimizer == pytest.approx(exact.at_peak["optimizer"], rel=2e-3)
        assert planned.allocated == pytest.approx(exact.peak_bytes, rel=0.03)


KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}


def test_collectives_move_the_bytes_of_the_dry_run(both: list[tuple[Job, Memory, DryRun]]) -> None:
    for job, _, exact in both:
        costs = costs_of(job)
        planned = moved(job.layout.index_of(exact.rank, "layers"), costs, job.layout)
        # Ring attention sends by an all-to-all in which a rank has something for one other only.
        named = {kind: "all_to_all" if kind == "send" else kind for kind, _ in planned}
        expected = {(named[kind], " x ".join(axes)): size for (kind, axes), size in planned.items()}
        counted: Counter[tuple[str, str]] = Counter()
        for collective in exact.collectives:
            kind = re.sub(r"^_*|_+$", "", collective.kind)
            counted[KINDS.get(kind, kind), collective.axes] += collective.bytes * collective.count
        between_stages = passed_on(job.layout.index_of(exact.rank, "layers"), costs, job.layout)
        if not costs.tied:  # gradients of a table on two stages are not counted, nor the few numbers of a norm
            assert counted["send", costs.pipeline_axis] == pytest.approx(between_stages, rel=1e-3)
        beside = ("all_reduce", "tp")  # of norms over all heads; what is forgotten is of the same size
        few = {key: size for key, size in expected.items() if key == beside and size < 0.02 * sum(counted.values())}
        for key, size in expected.items():
            assert size <= counted[key] if key in few else size == pytest.approx(counted[key], rel=0.03), (key, counted)
        forgotten = {
            key: size - few.get(key, 0)
            for key, size in counted.items()
            if (key not in expected or key in few) and key[0] not in ("send", "recv")
        }
        # Gradients of replicated parameters, once per step, and the few numbers of the loss and of the norm.
        assert sum(forgotten.values()) < 0.005 * sum(counted.values()), forgotten


ALONE = {
    "bf16": (*WIDE, *BF16),
    "pure": (*WIDE, *PURE, "nearest"),
    "float32": WIDE,
    "float32, tied": (*GPT, *FEW, "--train.global_batch_size", "2", "--train.micro_batch_size", "2"),
    "float32, tied, micro batches": (*GPT, *FEW, *TWO),
    "few tokens, lion": (*UPDATED, *LION),
    "few tokens, lion, updates in backward": (*UPDATED, *LION, *WITHIN),
    "few tokens, schedule-free": (*UPDATED, *FREE),
    "few tokens, adafactor": (*UPDATED, "--optimizer.name", "adafactor"),
    "few tokens, muon": (*UPDATED, *MUON),
    "few tokens, muon, shards": (*UPDATED, *MUON, "--mesh.dp_shard", "4", "--train.global_batch_size", "4"),
    "few tokens, 8 bits, a large table": (*UPDATED, *BITS, "--model.vocab_size", "65536"),
    "few tokens, 8 bits, pure": (*UPDATED, *BITS, *PURE, "nearest"),
    "few tokens, 8 bits, updates in backward": (*UPDATED, *BITS, *WITHIN),
}


@pytest.mark.parametrize("words", ALONE.values(), ids=ALONE.keys())
def test_a_rank_alone_makes_and_sums_gradients(words: tuple[str, ...]) -> None:
    job = job_of(*words)
    planned, exact = Planner(CLUSTER).draft(costs_of(job), job.layout).memory()[0], dry_run(job, 0)
    assert planned.allocated == pytest.approx(exact.peak_bytes, rel=0.03)


@pytest.mark.parametrize("precision", [(), BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("model", [LLAMA, GPT, NEOX, OLMO2, QWEN3, GEMMA], ids=lambda words: words[1])
def test_norms_save_on_a_cpu_what_several_kernels_do(model: tuple[str, ...], precision: tuple[str, ...]) -> None:
    words = (*model, *precision, "--train.global_batch_size", "16", *SIXTEEN)
    job = job_of(*words)
    (planned,) = memories(costs_of(job), job.layout, DeviceMemory(0.0, fused_norms=False))
    exact = dry_run(job_of(*words), 0, fused=False)
    assert planned.allocated == pytest.approx(exact.peak_bytes, rel=0.03)


def test_masks_of_long_sequences_are_counted() -> None:
    long = ("--model.preset", "mistral-7b", "--data.seq_len", "131072", "--model.max_seq_len", "131072", *BF16)
    words = (*long, "--train.micro_batch_size", "1", "--mesh.cp", "8", "--plugins.context.method", "ulysses", *FULL)
    job = job_of(*words, "--train.global_batch_size", "1", "--plugins.fsdp.zero_stage", "3", "--mesh.dp_shard", "1")
    whole = job_of(*words, "--model.sliding_window", "131072")
    windowed, plain = (Planner(CLUSTER).draft(costs_of(each), each.layout).memory()[0] for each in (job, whole))
    assert windowed.activations - plain.activations >= 2 * 131072**2


def test_flops_are_those_of_the_dry_run(both: list[tuple[Job, Memory, DryRun]]) -> None:
    job, _, exact = both[0]
    method = job.table["plugins"]["context"]["method"] if job.layout.degree_of("sliced") > 1 else "ulysses"
    window = job.table["model"].get("sliding_window")  # by usual practice S x window FLOPs, of S x S that are computed
    # Other methods leave out part of the square.
    if window or job.layout.degree_of("layers", "slices") > 1 or method != "ulysses":
        return
    forward_and_backward = sum(f.forward + f.backward for f in exact.flops.values())
    tokens = job.micro_batch * job.data.seq_len * job.micro_batches / job.layout.degree_of("sliced")
    stacks = [op for op in job.spec.layer_ops if isinstance(op, Matmul) and op.module == "ffn.experts.w2"]
    # The weighted sum of the results of experts is a product too, which no formula counts.
    weighted = sum(6 * op.used * op.outputs * op.of_layers * job.spec.n_layers for op in stacks)
    assert forward_and_backward == pytest.approx((flops_per_token(costs_of(job))[0] + weighted) * tokens, rel=1e-6)


def test_a_run_says_that_updates_in_backward_save_nothing_between_replicas(caplog: pytest.LogCaptureFixture) -> None:
    dry_run(job_of(*TINY, "--model.n_layers", "1", *BF16, *REPLICAS, *WITHIN), 0)
    assert "update_in_backward saves no memory with mesh.dp_replicate = 2" in caplog.text
