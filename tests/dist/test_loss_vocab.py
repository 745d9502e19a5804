"""Cross-entropy over a split vocabulary is the one of the whole: value, gradient, on every rank."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from titan.contracts import IGNORE, Projection
from titan.contracts.base.sharding import local_of
from titan.errors import PluginError
from titan.plugins.losses.cross_entropy import Config, CrossEntropy
from titan.testing.ranks import run_ranks

BATCH, SEQ, DIM = 2, 5, 6


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
    whole = _whole(vocab, z_loss)
    results = run_ranks(_split, ranks, vocab, z_loss)
    assert [width for *_, width in results] == widths
    for theirs, shown, slices, _ in results:
        assert torch.equal(theirs, results[0][0]) and torch.equal(shown, results[0][1])
        torch.testing.assert_close((theirs, shown, slices), whole, rtol=1e-6, atol=1e-6)


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


def _of_hidden(vocab: int, z_loss: float, chunk: int, split: bool) -> tuple[dict[str, Tensor], int]:
    """Sums and gradients of hidden states and of the head's weight, whole or in slices; the calls of all-reduce."""
    head, forward = nn.Linear(DIM, vocab, bias=False), None
    nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(5))
    if split:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))

        def forward(hidden: Tensor) -> Tensor:
            logits = hidden @ local_of(head.weight).t()
            whole = torch.empty(*logits.shape[:-1], vocab, device="meta")
            shape, stride = whole.shape, whole.stride()
            return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)

    _, labels = _inputs(vocab)
    labels[1] = IGNORE  # chunks without a label reduce all the same
    hidden = torch.randn(BATCH, SEQ, DIM, generator=torch.Generator().manual_seed(6)).requires_grad_()
    loss = CrossEntropy(Config(z_loss=z_loss, chunk_tokens=chunk))
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        objective, reported = loss.of_hidden(hidden, labels, Projection(head, forward or head.forward, vocab))
    (objective / 7).backward()
    assert hidden.grad is not None
    if split:
        dist.all_reduce(hidden.grad)  # each rank has the part of its words
    gradient = head.weight.grad.full_tensor() if split else head.weight.grad  # type: ignore[union-attr]
    found = {"objective": objective.detach(), "reported": reported, "hidden": hidden.grad, "weight": gradient}
    return found, reduce.call_count


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize(("vocab", "ranks"), [(251, 4), (9, 4)], ids=["uneven", "empty-slice"])
def test_chunks_of_a_split_head_are_the_whole(vocab: int, ranks: int, z_loss: float) -> None:
    whole, _ = _of_hidden(vocab, z_loss, BATCH * SEQ, split=False)
    for found, reductions in run_ranks(_of_hidden, ranks, vocab, z_loss, 3, True):
        assert reductions == 2 * 4  # of 10 tokens, whether or not a chunk has labels
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)


def _split_over_the_sequence() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    logits, labels = _inputs(8)
    with pytest.raises(PluginError) as error:
        CrossEntropy(Config()).compute(distribute_tensor(logits, mesh, [Shard(1)]), labels)
    return str(error.value)


def test_another_split_is_refused() -> None:
    assert "Shard(dim=1)" in run_ranks(_split_over_the_sequence, 2)[0]
