"""The metric `bytes_sent`: what real ranks send is what arithmetic and the dry run say, at any layout."""

import re
import threading
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.jobs import LLAMA, SAVING, mesh
from titan.config import load_job
from titan.contracts import Axis, Mesh
from titan.contracts.base import collectives
from titan.contracts.base.mesh import Layout
from titan.packages import torch_release
from titan.planner.dryrun import DryRun, dry_run
from titan.plugins.observe.bytes_sent import BytesSent, Config
from titan.testing.jobs import train_job
from titan.testing.ranks import run_ranks

COUNTED = ("--plugins.bytes_sent.enabled", "true", "--metrics.every", "1", "--train.steps", "3")
LAYOUTS = {
    "dp_replicate 2": (2, mesh(dp_replicate=2)),
    **{f"dp_shard 2, zero {z}": (2, [*mesh(dp_shard=2), "--plugins.fsdp.zero_stage", z]) for z in "123"},
    "tp 2": (2, mesh(tp=2)),
    "pp 2": (2, mesh(pp=2)),
    "cp 2": (2, mesh(cp=2)),
    "hsdp 2x2": pytest.param(4, mesh(dp_replicate=2, dp_shard=2), marks=pytest.mark.sweep),
    "dp_shard 2, tp 2": pytest.param(4, mesh(dp_shard=2, tp=2), marks=pytest.mark.sweep),
    "tp 2, compiled": pytest.param(2, [*mesh(tp=2), "--plugins.compile.enabled", "true"], marks=pytest.mark.sweep),
    "cp 2, gathered": pytest.param(2, [*mesh(cp=2), "--plugins.context.method", "gather"], marks=pytest.mark.sweep),
}
GREETING = 4 if torch_release() < (2, 15) else 10
"""Bytes that torch's pipeline sends to the next stage in its first step, to open the connection; mean of two ranks."""


def _by_axes(runs: list[DryRun]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for run in runs:
        for each in run.collectives:
            found[each.axes] += each.count * each.sent / len(runs)
    return found


@pytest.mark.parametrize(("ranks", "words"), LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_send_what_the_dry_run_says(ranks: int, words: list[str], tmp_path: Path) -> None:
    rows = train_job(tmp_path, ranks, *COUNTED, *words).rows
    greeting = GREETING if "--mesh.pp" in words else 0
    first = 1 if torch_release() < (2, 15) else 2  # among faked ranks, torch greets nobody any more
    job = load_job(LLAMA, ["--data.path", str(tmp_path / "text"), *words], ranks)
    runs = [dry_run(job, rank, fused=False) for rank in range(ranks)]
    assert rows[first]["bytes_sent"] == mean(run.bytes_sent for run in runs) > 0
    sent = {key.removeprefix("bytes_sent."): sent for key, sent in rows[first].items() if "bytes_sent." in key}
    assert {axes: bytes_ for axes, bytes_ in sent.items() if bytes_} == _by_axes(runs)
    assert rows[2]["bytes_sent"] == rows[3]["bytes_sent"] == rows[1]["bytes_sent"] - greeting


def test_an_all_reduce_of_the_gradients_and_nothing_beside_the_steps(tmp_path: Path) -> None:
    """Rows, validations and saves send bytes too, which are no step's. A row is the mean of its steps."""
    validated = ("--validation.name", "text", "--validation.path", str(tmp_path / "text"), "--validation.every", "1")
    words = (*mesh(dp_replicate=2), *COUNTED, "--metrics.every", "2", *SAVING, *validated, "--validation.samples", "4")
    rows = train_job(tmp_path, 2, *words).rows
    params = load_job(LLAMA, ["--data.path", str(tmp_path / "text")], 1).spec.params
    # Beside the gradients in float32, the number of tokens in int64, the loss and two flags in float32.
    assert [rows[step]["bytes_sent"] for step in (1, 2, 3)] == [4 * params + 8 + 12] * 3
    plain = train_job(tmp_path, 2, *mesh(dp_replicate=2), *COUNTED, "--metrics.every", "3", name="plain").rows
    assert plain[3]["bytes_sent"] == rows[3]["bytes_sent"]
    assert "bytes_sent" not in train_job(tmp_path, 2, *mesh(dp_replicate=2), "--train.steps", "1", name="not").rows[1]


# --- whoever issues them ------------------------------------------------------------------------------------------


def counter(mesh: Mesh) -> tuple[BytesSent, Mock]:
    """The technique, applied to no model in particular, and its context."""
    made, context = BytesSent(Config()), Mock(mesh=mesh, device=mesh.device, in_step=False)
    made.apply(Mock(), context)
    made.load_state_dict({})
    return made, context


def _issued() -> dict[str, float]:
    """Bytes counted of each way to communicate, on a rank of three."""
    axes = (Axis(name="dp", data="dealt", weights="copies", topology_order=0, doc=""),)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, context = counter(Mesh(Layout(axes, {"dp": ranks}), torch.device("cpu"), rank))
    ours, all_ranks = torch.ones(4 * ranks), dist.group.WORLD
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    to_next = [4 * ranks if place == after else 0 for place in range(ranks)]
    from_last = [4 * ranks if place == before else 0 for place in range(ranks)]

    def backward() -> None:
        x = torch.ones(4, requires_grad=True)
        functional.all_gather_tensor_autograd(x, 0, all_ranks).sum().backward()

    def each(tensor: torch.Tensor) -> list[torch.Tensor] | None:
        return [tensor.clone() for _ in range(ranks)] if rank == 0 else None

    def neighbors() -> None:
        ops = [dist.P2POp(dist.isend, ours, after), dist.P2POp(dist.irecv, torch.empty_like(ours), before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def thread() -> None:
        other = threading.Thread(target=dist.all_reduce, args=(ours,))
        other.start()
        other.join()

    ways: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(ours),
        "thread": thread,
        "no grad": torch.no_grad()(lambda: dist.all_reduce(ours)),
        "inference": torch.inference_mode()(lambda: dist.all_reduce(torch.ones(4 * ranks))),
        "functional": lambda: functional.all_reduce(ours, "sum", all_ranks) + 1,
        "backward": backward,
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(4), ours),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(ours), ours),
        "shifted": lambda: dist.all_to_all_single(torch.empty_like(ours), ours, from_last, to_next),
        "broadcast": lambda: dist.broadcast(ours, 0),
        "gather": lambda: dist.gather(ours, each(ours)),
        "scatter": lambda: dist.scatter(torch.empty_like(ours), each(ours)),
        "gather of nothing": lambda: dist.gather(torch.empty(0), each(torch.empty(0))),
        "neighbors": neighbors,
        "barrier": dist.barrier,
    }
    found = {}
    for name, communicate in ways.items():
        context.in_step = True
        communicate()
        sent.after_step(1, torch.tensor(True))
        context.in_step = False
        communicate()  # beside a step
        measured = sent.measure()
        assert torch.equal(measured["bytes_sent"], measured["bytes_sent.dp"])
        found[name], steps = measured["bytes_sent"].tolist()
        assert steps == 1
    sent.close()
    return found


def test_every_operation_of_pytorch_has_a_kind() -> None:
    """A dry run meets functional collectives by their own names."""
    names = filter(re.compile("(c10d|_c10d_functional)::[a-z_]+").fullmatch, torch._C._dispatch_get_all_op_names())
    operations = [getattr(getattr(torch.ops, name), of).default for name, of in (each.split("::") for each in names)]
    kinds = {str(one): collectives.kind_of(one) for one in operations if collectives.is_collective(one)}
    known = {*collectives.PASSES, "broadcast", "reduce", "gather", "scatter", "send", *collectives.SILENT}
    assert {name: kind for name, kind in kinds.items() if kind not in known} == {}
    assert kinds["_c10d_functional.all_reduce_coalesced.default"] == "all_reduce"
    counted = {f"c10d.{name}.default" for name in collectives.C10D.split()}
    assert {name for name in kinds if name.startswith("c10d.")} <= counted


def test_whoever_issues_a_collective() -> None:
    tensor = 4 * 12  # bytes
    share = 2 / 3 * tensor
    wanted = {"all_reduce": 2 * share, "thread": 2 * share, "no grad": 2 * share, "inference": 2 * share}
    wanted |= {"functional": 2 * share, "backward": 2 * share, "reduce_scatter": share}
    wanted |= {"all_to_all": share, "shifted": tensor, "broadcast": share, "gather": share}
    wanted |= {"scatter": share, "gather of nothing": 0, "neighbors": tensor, "barrier": 0}
    for found in run_ranks(_issued, 3):
        assert found == pytest.approx(wanted)
