"""What a compiled feed-forward saves for backward, by the partitioner of torch.compile, against its stated costs."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.planned import job_of
from titan.layers.blocks import FeedForward, SwiGLU, feed_forward, swiglu
from titan.layers.experts import Experts
from titan.planner.step.activations import kept_by
from titan.planner.step.layout import costs_of
from titan.plugins.models.gemma import GeGLU

# PyTorch imports functions of its own that it calls deprecated when it compiles for the first time.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

DIM, FFN, TOKENS = 64, 160, 32
CASES = {"SwiGLU": (SwiGLU, swiglu), "GeGLU": (GeGLU, swiglu)}
CASES["GELU"] = (partial(FeedForward, approximate="tanh"), feed_forward)


def widths(module: nn.Module, compiled: bool, *more: Tensor) -> list[int]:
    """Numbers per token of each tensor that a forward saves, without input and parameters."""
    torch._dynamo.reset()
    x, saved = torch.randn(TOKENS, DIM, requires_grad=True), list[Tensor]()
    run = torch.compile(module, backend="aot_eager_decomp_partition") if compiled else module
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(x, *more)
    given = {each.untyped_storage().data_ptr() for each in (*module.parameters(), x)}
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in saved}
    return sorted(numbers // TOKENS for at, numbers in stored.items() if at not in given)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_a_feed_forward_saves_what_its_costs_state(case: str, compiled: bool) -> None:
    make, part = CASES[case]
    costs = costs_of(job_of("--plugins.compile.enabled", str(compiled).lower()))
    stated = kept_by(part(DIM, FFN).operations, costs, fused_norms=True) / costs.itemsize / costs.share("seq_full")
    assert widths(make(DIM, FFN), compiled) == [FFN] * round((stated - DIM) / FFN)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of PyTorch, while it compiles
def test_experts_save_one_tensor_less_where_they_are_compiled() -> None:
    chosen = torch.stack([torch.arange(TOKENS) % 4, (torch.arange(TOKENS) + 1) % 4], dim=1)
    experts, weights = Experts(4, DIM, FFN), torch.full((TOKENS, 2), 0.5)
    nn.init.normal_(experts.w1.weight)
    counts = [widths(experts, compiled, chosen, weights).count(2 * FFN) for compiled in (False, True)]
    assert counts == [4, 3]
    moe = ("--model.name", "moe", "--model.preset", "moe-tiny")
    jobs = [job_of(*moe, "--plugins.compile.enabled", value) for value in ("false", "true")]
    eager, compiled = (kept_by(costs.layer, costs, fused_norms=True) for costs in map(costs_of, jobs))
    costs = costs_of(jobs[0])
    w1: Any = next(op for op in costs.layer if getattr(op, "module", "") == "ffn.experts.w1")
    assert eager - compiled == pytest.approx(w1.outputs * w1.used * costs.share("tp_sharded") * costs.itemsize)
