"""The table of docs/versions.md, on the PyTorch that is here: what works trains as eager training does."""

from pathlib import Path

import pytest
import torch

from tests.jobs import FOUR_LAYERS, LLAMA, MOE, mesh

PAGE = Path(__file__).parents[2] / "docs" / "versions.md"

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


def _table() -> dict[str, dict[str, str]]:
    """Case -> version -> cell."""
    lines = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    (_, *versions), _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {name: dict(zip(versions, cells, strict=True)) for name, *cells in rows}


def test_the_table_has_every_case_and_no_other_word() -> None:
    table = _table()
    assert list(table) == list(CASES)
    assert {cell for cells in table.values() for cell in cells.values()} <= {"works", "not run"}


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_each_case_is_what_the_table_says(case: str, same_curve) -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    cells = _table()[case]
    if cells.get(version, "not run") == "not run":
        pytest.skip(f"the table says nothing of PyTorch {version}")
    ranks, words, same, config = CASES[case]
    same_curve(ranks, words, same, config)
