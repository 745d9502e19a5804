"""Job to Run: all wiring, one line a part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
import torch
import torch.distributed as dist

from titan import log, phases
from titan.checkpoint import Checkpointer, rng_state, set_rng_state
from titan.config import Job
from titan.contracts import Engine, NamedParameter, Part, Precision, RunInfo, World
from titan.data.loader import Loader
from titan.data.prepare import prepare
from titan.data.samples import Samples
from titan.engine import Direct, StepLoss
from titan.errors import ConfigError, Fault, TitanError
from titan.mesh import Mesh
from titan.metrics import Meter, Trackers
from titan.plan import glob_matches
from titan.ranks import Rank

T = TypeVar("T")


@dataclass
class Run:
    """Everything a step needs, wired. `step` and `tokens` count what is done, over all ranks and earlier processes."""

    job: Job
    rank: Rank
    world: World
    parts: Sequence[Part]
    engine: Engine
    optimizer: torch.optim.Optimizer
    loss: StepLoss
    loader: Loader
    trackers: Trackers
    meter: Meter
    checkpointer: Checkpointer | None
    step: int = 0
    tokens: int = 0
    saved: int = field(default=0)

    def rest(self) -> dict[str, object]:
        """What a checkpoint holds beside weights and optimizer state."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "data": self.loader.state_dict(),
            "techniques": {technique.name: technique.state_dict() for technique in self.world.techniques},
            "rng": rng_state(self.rank.device),
        }


def build(job: Job, rank: Rank) -> Run:
    """Wire the run of a job on this rank; goes on from a checkpoint where the job says so.

    Raises:
        TitanError: data, checkpoint or plugin that cannot be used; on all ranks alike.
    """
    _open_folder(job, rank)
    samples = together(lambda: open_samples(job, rank), rank)
    world = _world(job, rank)
    parts = phases.assemble(world)
    engine = next((e for t in world.techniques if (e := t.engine(parts, world)) is not None), None)
    optimizer = job.optimizer.build(named_parameters(parts, world))
    checkpointer, rest = _restore(job, rank, parts, optimizer)
    step, first = int(rest.get("step", 0)), int(rest.get("data", {}).get("samples", 0))
    for technique in world.techniques:
        technique.load_state_dict(rest.get("techniques", {}).get(technique.name, {}))
    loader = Loader(
        samples, global_batch=job.train.global_batch_size, micro_batch=job.micro_batch, first=first,
        index=job.layout.role_index(rank.number, "batch"), ranks=job.batch_ranks, workers=job.data.workers,
        device=rank.device,
    )  # fmt: skip
    trackers = Trackers(job.trackers if rank.number == 0 else ())
    trackers.start(_info(job, world, step))
    if "rng" in rest:
        set_rng_state(rest["rng"], rank.device)
    return Run(
        job=job, rank=rank, world=world, parts=parts, engine=engine or Direct(parts[0], world.techniques),
        optimizer=optimizer, loss=StepLoss(job.loss, rank.device), loader=loader, trackers=trackers,
        meter=Meter(world.plan, job.data.seq_len, rank.world_size, rank.device, job.metrics.peak_tflops),
        checkpointer=checkpointer, step=step, tokens=int(rest.get("tokens", 0)), saved=step,
    )  # fmt: skip


def _open_folder(job: Job, rank: Rank) -> None:
    try:
        log.set_up(rank.number, job.folder / "logs")
        if rank.number == 0:
            (job.folder / "config.toml").write_text(tomli_w.dumps(dict(job.table)), encoding="utf-8")
    except OSError as error:
        raise ConfigError([Fault("", f"[run] dir: cannot write to {job.folder}: {error.strerror}")]) from None


def together(work: Callable[[], T], rank: Rank) -> T:
    """Run `work` on rank 0, then on the first rank of each node, then on all, so that what one writes the next finds.

    Raises:
        TitanError: the one that the work raised on any rank, on all of them, so that nobody waits for ever.
    """
    result: list[T] = []
    for turn in range(3):
        mine = (rank.number == 0, rank.local == 0, True)[turn] and not result
        error: TitanError | None = None
        if mine:
            try:
                result.append(work())
            except TitanError as problem:
                error = problem
        errors: list[TitanError | None] = [None] * rank.world_size
        if rank.world_size > 1:
            dist.all_gather_object(errors, error)
        else:
            errors = [error]
        for problem_ in errors:
            if problem_ is not None:
                raise problem_
    return result[0]


def open_samples(job: Job, rank: Rank) -> Samples:
    """The samples of a job's sources, tokenised first where they are text.

    Raises:
        DataError: the text or the tokens cannot be used.
        ConfigError: the tokenizer has ids that the model has no row for.
    """
    if job.tokenizer.vocab_size > job.plan.vocab_size:
        sizes = f"the tokenizer has {job.tokenizer.vocab_size} ids, the model rows for {job.plan.vocab_size}"
        raise ConfigError([Fault("", f"[model] vocab_size: {sizes}; set it to at least {job.tokenizer.vocab_size}")])
    cache = Path(job.data.cache).expanduser()
    talks = rank.number == 0
    sources = [
        (
            prepare(source.plugin, job.tokenizer, cache=cache, workers=job.data.prepare_workers, progress=talks),
            source.weight,
        )
        for source in job.sources
    ]
    return Samples(
        sources, seq_len=job.data.seq_len, packing=job.data.packing, seed=job.run.seed, shuffle=job.data.shuffle,
        vocab_size=job.plan.vocab_size,
    )  # fmt: skip


def _world(job: Job, rank: Rank) -> World:
    precision = Precision()
    for technique in job.techniques:
        precision = technique.precision(precision)
    owned = [axis.name for technique in job.techniques for axis in technique.axes]
    mesh = Mesh(job.layout, rank.device, rank.number, keep=owned)
    return World(job=job, mesh=mesh, plan=job.plan, precision=precision, techniques=job.techniques)


def named_parameters(parts: Sequence[Part], world: World) -> list[NamedParameter]:
    """Trainable parameters of this rank, with what the plan says of their decay."""

    def decays(name: str) -> bool:
        return not any(glob_matches(pattern, name) for pattern in world.plan.no_decay)

    return [NamedParameter(name, p, decays(name)) for part in parts for name, p in part.parameters()]


def _restore(
    job: Job, rank: Rank, parts: Sequence[Part], optimizer: torch.optim.Optimizer
) -> tuple[Checkpointer | None, dict[str, Any]]:
    """The checkpointer, and what a checkpoint held beside weights and optimizer state (nothing for a new run)."""
    if not job.checkpoint.enabled:
        log.log.info(f"weights: new, seed {job.run.seed}; checkpoints are off")
        return None, {}
    section = job.checkpoint
    checkpointer = Checkpointer(
        job.folder / "checkpoints", keep=section.keep, asynchronous=section.asynchronous, rank=rank.number,
        world_size=rank.world_size,
    )  # fmt: skip
    path = checkpointer.find(section.resume)
    if path is None:
        log.log.info(f"weights: new, seed {job.run.seed}")
        return checkpointer, {}
    rest = checkpointer.load(path, parts, optimizer)
    log.log.info(f"weights: from {path}, step {rest.get('step', 0)}")
    return checkpointer, rest


def _info(job: Job, world: World, step: int) -> RunInfo:
    return RunInfo(
        folder=job.folder, name=job.run.name, config=job.table, start_step=step, steps=job.train.steps,
        params=world.plan.params, every=job.metrics.every,
    )  # fmt: skip
