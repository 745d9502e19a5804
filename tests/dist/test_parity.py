"""The same curve at any layout: loss and gradient norm of each of three steps, and the weights, against one rank.

The weights after steps of AdamW hide a gradient that is wrong by a factor; the gradient norm of each step does not.
"""

import pytest

from tests.jobs import BLOOM, FOUR_LAYERS, GEMMA, GPT, NEOX, OLMO2, QWEN3, mesh, settings
from tests.sweeps import but_sweep, sweep_but

RECOMPUTE = "--plugins.activation_checkpoint.mode"
SCORES_RECOMPUTED = ("--model.attention", "unfused", RECOMPUTE, "attention")
"""Against one rank with the kernel that writes no scores: the same numbers within the tolerances."""

COMPILED = ("--plugins.compile.backend", "aot_eager")
"""Traced and split into forward and backward as for a GPU, but not compiled to kernels, which takes long."""

WHOLE_SEQUENCES = ("--plugins.tensor.sequence_parallel", "false")
WHOLE_LOGITS = ("--plugins.tensor.loss_parallel", "false")
ULYSSES = ("--plugins.context.method", "ulysses")
PACKED = ("--data.packing", "document_mask")
WINDOW = ("--model.sliding_window", "5", *PACKED)
LONG = ("--data.seq_len", "128", "--model.max_seq_len", "128")
"""So long that one sequence in nine is the last of its document, and has padding."""

LAYOUTS = {
    "dp_shard 2": (2, mesh(dp_shard=2)),
    "dp_shard 3": (3, [*mesh(dp_shard=3), "--train.global_batch_size", "6"]),
    "ddp 4": (4, mesh(dp_replicate=4)),
    "tp 2": (2, mesh(tp=2)),
    "tp 2, whole sequences, whole logits": (2, [*mesh(tp=2), *WHOLE_SEQUENCES, *WHOLE_LOGITS]),
    "dp_shard 2, tp 2": (4, mesh(dp_shard=2, tp=2)),
    "hsdp 2x2, tp 2": (8, mesh(dp_replicate=2, dp_shard=2, tp=2)),
    "pp 2": (2, mesh(pp=2)),
    "pp 4": (4, [*mesh(pp=4), *FOUR_LAYERS]),
    "dp_shard 2, tp 2, pp 2": (8, mesh(dp_shard=2, tp=2, pp=2)),
    "ddp 2, pp 2": (4, mesh(dp_replicate=2, pp=2)),
    "accumulation": (1, ["--train.micro_batch_size", "2"]),
    "accumulation, hsdp 2x2, zero 1": (4, [*mesh(dp_replicate=2, dp_shard=2), "--train.micro_batch_size", "1"]),
    "accumulation, hsdp 2x2, zero 3": (
        4,
        [*mesh(dp_replicate=2, dp_shard=2), "--train.micro_batch_size", "1", "--plugins.fsdp.zero_stage", "3"],
    ),
    "pp 2, dp_shard 2, zero 3": (4, [*mesh(pp=2, dp_shard=2), "--plugins.fsdp.zero_stage", "3"]),
    "recompute full": (1, [RECOMPUTE, "full"]),
    "recompute every 2, tp 2": (2, [*mesh(tp=2), RECOMPUTE, "every_n"]),
    "compiled, recompute selective, dp_shard 2, tp 2": (
        4,
        [*mesh(dp_shard=2, tp=2), *COMPILED, RECOMPUTE, "selective"],
    ),
    "compiled, tp 2, whole sequences": (2, [*mesh(tp=2), *COMPILED, *WHOLE_SEQUENCES]),
    "recompute attention, tp 2": (2, [*mesh(tp=2), *SCORES_RECOMPUTED]),
    "compiled, recompute full, zero 3": (
        2,
        [*mesh(dp_shard=2), "--plugins.fsdp.zero_stage", "3", *COMPILED, RECOMPUTE, "full"],
    ),
    "recompute full, dp_shard 2, pp 2": (4, [*mesh(dp_shard=2, pp=2), RECOMPUTE, "full"]),
    "compiled, recompute full, dp_shard 2, pp 2": (4, [*mesh(dp_shard=2, pp=2), *COMPILED, RECOMPUTE, "full"]),
    "compiled, recompute full, cp 2": (2, [*mesh(cp=2), *COMPILED, RECOMPUTE, "full"]),
    "sliding window, tp 2": (2, [*WINDOW, *mesh(tp=2)]),
    "padded, dp_shard 2, pp 2": (4, [*LONG, "--data.packing", "pad", *mesh(dp_shard=2, pp=2)]),
    "packed, dp_shard 2, pp 2": (4, [*LONG, *PACKED, *mesh(dp_shard=2, pp=2)]),
}
CURVE = ("--train.global_batch_size", "--model.n_layers", "--model.tied", "--model.attention_cap")
CURVE += ("--model.sliding_window", "--model.max_seq_len", "--data.seq_len", "--data.packing")
"""What a run is a function of, unlike its layout and its micro batches."""


SWEPT = ("ddp 2, pp 2", "pp 4", "dp_shard 2, tp 2, pp 2")
SWEPT += ("compiled, recompute selective, dp_shard 2, tp 2", "dp_shard 3", "accumulation, hsdp 2x2, zero 1")
SWEPT += ("pp 2, dp_shard 2, zero 3", "recompute full, dp_shard 2, pp 2", "packed, dp_shard 2, pp 2")
SWEPT += ("compiled, recompute full, dp_shard 2, pp 2", "compiled, recompute full, cp 2")
"""Each combines what other layouts have singly."""


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, *SWEPT))
def test_llama(layout: str, same_curve) -> None:
    ranks, words = LAYOUTS[layout]
    same_curve(ranks, words, settings(words, *CURVE))


V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", *V_SHAPED)


@pytest.mark.parametrize("schedule", sweep_but(SCHEDULES, "ZBVZeroBubble"))
def test_schedules_over_four_stages(schedule: str, same_curve) -> None:
    words = ("--model.n_layers", "8")
    same_curve(4, [*words, *mesh(pp=4), "--plugins.pipeline.schedule", schedule], words)


MODELS = {
    "gpt with its tied head, tp 2": (2, mesh(tp=2), GPT),
    "gpt with its tied head, pp 2": (2, mesh(pp=2), GPT),
    "gpt with its tied head, dp_shard 2, pp 2": (4, mesh(dp_shard=2, pp=2), GPT),
    "qwen3 with norms of heads, tp 2, pp 2": (4, [*mesh(tp=2, pp=2), *PACKED], QWEN3),
    "neox with parallel branches, tp 2": (2, mesh(tp=2), NEOX),
    "neox with parallel branches, tp 2, compiled": (2, [*mesh(tp=2), *COMPILED, RECOMPUTE, "selective"], NEOX),
    "olmo2 with norms over all heads, tp 2, pp 2": (4, [*mesh(tp=2, pp=2), *PACKED], OLMO2),
    "olmo2 with norms over all heads, tp 2, compiled": (2, [*mesh(tp=2), *COMPILED, *WHOLE_SEQUENCES], OLMO2),
    "olmo2 with norms over all heads, tp 2, pp 2, zero bubble": (
        4,
        [*mesh(tp=2, pp=2), *FOUR_LAYERS, "--plugins.pipeline.schedule", "InterleavedZeroBubble"],
        OLMO2,
    ),
    "bloom with slopes of heads, tp 2": (2, mesh(tp=2), BLOOM),
    "bloom with slopes of heads, tp 2, compiled": (2, [*mesh(tp=2), *COMPILED, RECOMPUTE, "selective"], BLOOM),
    "bloom with slopes of heads, tp 2, pp 2": (4, [*mesh(tp=2, pp=2), *PACKED], BLOOM),
    "bloom with slopes of heads, tp 2, cp 2": (4, [*mesh(tp=2, cp=2), *ULYSSES], BLOOM),
    "bloom with slopes of heads, tp 2, unfused": (2, [*mesh(tp=2), "--model.attention", "unfused", *PACKED], BLOOM),
    "gemma with soft caps, tp 2": (2, mesh(tp=2), GEMMA),
    "gemma with soft caps, cp 2": (2, [*mesh(cp=2), *ULYSSES, *PACKED], GEMMA),
    "gemma with soft caps, tp 2, pp 2, whole logits": (4, [*mesh(tp=2, pp=2), *WHOLE_LOGITS], GEMMA),
    "gemma with soft caps, tp 2, compiled": (2, [*mesh(tp=2), *COMPILED, RECOMPUTE, "attention"], GEMMA),
    "gemma without a soft cap, cp 2": (2, [*mesh(cp=2), "--model.attention_cap", "0"], GEMMA),
    "gemma with a head of its own, pp 2": (2, [*mesh(pp=2), "--model.tied", "false"], GEMMA),
}
KEPT = ("gpt with its tied head, tp 2", "gpt with its tied head, pp 2")
KEPT += ("qwen3 with norms of heads, tp 2, pp 2", "neox with parallel branches, tp 2")
KEPT += ("olmo2 with norms over all heads, tp 2, pp 2", "bloom with slopes of heads, tp 2")
KEPT += ("bloom with slopes of heads, tp 2, cp 2", "gemma with soft caps, tp 2", "gemma with soft caps, cp 2")


@pytest.mark.parametrize("case", sweep_but(MODELS, *KEPT))
def test_other_models(case: str, same_curve) -> None:
    ranks, words, config = MODELS[case]
    same_curve(ranks, words, settings(words, *CURVE), config)
