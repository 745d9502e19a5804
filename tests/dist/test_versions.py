"""What a new PyTorch breaks first, on the one that is here: compiled, recomputed and split, a small job trains as ever.

`python -m bench.versions` runs this on each release, for the table of docs/versions.md.
"""

from pathlib import Path

import pytest

from tests.jobs import FOUR_LAYERS, LLAMA, MOE, mesh

GRAPHS = ("--plugins.compile.backend", "aot_eager")
"""Traced and split into forward and backward as for kernels, which take long to make."""
KERNELS = ("--plugins.compile.enabled", "true", "--model.n_layers", "2")


RECOMPUTE = "--plugins.activation_checkpoint.mode"
PIPED = (*mesh(pp=2), *FOUR_LAYERS, "--plugins.pipeline.schedule")
CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...], Path]] = {
    "eager, sharded": (2, tuple(mesh(dp_shard=2)), (), LLAMA),
    "compile, to kernels": (1, KERNELS, KERNELS[2:], LLAMA),
    "compile, tensor parallel": (2, (*mesh(tp=2), *GRAPHS), (), LLAMA),
    "compile, tensor parallel, recompute selective": (2, (*mesh(tp=2), *GRAPHS, RECOMPUTE, "selective"), (), LLAMA),
    "compile, tensor parallel, recompute full": (2, (*mesh(tp=2), *GRAPHS, RECOMPUTE, "full"), (), LLAMA),
    "compile, 1F1B": (2, (*PIPED, "1F1B", *GRAPHS), FOUR_LAYERS, LLAMA),
    "compile, Interleaved1F1B": (2, (*PIPED, "Interleaved1F1B", *GRAPHS), FOUR_LAYERS, LLAMA),
    "ZBVZeroBubble": (2, (*PIPED, "ZBVZeroBubble"), FOUR_LAYERS, LLAMA),
    "DualPipeV": (2, (*PIPED, "DualPipeV"), FOUR_LAYERS, LLAMA),
    "experts, InterleavedZeroBubble": (2, (*PIPED, "InterleavedZeroBubble"), FOUR_LAYERS, MOE),
}
"""Row of the table -> ranks, words, words of the job on one rank that it must equal, and config of both."""


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_eager_training_does(case: str, same_curve) -> None:
    ranks, words, same, config = CASES[case]
    same_curve(ranks, words, same, config)
