"""What the planner counts for the accumulation of gradients, against the operations of a dry run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.planned import CLUSTER, job_of
from titan.contracts import Job, locals_of
from titan.packages import torch_release
from titan.planner.dryrun import dry_run
from titan.planner.dryrun.meta_tensors import MetaTensorMode
from titan.planner.dryrun.watch import Watch
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner

# What the plugin says to this warning, pytest takes back before each test.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

LLAMA = ("--model.preset", "mini", "--model.n_layers", "4", "--data.seq_len", "384")
LLAMA += ("--train.micro_batch_size", "1", "--train.global_batch_size")  # its value comes next
BF16 = ("--plugins.bf16.enabled", "true")
ZERO1 = ("--mesh.dp_shard", "4", "--plugins.fsdp.zero_stage", "1")
PIPED = ("--mesh.pp", "2", "--plugins.pipeline.schedule")
BYTES_PER_S = 1e6
SLOW = replace(
    CLUSTER,
    device=replace(CLUSTER.device, bandwidth_gb_s=BYTES_PER_S / 1e9),
    kernels=replace(CLUSTER.kernels, bandwidth_efficiency=1.0),
)
"""Memory so slow that a byte more takes its time."""


def added_bytes(words: Sequence[str], rank: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that a dry run reads and writes where it adds gradients of parameters to a sum, or casts them to one."""
    add, cast, watching, moved = torch.ops.aten.add_, torch.ops.aten._to_copy, Watch.watching, 0

    @contextmanager
    def counting(self: Watch, mode: MetaTensorMode) -> Iterator[None]:
        with watching(self, mode):
            mode.look = partial(count, self, mode.look)
            yield

    def count(self: Watch, look: Any, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        nonlocal moved
        look(function, args, kwargs, out)
        packet = function._overloadpacket
        # A backward of the weights alone runs outside of autograd, in the phase before it; an optimizer adds, too.
        if packet in (add, cast) and self.position.now().phase not in ("start", "update"):
            shapes = {local.shape for parameter in self.computing.values() for local in locals_of(parameter)}
            # What is cast to a narrower type is a parameter.
            if args[0].shape in shapes and out.nbytes >= args[0].nbytes:
                moved += sum(tensor.nbytes for tensor in (*args[: 1 + (packet is add)], out))

    monkeypatch.setattr(Watch, "watching", counting)
    dry_run(job_of(*words), rank)
    return moved


def _of_norms(job: Job, split: bool) -> int:
    """Bytes of the weights of norms that a plan leaves out: PyTorch 2.15 casts their gradients before it adds them.

    In each later micro batch, where they are to be summed over tp; else in the first backward of the inputs alone,
    whose result goes.
    """
    norms, early = 2 * job.spec.n_layers // job.layout.degree("pp"), torch_release() < (2, 15)
    if job.layout.degree("tp") > 1 and not early:
        return (job.micro_batches - 1) * (6 + 12 - 10) * (norms + 1) * job.spec.dim
    return 6 * norms * job.spec.dim * (split and not early)


@pytest.mark.parametrize(
    ("words", "rank"),
    [
        (("12", *ZERO1, *BF16), 0),
        (("12", *ZERO1), 0),
        (("4", *ZERO1, *BF16), 0),
        (("6", "--mesh.dp_replicate", "2", *BF16), 0),
        (("12", *ZERO1, *BF16, "--mesh.tp", "2"), 1),
        (("16", *ZERO1, *BF16, *PIPED, "1F1B"), 0),
        (("16", *ZERO1, *BF16, *PIPED, "1F1B"), 4),
        (("16", *ZERO1, *BF16, *PIPED, "ZBVZeroBubble"), 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_the_bytes_are_those_of_a_dry_run(words: tuple[str, ...], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*LLAMA, *words)
    job = job_of(*words)
    costs, seconds = costs_of(job), []
    for bytes_ in (costs.accumulate_bytes, 0.0):
        work = Planner(SLOW).draft(replace(costs, accumulate_bytes=bytes_), job.layout).by_place
        mine = work[job.layout.coordinate(rank).get("pp", 0)]
        seconds.append(job.micro_batches * sum(stage.forward + stage.inputs + stage.weights for stage in mine))
    planned = (seconds[0] - seconds[1]) * BYTES_PER_S
    assert planned + _of_norms(job, "ZBVZeroBubble" in words) == pytest.approx(
        added_bytes(words, rank, monkeypatch), rel=1e-9
    )
    assert (planned > 0) == (job.micro_batches > 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_are_added_beside_computation(stage: int) -> None:
    job = job_of(*LLAMA, "12", "--mesh.dp_shard", "4", "--plugins.fsdp.zero_stage", str(stage))
    assert costs_of(job).accumulate_bytes == 0


def test_a_tied_table_is_added_once_by_each_stage_that_has_it() -> None:
    words = (*LLAMA, "16", *ZERO1, "--model.tied")
    adding: dict[tuple[str, int], list[float]] = {}
    for tied in ("true", "false"):
        for stages in (1, 2):
            job = job_of(*words, tied, "--mesh.pp", str(stages))
            costs = costs_of(job)
            whole, none = (
                Planner(SLOW).draft(replace(costs, accumulate_bytes=bytes_), job.layout).work for bytes_ in (1.0, 0.0)
            )
            adding[tied, stages] = [(a.weights - b.weights) * BYTES_PER_S for a, b in zip(whole, none, strict=True)]
    spec = job.spec
    assert adding["false", 1] == pytest.approx([spec.params])
    assert adding["true", 1] == pytest.approx([spec.params - spec.embedding_params])
    assert adding["true", 2] == pytest.approx(adding["false", 2])


@pytest.mark.parametrize(("stage", "micro_batches", "bytes_"), [(1, 12, 6), (2, 1, 6 + 6), (3, 12, 2 * 10 + 14 + 11)])
def test_a_rank_alone_casts_where_others_gather_and_reduce(stage: int, micro_batches: int, bytes_: float) -> None:
    """In bf16 parameters are cast from 4 to 2 bytes and the gradients of a single micro batch back.

    FSDP2, with stage 3: a gather casts 4 to 2 bytes and copies them, a reduction copies 2 to 4, and copies these.
    """
    settings = (*BF16, "--plugins.fsdp.zero_stage", str(stage))
    alone, two = (job_of(*LLAMA, str(micro_batches * n), *settings, "--mesh.dp_shard", str(n)) for n in (1, 2))
    assert costs_of(alone).copied_bytes == pytest.approx(bytes_)
    assert costs_of(two).copied_bytes == 0
