"""Cross-entropy over a split vocabulary is the one of the whole: value, gradient, on every rank."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from titan.contracts import IGNORE
from titan.errors import PluginError
from titan.plugins.losses.cross_entropy import Config, CrossEntropy
from titan.testing.ranks import run_ranks

BATCH, SEQ = 2, 5


def _inputs(vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(BATCH, SEQ, vocab, generator=generator) * 4
    labels = torch.randint(0, vocab, (BATCH, SEQ), generator=generator)
    labels[0, 0], labels[0, 1], labels[1, 2] = 0, vocab - 1, IGNORE
    return logits, labels


def _whole(vocab: int, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    logits, labels = _inputs(vocab)
    logits.requires_grad_()
    objective, reported = CrossEntropy(Config(z_loss=z_loss)).compute(logits, labels)
    (objective / 7).backward()
    assert logits.grad is not None
    return objective.detach(), reported, logits.grad


def _split(vocab: int, z_loss: float) -> tuple[Tensor, Tensor, Tensor, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("inner",))
    logits, labels = _inputs(vocab)
    split = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
    objective, reported = CrossEntropy(Config(z_loss=z_loss)).compute(split, labels)
    assert type(objective) is Tensor and type(reported) is Tensor and not reported.requires_grad
    with torch.no_grad():
        assert torch.equal(CrossEntropy(Config(z_loss=z_loss)).compute(split, labels)[0], objective)
    (objective / 7).backward()
    return objective.detach(), reported, split.grad.full_tensor(), split.grad.to_local().shape[-1]


@pytest.mark.parametrize(
    ("vocab", "ranks", "widths"),
    [(64, 2, [32, 32]), (251, 4, [63, 63, 63, 62]), (9, 4, [3, 3, 3, 0]), (1, 2, [1, 0])],
    ids=["even", "uneven", "empty-slice", "one-word"],
)
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_split_is_whole(vocab: int, ranks: int, widths: list[int], z_loss: float) -> None:
    objective, reported, gradient = _whole(vocab, z_loss)
    results = run_ranks(_split, ranks, vocab, z_loss)
    assert [width for *_, width in results] == widths
    for theirs, shown, slices, _ in results:
        assert torch.equal(theirs, results[0][0]) and torch.equal(shown, results[0][1])
        torch.testing.assert_close(theirs, objective, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(shown, reported, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(slices, gradient, rtol=1e-6, atol=1e-6)


def _sent(vocab: int) -> tuple[int, int]:
    """Collectives of any kind, and numbers given to all-reduces, in forward and backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    logits, labels = _inputs(vocab)
    split = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
    with CommDebugMode() as collectives, patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        CrossEntropy(Config()).compute(split, labels)[0].backward()
    return collectives.get_total_counts(), sum(call.args[0].numel() for call in reduce.call_args_list)


def test_three_numbers_a_token_are_sent_and_nothing_else() -> None:
    assert run_ranks(_sent, 2, 64) == [(2, 3 * BATCH * SEQ)] * 2


def _split_over_the_sequence() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    logits, labels = _inputs(8)
    with pytest.raises(PluginError) as error:
        CrossEntropy(Config()).compute(distribute_tensor(logits, mesh, [Shard(1)]), labels)
    return str(error.value)


def test_another_split_is_refused() -> None:
    assert "Shard(dim=1)" in run_ranks(_split_over_the_sequence, 2)[0]
