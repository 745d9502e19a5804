"""Builds and steps one rank of a job on meta tensors, without allocating memory and without the other ranks.

The other ranks are PyTorch's fake process group, whose collectives return at once. Tensors are on the meta device: they
have shapes and storages, but no data. The code that trains builds and wraps the model, runs the job's engine, clips
gradients and updates parameters. A first update with zero gradients creates the optimizer state; the step recorded is
the next one.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from titan.checkpoint.techniques import tensors_in
from titan.config import Job
from titan.contracts import Batch, Engine
from titan.contracts.host import locals_of
from titan.errors import ConfigError, PluginError
from titan.layers.attention import forget_masks
from titan.machine import standing_in_for
from titan.planner.dryrun.kernels import as_on_a_gpu
from titan.planner.dryrun.meta_tensors import MetaTensorMode, accepted
from titan.planner.dryrun.result import CollectiveCount, DryRun, Flops, Peak, add_up
from titan.planner.dryrun.watch import OPTIMIZER, OTHER, PARAMETERS, Watch
from titan.ranks.meeting.store import in_time
from titan.ranks.process import Rank
from titan.training.build import Core, state_now, wire
from titan.training.gradients import Counts, NonfiniteGuard
from titan.training.trainer import step

_EAGER = "note: compiled blocks ran eagerly; torch.compile fuses operations, so it saves fewer activations"
_UNFUSED = "note: RMSNorm ran as seven operations, as on a CPU, and chunk sizes are those of a CPU"


def dry_run(job: Job, rank: int, fused: bool = True) -> DryRun:
    """Build one rank of a job on meta tensors and record one training step.

    rank: global rank, from 0.  fused: as on a GPU: RMSNorm is one kernel, and chunks are large; False: as on a CPU.

    Reads and writes no file of the job. Takes up to 0.04 s per layer and micro batch; the most with tensor parallelism
    and selective recomputation.

    Raises:
        ConfigError: the job has no such rank, or this process is in a process group already.
    """
    world_size = job.layout.world_size
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank}: must be from 0 to {world_size - 1}")
    if dist.is_initialized():
        raise ConfigError("this process is in a process group; call dry_run from a process that has none")
    # DTensor remembers what comes of a shape on a mesh, and takes the mesh of another rank for the same; each thread
    # remembers for itself.
    mode = MetaTensorMode()
    try:
        return in_time(lambda: _on_this_thread(job, rank, fused, mode), math.inf)
    finally:
        mode.stopped = True


def _on_this_thread(job: Job, rank: int, fused: bool, mode: MetaTensorMode) -> DryRun:
    forget_masks()  # of an earlier dry run
    stands = standing_in_for("cuda") if fused else nullcontext()
    world_size = job.layout.world_size
    with alone_as(rank, world_size), accepted(mode), stands, ExitStack() as meta:
        # What is there by then is on the meta device, and in the shards that are trained: it needs no other storage.
        core = wire(job, Rank(rank, world_size, 0, torch.device("cpu")), lambda *_: meta.enter_context(mode))
        core.guard = _Trusting(1, Counts(), core.context.mesh)
        return _rehearse(core, mode, fused)


@contextmanager
def alone_as(rank: int, world_size: int) -> Iterator[None]:
    """A fake process group in which this process is `rank`, while the context is open."""
    if dist.Backend.FAKE not in dist.Backend.backend_capability:  # PyTorch registers it once it is asked for
        dist.init_process_group("fake", rank=0, world_size=1)
        dist.destroy_process_group()
    devices = dist.Backend.backend_capability[dist.Backend.FAKE]
    if "meta" not in devices:
        devices.append("meta")
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    collects = gc.isenabled()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if collects:
            gc.enable()
        dist.destroy_process_group()
        gc.collect()


class _Trusting(NonfiniteGuard):
    """Accepts every update: meta tensors hold no values to check."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()


class _Followed:
    """An engine that reports begin and end of its micro batches to the watch."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self._engine, self.parts, self._watch = engine, engine.parts, watch

    def forward_backward(self, batches: Sequence[Batch]) -> None:
        """As the wrapped engine, with the step position recorded."""
        with self._watch.position.micro_batches():
            self._engine.forward_backward(batches)
        self._watch.sweep()

    def forward(self, batch: Batch, labels: Tensor | None = None) -> Tensor | None:
        """As the wrapped engine, with the step position recorded."""
        return self._engine.forward(batch, labels)


def _rehearse(core: Core, mode: MetaTensorMode, fused: bool) -> DryRun:
    job, parts = core.job, core.parts
    _prime(core)
    batches = _batches(job, core.rank.device)
    gc.collect()
    gc.disable()  # as in training
    with _progress(job.micro_batches * len(parts)) as advance:
        watch = Watch(parts, partial(_group, core), advance, hosted=bool(job.stating("weights_on_host")))
        inputs = [t for batch in batches for t in vars(batch).values() if t is not None]
        watch.hold([p for part in parts for _, p in part.parameters()], PARAMETERS)
        watch.hold([*inputs, *(b for part in parts for b in part.module.buffers())], OTHER)
        watch.hold([v for s in core.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)], OPTIMIZER)
        kept = {technique.name: state_now(technique) for technique in core.context.techniques}
        watch.hold([*tensors_in(kept, core.rank.number).values()], OPTIMIZER)
        core.engine = _Followed(core.engine, watch)
        with as_on_a_gpu() if fused else nullcontext(), watch.position.loss(job.loss), watch.watching(mode):
            step(core, batches)
        watch.memory.close()
    for technique in reversed(core.context.techniques):
        technique.close()
    return _result(core, watch, fused)


def _prime(core: Core) -> None:
    """Make the optimizer's state."""
    for group in core.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    core.optimizer.step()
    core.optimizer.zero_grad()


def _batches(job: Job, device: torch.device) -> list[Batch]:
    shape = job.micro_batch, job.data.seq_len

    def tokens() -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    isolated, padded = (job.data.packing == packing for packing in ("document_mask", "pad"))
    return [
        Batch(
            tokens(),
            tokens(),
            tokens() if isolated else None,
            tokens()[:, 0] if padded else None,
            samples=tokens()[:, 0],
        )
        for _ in range(job.micro_batches)
    ]


@contextmanager
def _progress(micro_batches: int) -> Iterator[Callable[[], object]]:
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    with tqdm(
        total=micro_batches, unit=" micro batches", desc="dry run", leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        yield bar.update


def _result(core: Core, watch: Watch, fused: bool) -> DryRun:
    memory = add_up(watch.memory.changes)
    compiles = any(technique.phase == "compile" for technique in core.context.techniques)
    held = {id(p): p for part in core.parts for _, p in part.parameters()}
    return DryRun(
        rank=core.rank.number,
        world_size=core.rank.world_size,
        stages=tuple(part.stage for part in core.parts),
        parameters=sum(local.numel() for p in held.values() for local in locals_of(p)),
        steady=memory.steady,
        at_peak=memory.at_peak,
        peak=Peak(*memory.peak),
        host_bytes=memory.host,
        peak_by_component=memory.peak_by_component,
        timeline=memory.timeline,
        top_allocations=memory.top_allocations,
        collectives=_collectives(core, watch),
        flops={
            module: Flops(phases["forward"], phases["backward"], phases["recompute"])
            for module, phases in sorted(watch.flops.items())
        },
        notes=(*([_EAGER] if compiles else ()), *(() if fused else [_UNFUSED])),
    )


def _collectives(core: Core, watch: Watch) -> tuple[CollectiveCount, ...]:
    """With the mesh axes of each group."""
    axes_and_size = {name: (axes, group.size()) for name, (axes, group) in _groups(core).items()}
    found = [
        CollectiveCount(kind, *axes_and_size.get(name, (name, 0)), size, sent, count)
        for (kind, name, size, sent), count in watch.sent.items()
    ]
    return tuple(sorted(found, key=lambda c: (c.axes, c.kind, -c.bytes)))


def _group(core: Core, name: str) -> dist.ProcessGroup:
    groups = _groups(core)
    if name not in groups:
        why = f"a functional collective over the group {name}, which the mesh does not have; make it with Mesh.flat"
        raise PluginError(f"{why}, or give the collective a ProcessGroup")
    return groups[name][1]


def _groups(core: Core) -> dict[str, tuple[str, dist.ProcessGroup]]:
    """Name of each process group -> its axes, and the group."""
    assert dist.group.WORLD is not None
    groups = [("world", dist.group.WORLD), *core.context.mesh.groups()]
    return {group.group_name: (axes, group) for axes, group in groups}
