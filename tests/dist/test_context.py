"""Context parallelism: the same curve as one rank, whichever the method and whatever it is combined with."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.jobs import BLOOM, FOUR_LAYERS, GPT, LLAMA, NEOX, OLMO2, QWEN3, mesh
from tests.sweeps import sweep_but
from titan.config import load_job
from titan.contracts import Batch, ModelPart
from titan.errors import ConfigError
from titan.inference.cache import cores_of
from titan.planner.step.layout import costs_of


def by(method: str) -> list[str]:
    return ["--plugins.context.method", method]


METHODS = ("ring", "gather", "ulysses")
PACKED = ("--data.packing", "document_mask")
WINDOW = ("--model.sliding_window", "5")
SELECTIVE, FULL, CORES = (("--plugins.activation_checkpoint.mode", mode) for mode in ("selective", "full", "attention"))
UNFUSED = ("--model.attention", "unfused")
COMPILED = ("--plugins.compile.backend", "aot_eager")

CASES = {
    **{f"{method}, cp 2, packed": (2, [*mesh(cp=2), *by(method)], PACKED) for method in METHODS},
    **{f"{method}, cp 4": (4, [*mesh(cp=4), *by(method)], ()) for method in ("ring", "ulysses")},
    **{f"{method}, cp 2, window": (2, [*mesh(cp=2), *by(method)], WINDOW) for method in ("ring", "ulysses")},
    "gather, cp 4, packed, window": (4, [*mesh(cp=4), *by("gather")], (*PACKED, *WINDOW)),
    "ring, dp 2, tp 2, packed": (8, mesh(dp_shard=2, cp=2, tp=2), PACKED),
    "ring, ddp 2": (4, mesh(dp_replicate=2, cp=2), ()),
    "gather, hsdp": (8, [*mesh(dp_replicate=2, dp_shard=2, cp=2), *by("gather")], ()),
    "ring, pp 2, selective, packed": (4, [*mesh(pp=2, cp=2), *SELECTIVE], PACKED),
    "ulysses, unfused, attention recomputed": (2, [*mesh(cp=2), *by("ulysses"), *UNFUSED, *CORES], PACKED),
    "gather, tp 2, selective, compiled": (4, [*mesh(tp=2, cp=2), *by("gather"), *SELECTIVE, *COMPILED], PACKED),
    "ulysses, pp 2, recompute full, compiled": (4, [*mesh(pp=2, cp=2), *by("ulysses"), *FULL, *COMPILED], PACKED),
    "ring, compiled": (2, [*mesh(cp=2), *COMPILED], PACKED),
    "ring, zero 3": (
        4,
        [*mesh(dp_shard=2, cp=2), "--plugins.fsdp.zero_stage", "3", "--train.micro_batch_size", "1"],
        (),
    ),
    "ring, zero bubble": (
        4,
        [*mesh(pp=2, cp=2), "--plugins.pipeline.schedule", "InterleavedZeroBubble"],
        (*PACKED, *FOUR_LAYERS),
    ),
}
KEPT = (*(f"{method}, cp 2, packed" for method in METHODS), "ring, cp 2, window", "ring, ddp 2")


@pytest.mark.parametrize("case", sweep_but(CASES, *KEPT))
def test_the_curve_of_one_rank(case: str, same_curve) -> None:
    ranks, words, same = CASES[case]
    same_curve(ranks, [*words, *same], same)


MODELS = [("ring", GPT), ("ulysses", GPT), ("ring", OLMO2), ("gather", QWEN3)]
MODELS += [("ulysses", NEOX), *((method, BLOOM) for method in METHODS)]
"""Each method with several; slopes, which are added to scores, with each."""


@pytest.mark.parametrize(
    ("method", "config"),
    sweep_but(MODELS, ("ring", GPT)),
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_other_models(method: str, config: Path, same_curve) -> None:
    same = (*PACKED, "--optimizer.eps", "1e-4")  # of gradients near 0, AdamW would make steps of their rounding
    same_curve(4, [*mesh(cp=2, tp=2), *by(method), *same], same, config)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (mesh(cp=3), r"\[data\] seq_len = 16 cannot be split into 6 pieces, .* mesh\.cp = 3 .* fits: 12 or 18"),
        ([*mesh(cp=3), *by("ulysses")], r"cannot be split into 3 pieces, .*; nearest seq_len that fits: 15 or 18"),
        (
            [*mesh(cp=8, tp=2), *by("ulysses")],
            r"cannot deal 2 query heads and 1 key-value heads \(of \[model\] n_heads = 4 over mesh\.tp = 2\) to "
            r"mesh\.cp = 8 ranks; nearest cp that fits: 2",
        ),
        (
            [*mesh(cp=8), *by("ulysses")],
            r"cannot deal 4 query heads and 2 key-value heads \(of \[model\] n_heads = 4\) to mesh\.cp = 8 ranks",
        ),
        ([*mesh(cp=2), "--model.attention", "unfused"], r"writes no scores; use method = \"ulysses\""),
        ([*mesh(cp=2), "--model.sliding_window", "17", "--model.max_seq_len", "16"], r"sliding_window 17 .* 16"),
        (
            [*mesh(cp=2), "--plugins.fsdp.enabled", "false"],
            r"\[plugins.context\] requires summed_gradients, which no enabled technique provides",
        ),
        (
            [*mesh(cp=2), *by("gather"), "--model.name", "gemma", "--model.sliding_window", "8"],
            r"method = 'gather' has no soft cap on scores, as the model has; use method = \"ulysses\"",
        ),
    ],
    ids=["ring", "ulysses", "heads", "heads without tp", "scores", "window", "sums", "soft caps"],
)
def test_what_cannot_be_split_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_job(LLAMA, ["--data.path", "x", *words], world_size=None)
    assert re.search(said, str(error.value)), error.value


def test_heads_that_tp_cannot_split_are_refused_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_job(LLAMA, ["--data.path", "x", *mesh(cp=2, tp=4), *by("ulysses")])
    (fault,) = error.value.faults
    assert "[model] n_kv_heads = 2 cannot be split over mesh.tp = 4" in fault.what


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_has_whole_sequences(method: str) -> None:
    """Of any length and of any heads: a table of options alone changes nothing."""
    words = ["--data.path", "x", "--data.seq_len", "15", "--model.attention", "unfused", *by(method)]
    job = load_job(LLAMA, words)
    [technique] = (t for t in job.techniques if t.name == "context")
    with torch.device("meta"):
        part = ModelPart(job.model.build())
    context: Any = SimpleNamespace(mesh=SimpleNamespace(layout=job.layout))
    technique.apply(part, context)
    assert part.length_multiple == 1 and all(core.operation is None for core in cores_of(part.module))
    tokens = torch.zeros(2, 15, dtype=torch.int64)
    batch = Batch(tokens, tokens)
    assert technique.batch(batch) is batch
    costs = costs_of(load_job(LLAMA, words[:-2]))
    assert technique.cost(costs, job) == costs
