"""Dropout at any layout: the curve of one process, since each random number is a function of where it is used."""

from pathlib import Path

import pytest

from tests.dist.test_parity import COMPILED
from tests.jobs import GPT, SELF_SEND, Outcome, assert_same_curve, differences, mesh, train_job
from tests.sweeps import but_sweep

DROPOUT = ("--model.dropout", "0.2")
V_SHAPED = ("--plugins.pipeline.schedule", "ZBVZeroBubble")
FULL, SELECTIVE = (("--plugins.activation_checkpoint.mode", mode) for mode in ("full", "selective"))

LAYOUTS = {
    "dp_shard 2": (2, mesh(dp_shard=2)),
    "ddp 2": (2, mesh(dp_replicate=2)),
    "tp 2": (2, mesh(tp=2)),
    "tp 2, whole sequences": (2, [*mesh(tp=2), "--plugins.tensor.sequence_parallel", "false"]),
    "pp 2": (2, mesh(pp=2)),
    "pp 2, ZBV": (2, [*mesh(pp=2), *V_SHAPED]),
    "cp 2, ring": (2, mesh(cp=2)),
    "cp 2, gather": (2, [*mesh(cp=2), "--plugins.context.method", "gather"]),
    "cp 2, ulysses": (2, [*mesh(cp=2), "--plugins.context.method", "ulysses"]),
    "recompute full": (1, [*FULL]),
    "recompute selective": (1, [*SELECTIVE]),
    "recompute full, pp 2, interleaved": (2, [*mesh(pp=2), *FULL, "--plugins.pipeline.schedule", "Interleaved1F1B"]),
    "compiled": (1, [*COMPILED]),
    "compiled, recompute selective, tp 2": (2, [*mesh(tp=2), *COMPILED, *SELECTIVE]),
    "accumulation": (1, ["--train.micro_batch_size", "2"]),
    "accumulation, dp_shard 2": (2, [*mesh(dp_shard=2), "--train.micro_batch_size", "1"]),
    "cp 2, tp 2": (4, mesh(cp=2, tp=2)),
    "dp_shard 2, tp 2, pp 2": (8, mesh(dp_shard=2, tp=2, pp=2)),
}
SWEPT = ("ddp 2", "cp 2, gather", "recompute full, pp 2, interleaved", "accumulation, dp_shard 2")


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, *SWEPT))
def test_the_curve_of_one_process(layout: str, one_rank, tmp_path: Path) -> None:
    if "ZBV" in layout and not SELF_SEND:
        pytest.skip("gloo of this PyTorch cannot send to the same rank")
    ranks, words = LAYOUTS[layout]
    assert_same_curve(one_rank(*DROPOUT, config=GPT), train_job(tmp_path, ranks, *DROPOUT, *words, config=GPT))
