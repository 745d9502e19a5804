"""The main job on one rank: `python -m titan.train --config F [--table.key value ...]`, alone or under torchrun."""

import shlex
import sys
from collections.abc import Sequence
from functools import partial

from titan import log
from titan.checkpoint.disk.folder import complete, step_folder
from titan.config import load_job, said_of, split_arguments, without_effect
from titan.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, PreemptedError
from titan.packages import check_torch, program, trainer_api, untried_torch
from titan.ranks import process, watchdog
from titan.ranks.meeting import signals
from titan.ranks.meeting.launch_env import launched_world_size
from titan.terminal import stand_in_for_closed, take_traceback_flag
from titan.training import build, foresight, trainer, validation
from titan.training.engine import weights_to_use
from titan.usage import USAGE

_inference = trainer_api("titan.inference")  # before ranks are forked, and not when all is done


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code."""
    stand_in_for_closed()
    words = take_traceback_flag(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        print(USAGE, end="")
        return EXIT_DONE
    watchdog.answer_to_quit()
    with signals.listening():
        return process.run_as_rank(partial(_train, words))


def _train(words: list[str], rank: int) -> int:
    with signals.raised("before training began"):
        run = _built(words, rank)
    return _run(run)


def _built(words: list[str], rank: int) -> build.Run:
    check_torch()
    path, overrides = split_arguments(words)
    job = load_job(path, overrides, launched_world_size())
    me = process.join(job)
    log.set_up(rank)
    for sentence in said_of(path, overrides):
        log.log.info(sentence)
    if job.run.sample_prompt and _inference is None:
        log.log.warning("titan.inference is not installed, which would continue run.sample_prompt; install titan again")
    job = foresight.settled(job, me)
    run = build.build(job, me, foresight.predictor(job, me))
    try:
        signals.check()
    except PreemptedError:
        trainer.close(run)
        raise
    return run


def _run(run: build.Run) -> int:
    job = run.job
    _greet(run)
    first, asked = run.step, trainer.train(run)
    if run.step < job.train.steps:
        return _end_early(run, asked)
    if first == run.step:
        what = f"nothing is left to do: the run is at step {first}, and train.steps = {job.train.steps}"
        log.log.info(f"{what}; to train on, set train.steps above {first}")
    elif job.run.sample_prompt and not asked and _inference:
        with weights_to_use(run.optimizer):
            text = _inference.sample(run.context, run.engine, job.run.sample_prompt, job.run.seed)
        log.log.info(f"\nsample after step {run.step}:\n{job.run.sample_prompt}{text}\n")
    _part(run)
    return EXIT_DONE


def _end_early(run: build.Run, asked: str) -> int:
    """Report where a preempted run stopped; exit code 75 if the same command resumes it, else 1."""
    stopped = f"preempted by {asked} at step {run.step}"
    if run.checkpointer is None:
        log.log.error(f"{stopped}; nothing was saved, because [checkpoint] enabled = false")
        return EXIT_FAILED
    saved = f"{stopped}: checkpoint saved to {step_folder(run.checkpointer.folder, run.step)}"
    if not run.job.checkpoint.goes_on:
        log.log.error(f"{saved}; to resume, run the same command with --checkpoint.resume auto")
        return EXIT_FAILED
    log.log.info(f"{saved}; to resume, run the same command")
    return EXIT_PREEMPTED


def _greet(run: build.Run) -> None:
    job, spec = run.job, run.context.spec
    active = f", {spec.active_params:,} active per token" if spec.active_params < spec.params else ""
    log.log.info(f"model: {job.model.name}, {spec.params:,} parameters{active}; layout: {job.layout}")
    log.log.info(f"techniques: {', '.join(t.name for t in job.techniques) or 'none'}")
    if remark := untried_torch():
        log.log.warning(remark)
    for sentence in without_effect(job):
        log.log.warning(sentence)
    log.log.info(
        f"batch: {job.train.global_batch_size} samples of {job.data.seq_len} tokens per step"
        f" = {job.micro_batch} x {job.micro_batches} micro batches x {job.batch_ranks} ranks"
    )
    workers = run.loader.workers
    processes = f"by {workers} {'process' if workers == 1 else 'processes'} per rank"
    log.log.info(f"data: loaded {processes if workers else 'in the training process'}")
    if described := job.optimizer.describe(build.named_parameters(run.parts, run.context)):
        log.log.info(f"optimizer: {described}")
    if recorder := watchdog.recorder():
        log.log.info(f"flight recorder: {recorder}")


def _part(run: build.Run) -> None:
    folder, job = run.job.folder, run.job
    log.log.info(f"run folder   {folder}")
    if run.validation_loss is not None:
        perplexity = validation.perplexity(run.validation_loss)
        on = f"{validation.samples_used(run)} samples of {job.validation_data.name if job.validation_data else ''}"
        log.log.info(f"validation   loss {run.validation_loss:.4f}, perplexity {perplexity:.4g} on {on}")
    if (folder / "tensorboard").is_dir():
        curves = [*program("tensorboard", "tensorboard.main"), "--logdir", str(folder.parent.resolve())]
        log.log.info(f"curves       {shlex.join(curves)}")
    if run.checkpointer is not None and complete(run.checkpointer.folder):
        branch = "" if job.checkpoint.goes_on else "--checkpoint.resume auto "
        log.log.info(f"resume       the same command with {branch}--train.steps {2 * run.step}")
        for what, command in (_inference.commands(job) if _inference else {}).items():
            log.log.info(f"{what:<12} {command}")


if __name__ == "__main__":
    sys.exit(main())
