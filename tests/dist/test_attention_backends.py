"""[plugins.attention]: whichever backend computes attention, the curve is the one without the technique."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import BLOOM, GEMMA, LLAMA, mesh
from tests.sweeps import sweep_but
from titan.plugins.attention.backend.choice import own_kernel
from titan.testing.jobs import Outcome, assert_same_curve, train_job, write_text

PACKED = ("--data.packing", "document_mask")
WINDOW = ("--model.sliding_window", "5")
RECOMPUTE = "--plugins.activation_checkpoint.mode"
COMPILED = ("--plugins.compile.backend", "aot_eager")


def by(backend: str) -> list[str]:
    return ["--plugins.attention.backend", backend]


WINDOWED = (*PACKED, *WINDOW)
CASES: dict[str, tuple[int, list[str], tuple[str, ...], Path]] = {
    "documents, window": (1, by("documents"), WINDOWED, LLAMA),
    "documents, full, compiled": (1, [*by("documents"), RECOMPUTE, "full", *COMPILED], PACKED, LLAMA),
    "documents, tp 2, selective, compiled": (
        2,
        [*by("documents"), *mesh(tp=2), RECOMPUTE, "selective", *COMPILED],
        PACKED,
        LLAMA,
    ),
    "documents, pp 2, full": (2, [*by("documents"), *mesh(pp=2), RECOMPUTE, "full"], PACKED, LLAMA),
    "documents, pp 2, dp 2": (4, [*by("documents"), *mesh(pp=2, dp_shard=2)], PACKED, LLAMA),
    "documents, ulysses": (2, [*by("documents"), *mesh(cp=2), "--plugins.context.method", "ulysses"], PACKED, LLAMA),
    "auto, ring": (2, [*by("auto"), *mesh(cp=2)], PACKED, LLAMA),
    "auto": (1, by("auto"), WINDOWED, LLAMA),
    "auto, gemma": (1, by("auto"), PACKED, GEMMA),
    "math, tp 2, attention recomputed, window": (
        2,
        [*by("math"), *mesh(tp=2), RECOMPUTE, "attention"],
        WINDOWED,
        LLAMA,
    ),
    "math, bloom": (1, by("math"), PACKED, BLOOM),
    "math, bloom, pp 2": (2, [*by("math"), *mesh(pp=2)], (), BLOOM),
    "math, gemma": (1, by("math"), (), GEMMA),
}
KEPT = ("documents, full, compiled", "documents, pp 2, full", "documents, ulysses")
KEPT += ("auto, ring", "math, tp 2, attention recomputed, window", "math, bloom")


@pytest.mark.parametrize("case", sweep_but(CASES, *KEPT))
def test_the_curve_without_the_technique(case: str, same_curve: Any) -> None:
    ranks, words, same, config = CASES[case]
    outcome: Outcome = same_curve(ranks, [*words, *same], same, config)
    if words[1] != "auto":
        assert f"attention: {words[1]}, as the job says" in (outcome.folder / "logs" / "rank-0.log").read_text()


def test_validation_sees_documents_and_a_sample_has_none(tmp_path: Path) -> None:
    """The samples of a validation are packed too; what a prompt generates goes through a cache."""
    write_text(tmp_path / "split")
    where = ("--validation.name", "text", "--validation.path", str(tmp_path / "split"))
    words = (*PACKED, *where, "--validation.every", "5", "--run.sample_prompt", "the", *WINDOW, "--train.steps", "5")
    plain, ours = (train_job(tmp_path, 1, *words, *more, name=str(len(more))) for more in ((), by("documents")))
    assert "validation_loss" in ours.rows[5]
    assert_same_curve(plain, ours)


WIDE = ("--model.dim", "64", *PACKED)
BF16 = ("--plugins.bf16.enabled", "true", *WIDE)
OWN: dict[str, tuple[int, list[str], tuple[str, ...]]] = {
    "window": (1, [], WINDOW),
    "selective": (1, [RECOMPUTE, "selective"], ()),
    "tp 2, selective, compiled": (2, [*mesh(tp=2), RECOMPUTE, "selective", *COMPILED], ()),
    "pp 2, full": (2, [*mesh(pp=2), RECOMPUTE, "full"], ()),
}


@pytest.mark.parametrize("case", sweep_but(OWN, "window", "selective"))
def test_titans_own_kernel_in_bfloat16(case: str, one_rank: Any, tmp_path: Path) -> None:
    """Within twice what layouts differ by without it: measured, loss 3e-5 and gradient norm 4e-4."""
    if why := own_kernel().why_not(torch.device("cpu"), torch.bfloat16, 16):
        pytest.skip(why)
    ranks, words, same = OWN[case]
    reference, ours = one_rank(*BF16, *same), train_job(tmp_path, ranks, *BF16, *same, *by("auto"), *words)
    assert "attention: cpu, the fastest in bfloat16" in (ours.folder / "logs" / "rank-0.log").read_text()
    assert ours.loss == pytest.approx(reference.loss, rel=6e-5)
    assert ours.grad_norm == pytest.approx(reference.grad_norm, rel=1e-3)


@pytest.mark.parametrize("case", sweep_but(OWN, "window", "pp 2, full"))
def test_titans_own_kernel_in_float32(case: str, same_curve: Any) -> None:
    if why := own_kernel().why_not(torch.device("cpu"), torch.float32, 16):
        pytest.skip(why)
    ranks, words, same = OWN[case]
    ours = same_curve(ranks, [*WIDE, *same, *by("cpu"), *words], (*WIDE, *same))
    assert "attention: cpu, as the job says" in (ours.folder / "logs" / "rank-0.log").read_text()
