"""Job to Run: builds model, optimizer, data, trackers and checkpointer, and connects them."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
import torch

from titan import log
from titan.checkpoint import Checkpointer, rng_state, set_rng_state
from titan.checkpoint.disk.folder import complete, is_hf
from titan.checkpoint.ranks import Ranks
from titan.config import Job
from titan.config.changes import compare
from titan.contracts import BuildContext, Engine, ModelPart, NamedParameter, RunInfo, Technique
from titan.contracts.base.cost import PredictedStep
from titan.contracts.base.mesh import Mesh
from titan.contracts.plugin.conformance import answer, label
from titan.data.open import identify_tokenizer, open_data, open_loader
from titan.data.samples.loader import Loader
from titan.data.samples.samples import Samples
from titan.data.tokens.identity import Identity
from titan.errors import CheckpointError, ConfigError, PluginError, by_errno
from titan.layers.experts import SideLoss
from titan.machine import keep_freed_memory, stay_near
from titan.paths import told
from titan.ranks.folder_lock import FolderLock
from titan.ranks.process import Rank
from titan.ranks.turns import from_first, together
from titan.training import phases
from titan.training.engine import StepLoss, Strict
from titan.training.gradients import Counts, NonfiniteGuard
from titan.training.init import name_seed
from titan.training.metrics import Measures, Meter, Trackers
from titan.training.pace import OwnPace, Together
from titan.weights.load import check_tokenizer, find_weights, load_weights, other_tokenizer, stored_rest


@dataclass(kw_only=True)
class Core:
    """Everything a step needs, wired. `step` and `tokens` count what is done, over all ranks and earlier processes."""

    job: Job
    rank: Rank
    context: BuildContext
    engine: Engine
    optimizer: torch.optim.Optimizer
    loss: StepLoss
    guard: NonfiniteGuard
    measures: Measures
    step: int = 0
    tokens: int = 0

    @property
    def parts(self) -> Sequence[ModelPart]:
        """The model parts of this rank, in stage order."""
        return self.engine.parts


@dataclass(kw_only=True)
class Run(Core):
    """A step's needs, and what hangs on a run of them."""

    loader: Loader
    trackers: Trackers
    meter: Meter
    checkpointer: Checkpointer | None
    lock: FolderLock
    validation_samples: Samples | None
    tokenizer: Identity
    pace: Together
    dropped: int = 0
    saved: int = 0
    validation_loss: float | None = None

    def techniques_state(self) -> dict[str, object]:
        """What each technique returns as its state, by name."""
        return {technique.name: technique.state_dict() for technique in self.context.techniques}

    def rest(self) -> dict[str, object]:
        """What a checkpoint holds beside weights and optimizer state; DivergedError where nothing is to be saved."""
        return {
            "config": self.job.table,
            "step": self.step,
            "tokens": self.tokens,
            **self.guard.check()._asdict(),
            "data": self.loader.state_dict(),
            "tokenizer": self.tokenizer,
            "techniques": self.techniques_state(),
            "rng": rng_state(self.rank.device),
        }


def build(job: Job, rank: Rank, predict: Callable[[str], PredictedStep | None] | None = None) -> Run:
    """Wire the run of a job on this rank; goes on from a checkpoint where the job says so.

    The run's folder is held from before anything is written there until `trainer.close`.

    predict: for techniques that ask for it (`BuildContext.predict`).

    Raises:
        TitanError: data, checkpoint or plugin that cannot be used, or a folder that another run holds; on all ranks
            alike. Checkpoints and config.toml of the run are then as they were.
    """
    # Nothing of the host's draws from the default generators; what a plugin draws while it is built is seeded too.
    torch.manual_seed(name_seed(job.run.seed, "default generators"))
    lock = FolderLock(job.folder)
    try:
        together(lambda: _open_folder(job, rank, lock), rank, job.comm.init_timeout_s)
        return _built(job, rank, lock, predict)
    except BaseException:
        lock.release()
        raise


def _built(job: Job, rank: Rank, lock: FolderLock, predict: Callable[[str], PredictedStep | None] | None) -> Run:
    limit_s = job.comm.init_timeout_s
    # Both before hours of tokenizing: the files of the tokenizer may change, and another one is refused.
    tokenizer, copies = identify_tokenizer(job, rank)
    from_first(lambda: _check_tokenizer(job), rank)
    samples, validation_samples = open_data(job, rank)
    stay_near(rank.device)  # not before: tokenizing uses all cores
    core = wire(job, rank)
    context = core.context
    context.predict = predict or context.predict
    checkpointer, rest = _restore(core, samples.fingerprint, copies, lock)
    step = int(rest.get("step", 0))
    for technique in context.techniques:
        technique.load_state_dict(rest.get("techniques", {}).get(technique.name, {}))
    before = Counts(*(int(rest.get(name, 0)) for name in Counts._fields))
    core.guard = _guard(job, before, context.mesh, fresh=not core.optimizer.state)
    core.engine = Strict(core.engine, rank.device)
    core.step, core.tokens = step, int(rest.get("tokens", 0))
    loader = open_loader(job, rank, samples, first=int(rest.get("data", {}).get("samples", 0)))
    trackers = Trackers(job.trackers if rank.number == 0 else ())
    info = RunInfo(
        folder=job.folder, name=job.run.name, config=job.table, start_step=step, steps=job.train.steps,
        params=context.spec.params, every=job.metrics.every, measures=core.measures.names,
    )  # fmt: skip
    together(lambda: _begin(job, rank, trackers, info), rank, limit_s)
    meter = Meter(context.spec, job.data.seq_len, rank.world_size, rank.device, job.metrics.peak_tflops)
    pace = (OwnPace if job.keeps_own_pace else Together)(context, meter, checkpointer)
    if "rng" in rest:
        set_rng_state(rest["rng"], rank.device)
    keep_freed_memory(rank.device)  # not before: what tokenizing and loading took for a while is given back
    return Run(
        **vars(core),
        loader=loader,
        trackers=trackers,
        meter=meter,
        checkpointer=checkpointer,
        lock=lock,
        validation_samples=validation_samples,
        tokenizer=tokenizer,
        pace=pace,
        dropped=before.dropped,
        saved=step,
    )


def wire(
    job: Job, rank: Rank, materialise: Callable[[Sequence[ModelPart], BuildContext], None] = phases.materialise
) -> Core:
    """What the steps of a new run need, from the job alone: no data, no checkpoint, no file."""
    context = context_of(job, rank)
    engine = phases.assemble(context, materialise)
    parts = engine.parts
    named = named_parameters(parts, context)
    optimizer = job.optimizer.build(named)
    for technique in phases.wrapping(context.techniques):
        optimizer = _wrapped(technique, optimizer, named)
    loss = StepLoss(job.loss, rank.device, context.techniques)
    loss.end(parts, context.spec)
    for module in (module for part in parts for module in part.module.modules()):
        if isinstance(module, SideLoss):
            module.share /= job.train.global_batch_size // job.layout.workers
            module.scaled = loss.scaled
    return Core(
        job=job, rank=rank, context=context, engine=engine, optimizer=optimizer, loss=loss,
        guard=_guard(job, Counts(), context.mesh), measures=Measures(job, parts, context.mesh),
    )  # fmt: skip


def _wrapped(
    technique: Technique, inner: torch.optim.Optimizer, named: Sequence[NamedParameter]
) -> torch.optim.Optimizer:
    optimizer = answer(technique, "optimizer", torch.optim.Optimizer, inner, named)
    if optimizer is not inner and "wraps_optimizer" not in technique.facts():
        raise PluginError(
            f'{label(type(technique))}: optimizer() returned another one, but facts() does not state "wraps_optimizer"'
        )
    if hasattr(inner, "eval") and not hasattr(optimizer, "eval"):
        raise PluginError(
            f"{label(type(technique))}: optimizer() returned one without eval() and train(), by which "
            f"{type(inner).__name__} puts weights to use into the parameters; pass them on, or use another optimizer"
        )
    return optimizer


def _guard(job: Job, before: Counts, mesh: Mesh, *, fresh: bool = True) -> NonfiniteGuard:
    limit = job.train.non_finite_limit if job.train.non_finite == "skip" else 1
    known, made = job.stating("scales_loss"), job.stating("updates_in_backward")
    return NonfiniteGuard(limit, before, mesh, fresh=fresh, known=known, made=made)


def _open_folder(job: Job, rank: Rank, lock: FolderLock) -> None:
    """Take the run's folder on rank 0, whose turn is first, and write there only then: to each rank's log.

    A run replaces its config.toml, beside which it has logs and checkpoints; without them it is a file of the user's.
    """
    config, logs, checkpoints = (job.folder / name for name in ("config.toml", "logs", "checkpoints"))
    with _writing(job.folder):
        if rank.number == 0:
            if config.exists() and not (logs.exists() or checkpoints.exists()):
                what = "holds a config.toml and is not the folder of a run; set another --run.name than"
                raise ConfigError(f"{job.folder} {what} {job.folder.name}")
            lock.take()
            if os.path.lexists(checkpoints) and not checkpoints.is_dir():  # not found out at the first save
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(checkpoints))
        log.set_up(rank.number, logs)


def _begin(job: Job, rank: Rank, trackers: Trackers, info: RunInfo) -> None:
    """The last that can be refused, and then the resolved job: it stands there for a run that has begun."""
    trackers.start(info)
    if rank.number == 0:
        path = job.folder / "config.toml"
        fresh = path.with_name(f"{path.name}.tmp")
        with _writing(job.folder):
            with fresh.open("w", encoding="utf-8") as file:
                tomlkit.dump(job.table, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise by_errno(error, ConfigError(f"[run] dir cannot be written: {told(error, folder)}")) from None


def context_of(job: Job, rank: Rank) -> BuildContext:
    """What techniques may know on this rank, before there is a model."""
    owned = [axis.name for technique in job.techniques for axis in technique.axes]
    mesh = Mesh(job.layout, rank.device, rank.number, keep=owned)
    return BuildContext(job=job, mesh=mesh, spec=job.spec, precision=job.precision, techniques=job.techniques)


def named_parameters(parts: Sequence[ModelPart], context: BuildContext) -> list[NamedParameter]:
    """Trainable parameters of this rank, with what the spec says of them."""
    spec = context.spec
    return [
        NamedParameter(name, p, spec.parameter(name, p.ndim).kind, spec.decays(name, p.ndim))
        for part in parts
        for name, p in part.parameters()
    ]


def _check_tokenizer(job: Job) -> None:
    """Hold the tokenizer against that of the weights which the run will most likely begin with; on rank 0."""
    section = job.checkpoint
    if section.enabled and section.goes_on and (checkpoints := complete(job.folder / "checkpoints")):
        with suppress(CheckpointError):  # of a damaged one: an older one is looked at when it is resumed
            check_tokenizer(checkpoints[-1], job.tokenizer, change=section.change_tokenizer)
    elif section.init_from:
        path = find_weights(section.init_from, "checkpoint.init_from")
        check_tokenizer(path, job.tokenizer, change=section.change_tokenizer)


def _restore(
    core: Core, fingerprint: str, copies: Mapping[str, bytes], lock: FolderLock
) -> tuple[Checkpointer | None, dict[str, Any]]:
    """The checkpointer, and what a checkpoint held beside weights and optimizer state (nothing for a new run)."""
    job, rank, parts, section = core.job, core.rank, core.parts, core.job.checkpoint
    if not section.enabled:
        log.log.info(f"weights: {_first_weights(job, rank, parts)}; checkpoints are off")
        return None, {}
    checkpointer = Checkpointer(
        job.folder / "checkpoints", keep=section.keep_latest, asynchronous=section.asynchronous, rank=rank.number,
        world_size=rank.world_size, timeout_s=job.comm.checkpoint_timeout_s, held=lock.check,
        mesh=core.context.mesh, copies=copies,
    )  # fmt: skip
    if core.context.mesh.spared:
        checkpointer.connect()
    path = checkpointer.find(section.resume)
    if path is None:
        log.log.info(f"weights: {_first_weights(job, rank, parts)}")
        return checkpointer, {}
    other = from_first(lambda: other_tokenizer(path, job.tokenizer), rank)
    changes = compare(stored_rest(path), job.table, fingerprint, other)
    states = {technique.name: state_now(technique) for technique in core.context.techniques}
    rest = checkpointer.load(path, parts, core.optimizer, states, changes.updates)
    if hasattr(core.optimizer, "train"):
        core.optimizer.train()
    unused = "; checkpoint.init_from is ignored, because the run has a checkpoint" if section.init_from else ""
    log.log.info(f"weights: from {path}, step {rest.get('step', 0)}{unused}")
    for sentence in changes.said:
        log.log.info(f"changed: {sentence}")
    return checkpointer, {**rest, "data": {}} if changes.other_samples else rest


def state_now(technique: Technique) -> dict[str, Any]:
    """What a technique holds before it is given anything: it names the tensors that this rank is to get back."""
    try:
        return technique.state_dict()
    except Exception as error:
        what = "is called once before load_state_dict(), on a new technique; return an empty table while there is none"
        raise PluginError(f"{label(type(technique))}: state_dict() raised {error!r}; it {what}") from error


def _first_weights(job: Job, rank: Rank, parts: Sequence[ModelPart]) -> str:
    """Give a new run the weights it is to start from; says where they are from. Drawn ones it has already."""
    given = job.checkpoint.init_from
    if not given:
        return f"new, seed {job.run.seed}"
    ranks = Ranks(rank.number, rank.world_size)
    path = ranks.first(lambda: find_weights(given, "checkpoint.init_from"))
    load_weights(path, job.model, parts, ranks)
    return f"from {'HF folder' if is_hf(path) else 'checkpoint'} {path}"
