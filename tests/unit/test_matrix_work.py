"""Matrix products of an update in the plan: their FLOPs, and the ranks that share them."""

import pytest

from tests.planned import CLUSTER, job_of
from titan.contracts.base.cost import Costs, Matmul
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner

SIZES = ("--model.dim", "2048", "--model.n_heads", "16", "--model.ffn_dim", "4096", "--model.n_layers", "4")
MUON = ("--optimizer.name", "muon", "--model.preset", "nano", *SIZES, "--plugins.bf16.enabled", "true")


def _planned(*words: str) -> tuple[Costs, float]:
    """(costs, seconds of the update)."""
    job = job_of(*MUON, *words, "--train.global_batch_size", "64")
    costs = costs_of(job)
    return costs, Planner(CLUSTER).predict(costs, job.layout).time_s["optimizer"]


def _products(ranks: int, *words: str) -> float:
    """Seconds of five iterations: what ten take more."""
    layout = ("--mesh.dp_shard", str(ranks), *words)
    return _planned(*layout, "--optimizer.ns_steps", "10")[1] - _planned(*layout)[1]


def test_five_iterations_take_their_flops() -> None:
    costs, _ = _planned()
    flops = 0.0
    for op in costs.layer:
        if isinstance(op, Matmul):
            m, n = sorted((op.inputs, op.outputs))
            flops += 4 * 2 * 5 * (2 * m * m * n + m**3)  # four layers
    assert _products(1) == pytest.approx(flops / 100e12, rel=0.02)  # bf16: half of 200 TFLOP/s


@pytest.mark.parametrize(
    ("ranks", "words", "shares"),
    [(4, (), 4), (2, ("--mesh.tp", "2"), 4), (2, ("--mesh.dp_replicate", "2"), 4), (1, ("--mesh.pp", "2"), 2)],
)
def test_ranks_that_share_matrices_share_their_products(ranks: int, words: tuple[str, ...], shares: int) -> None:
    assert _products(ranks, *words) == pytest.approx(_products(1) / shares, rel=1e-6)


def test_a_matrix_is_not_divided() -> None:
    """Of 28 matrices, 64 ranks have one at most, and so do 32."""
    longest = 2 * 5 * (2 * 2048**2 * 4096 + 2048**3) / 100e12
    assert _products(64) == pytest.approx(_products(32)) == pytest.approx(longest, rel=0.02)
