"""The training loop, and one optimizer step."""

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan import errors
from titan.contracts import Batch
from titan.contracts.tracker import annotated
from titan.layers.philox import row_seeds
from titan.log import log
from titan.ranks.failure import tell
from titan.ranks.meeting import signals
from titan.ranks.process import set_timeouts
from titan.training.build import Core, Run
from titan.training.engine import valid_tokens, weights_to_use
from titan.training.gradients import clip, clip_divisor, global_norm
from titan.training.metrics import of_workers
from titan.training.phases import cut, reducing
from titan.training.validation import validate


@dataclass(frozen=True)
class Stats:
    """What a step leaves behind, on the device: its loss, its gradient norm before clipping, and the rate it used."""

    loss: Tensor
    grad_norm: Tensor
    lr: float


def train(run: Run) -> str:
    """Train until the job's last step, or until the run is asked to stop; measure and save on the way.

    Returns what asked it to stop ("SIGTERM", ...; empty: nothing), on all ranks alike, also after the last step.
    """
    first, asked = run.step, ""
    gc.disable()  # each rank collecting at its own time makes stragglers; all do it together in `after_step`
    try:
        set_timeouts(run.context.mesh, run.job.comm.init_timeout_s)
        preemption = run.pace.begin(run.step)
        batches = iter(run.loader)
        while run.step < run.job.train.steps and not asked:
            preemption.ask(now=_pauses(run, run.step) or _pauses(run, run.step + 1))
            if (data := _next(run, batches)) is None:
                asked = signals.gravest()
                break
            micro_batches, waited = data
            run.context.in_step = True
            stats = step(run, micro_batches)
            run.context.in_step = False
            if run.step == first + 1:
                set_timeouts(run.context.mesh, run.job.comm.timeout_s)
                if run.checkpointer is not None:  # for the first time there is all the state that is to be saved
                    run.checkpointer.check(run.parts, run.optimizer, run.techniques_state())
            after_step(run, stats, waited)
            asked = preemption.due()
        asked_late = _finish(run)
        return asked or asked_late
    except Exception as error:
        tell(error, run.rank.number)
        _rescue(run, error)
        raise
    finally:
        gc.unfreeze()
        gc.enable()
        close(run)


def _next(run: Run, batches: Iterator[list[Batch]]) -> tuple[list[Batch], float] | None:
    """The micro batches of the next step, and the seconds until they came; None where a signal did, on the only rank.

    PreemptedError is raised where nothing is to be saved, or on one of several ranks: the others are in the step.
    """
    began = time.perf_counter()
    try:
        with annotated("data"):
            return next(batches), time.perf_counter() - began
    except errors.PreemptedError as error:
        if run.rank.world_size == 1 and run.step > run.saved:
            return None
        stopped = f"{error}, before step {run.step + 1}"
        if not run.job.checkpoint.goes_on:
            raise errors.RankFailedError(stopped) from None
        stop = errors.PreemptedError(f"{stopped}; to resume from the newest checkpoint, run the same command")
        if run.rank.world_size > 1:
            stop.exit_code = errors.EXIT_FAILED  # of this rank: the launcher ends the others, and the run as preempted
        raise stop from None


def _finish(run: Run) -> str:
    """After the last step, on all ranks together: save; returns what has asked to stop by then."""
    run.pace.meet(run.step)
    save(run)
    if run.checkpointer is not None:
        run.checkpointer.wait()
    return run.pace.ended()


def step(run: Core, batches: list[Batch]) -> Stats:
    """Forward and backward of the micro batches, clip, update."""
    consumed = sum(batch.tokens.numel() for batch in batches) * run.job.batch_ranks
    assert consumed == run.job.tokens_per_step, f"a step consumed {consumed} tokens, not {run.job.tokens_per_step}"
    techniques, mesh = run.context.techniques, run.context.mesh
    batches = [cut(_seeded(batch, run), run.context) for batch in batches]
    lr = _set_rates(run)
    for technique in techniques:
        technique.before_step(run.step + 1)
    valid = mesh.sum(valid_tokens(batches), "dealt", "sliced")
    run.loss.begin(valid)
    with annotated("forward and backward"):
        run.engine.forward_backward(batches)
    with annotated("gradients"):
        for technique in reducing(techniques):
            technique.after_backward()
    expected = [scale > 1 for scale in run.loss.scales]
    loss, norm = run.guard.look(run.step + 1, run.loss.reported, global_norm(run.parts, mesh), expected)
    run.guard.count(valid)
    if limit := run.job.train.grad_clip:
        # An update that reads all gradients anyway divides them too, where nobody sees them before.
        if getattr(run.optimizer, "_step_supports_amp_scaling", False) and not run.job.clips_apart:
            run.optimizer.grad_scale = clip_divisor(norm, limit)  # type: ignore[attr-defined]
        else:
            clip(run.parts, norm, limit)
    updated = run.guard.updates
    for technique in techniques:
        technique.before_update(torch.where(updated, norm, torch.nan))
    with annotated("optimizer"):
        run.guard.update(run.optimizer)
    run.optimizer.zero_grad()
    run.step += 1
    run.tokens += _tokens(run)
    for part in run.parts:
        run.job.model.after_step(part.module, lambda tensor: mesh.sum(tensor, "dealt", "sliced"), updated)
    for technique in techniques:
        technique.after_step(run.step, updated)
    return Stats(loss, norm, lr)


def _seeded(batch: Batch, run: Core) -> Batch:
    if not run.context.spec.draws:
        return batch
    assert batch.samples is not None, "a micro batch of training has no sample numbers"
    return replace(batch, seeds=row_seeds(run.step + 1, batch.samples))


def _tokens(run: Core) -> int:
    return run.job.tokens_per_step // run.job.layout.workers * run.context.mesh.workers


def _set_rates(run: Core) -> float:
    """Give the optimizer's groups the rates of the step that begins; returns the largest."""
    factor = run.job.lr_schedule.factor(run.step + 1, run.job.train.steps)
    for group in run.optimizer.param_groups:
        group.setdefault("peak_lr", group["lr"])
        group["lr"] = group["peak_lr"] * factor
    return max(float(group["lr"]) for group in run.optimizer.param_groups)


def after_step(run: Run, stats: Stats, waited: float) -> None:
    """What hangs on a step; FolderError where the folder is no longer this run's, on rank 0."""
    run.lock.check_known()
    run.meter.add(_tokens(run), waited)
    run.trackers.progress(run.step)
    if run.step % run.job.metrics.every == 0 or run.step in (1, run.job.train.steps):
        _log(run, stats)
    if _pauses(run, run.step):
        run.pace.meet(run.step)
    if _validates(run, run.step):
        with run.meter.beside("validation"):
            validate(run)
    if run.step % run.job.train.gc_every == 0:
        with run.meter.beside("gc"):
            collect_garbage()
    if _saves(run, run.step):
        save(run)


def _validates(run: Run, step: int) -> bool:
    return run.validation_samples is not None and (step % run.job.validation.every == 0 or step == run.job.train.steps)


def _saves(run: Run, step: int) -> bool:
    return run.checkpointer is not None and step % run.job.checkpoint.every == 0


def _pauses(run: Run, step: int) -> bool:
    """Whether a step ends with work of its own length. A signal may come during it, and before it costs nothing."""
    return _validates(run, step) or _saves(run, step)


def collect_garbage() -> None:
    """All objects the first time; what is left then is never looked at again: it would cost each collection 0.15 s.

    It lives as long as the run: 380,000 objects of torch, DTensor and a compiler on a CPU.
    """
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()
    else:
        gc.collect(1)


def _log(run: Run, stats: Stats) -> None:
    mesh = run.context.mesh
    workers = mesh.of_workers(torch.stack([stats.loss, stats.grad_norm]).double())
    loss, norm, *measured = torch.cat([workers.mean(0), run.measures.joined()]).tolist()
    (dropped, valid), failure = run.guard.read()
    row = run.meter.row(run.step, loss, norm, stats.lr, run.tokens, valid)
    each = of_workers("" if mesh.apart else mesh.layout.worker_axis, workers.tolist())
    run.trackers.log({**row, "skipped_updates": dropped, **each, **run.measures.row(measured)})
    if failure is not None:
        raise failure
    if dropped > run.dropped:
        log.warning(f"step {run.step}: NaN or inf, {dropped - run.dropped} updates skipped, {dropped} in total")
        run.dropped = dropped


def save(run: Run) -> None:
    """Save the state after this step, once."""
    if run.checkpointer is not None and run.saved != run.step:
        with run.meter.beside("save"), weights_to_use(run.optimizer):
            run.checkpointer.save(run.step, run.parts, run.optimizer, run.rest())
            run.pace.saved()
        run.saved = run.step


def _rescue(run: Run, error: Exception) -> None:
    """Before an error ends the run, save what the last finished step has left, where that is safe.

    A save is the work of all ranks, and others may be in the next step's collectives by now. An error in the middle of
    a step leaves a state that is neither step's; one of a save or of a plugin would come again.
    """
    foreseen = isinstance(error, (errors.DivergedError, errors.CheckpointError, errors.FolderError, errors.PluginError))
    if run.rank.world_size > 1 or run.context.in_step or foreseen or run.checkpointer is None:
        return
    try:
        save(run)
        run.checkpointer.wait()
    except Exception as another:
        log.error(f"the checkpoint of step {run.step} could not be saved before the run ends: {another}")


def close(run: Run) -> None:
    """Let go of everything, in reverse order of making, and of the run's folder last."""
    with ExitStack() as closing:
        closing.callback(run.lock.release)
        for owner in (run.trackers, run.checkpointer, *run.context.techniques, run.loader):
            if owner is not None:
                closing.callback(owner.close)
