"""Asynchronous tensor parallelism on the CPU: what the compiler makes of titan's layers, and the curve of its graphs.

The operations that it puts in their place need GPUs that read each other's memory. Here they do what they fuse, one
after the other, as PyTorch's own tests let them: the graphs are those of a GPU, and nothing overlaps.
"""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

from tests.jobs import THREE_STEPS, mesh
from titan.cli import main
from titan.machine import standing_in_for
from titan.testing.jobs import assert_same_curve, run_job, train_job
from titan.testing.ranks import RankError, run_ranks

ON = ("--plugins.tensor.async_tp", "true", "--plugins.compile.enabled", "true", "--run.device", "auto")
GATHERED, SCATTERED = "symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default"
ALONE = "_c10d_functional.reduce_scatter_tensor.default"


def _collectives(graph: Graph) -> dict[str, int]:
    """Operations of a compiled graph that send, but for waits."""
    names = [str(node.target) for node in graph.nodes]
    return dict(Counter(name for name in names if name.startswith(("symm_mem.", "_c10d")) and "wait" not in name))


def _pipelined(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """On one rank: train the job as on a GPU, with the graphs' collectives as expected."""
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor
    from torch._inductor.fx_passes import post_grad
    from torch.distributed import _symmetric_memory as symmetric

    found: list[dict[str, int]] = []
    fuse = post_grad.micro_pipeline_tp_pass

    def seen(graph: Graph) -> None:
        fuse(graph)
        found.append(_collectives(graph))

    kernels = torch.library.Library("symm_mem", "IMPL")
    kernels.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    kernels.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    inductor.fx_graph_cache = autograd.enable_autograd_cache = False  # the pass does not run for a graph that is known
    with (
        patch.object(post_grad, "micro_pipeline_tp_pass", seen),
        patch.object(dist, "is_nccl_available", lambda: True),
        symmetric._test_mode(),
        standing_in_for("cuda"),
    ):
        weights = run_job(folder, words, config)
    kernels._destroy()
    # Backward sums what several products make before it scatters that.
    assert found == [{GATHERED: 2, SCATTERED: 2}, {GATHERED: 2, ALONE: 2}], found
    return weights


@pytest.mark.sweep
def test_all_gathers_and_forwards_reduce_scatters_join_products(one_rank, tmp_path: Path) -> None:
    words = (*THREE_STEPS, "--train.micro_batch_size", "4")
    assert_same_curve(one_rank(*THREE_STEPS), train_job(tmp_path, 2, *mesh(tp=2), *ON, *words, run=_pipelined))


def test_ranks_without_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="async_tp = true needs GPUs, and this rank is on a cpu"):
        train_job(tmp_path, 2, *mesh(tp=2), *ON)


def test_a_model_whose_linears_have_biases_is_refused(capsys: pytest.CaptureFixture) -> None:
    words = ["--config", "gpt175b", *ON, "--run.device", "cuda", "--data.path", "."]
    assert main(["config", *words]) == 2
    assert "overlaps products without a bias, and all linears of this model have one" in capsys.readouterr().err


def _enabled(device: str) -> tuple[bool, list[str]]:
    """Whether the pass is on, and the groups that symmetric memory was enabled for."""
    from torch._inductor import config as inductor
    from torch.distributed import _symmetric_memory as symmetric

    from titan.plugins.parallel.tensor import pipelined

    groups: list[str] = []
    group = dist.group.WORLD
    assert group is not None
    with patch.object(symmetric, "enable_symm_mem_for_group", groups.append):
        pipelined.enable(group, SimpleNamespace(device=torch.device(device)))  # type: ignore[arg-type]
    return inductor._micro_pipeline_tp, [name == group.group_name for name in groups]


def test_the_group_of_tp_shares_its_memory() -> None:
    assert run_ranks(_enabled, 1, "cuda") == [(True, [True])]
