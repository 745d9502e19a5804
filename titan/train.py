"""The main job on one rank: `python -m titan.train --config F [--table.key value ...]`, alone or under torchrun."""

import sys
import traceback
from collections.abc import Sequence

from titan import build, log, ranks, sampling, trainer
from titan.config import Job, load_job, split_arguments
from titan.errors import EXIT_DONE, EXIT_FAILED, TitanError, report

USAGE = """usage: ./run_train.sh [--config FILE] [--table.key VALUE ...]
       titan train   [--config FILE] [--table.key VALUE ...]

Train a language model. Without --config: configs/quickstart.toml. Any key of the TOML can be given on the command line
(--train.steps 100, --mesh.tp 2, --plugins.bf16.enabled false); it wins over the file.

  titan config --config FILE            the resolved job, every default filled in
  titan plugins                         models, techniques, datasets, optimizers, ... and their options

environment: NPROC (ranks on this node; default: its GPUs, else 1), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, or
SLURM's variables; OMP_NUM_THREADS (threads a rank).   exit codes: 0 done, 1 failed, 2 wrong input
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if "-h" in words or "--help" in words:
        print(USAGE, end="")
        return EXIT_DONE
    rank = 0
    try:
        path, overrides = split_arguments(words)
        job = load_job(path, overrides, ranks.launched_world_size())
        me = ranks.join(job)
        rank = me.number
        log.set_up(rank)
        return _run(job, me)
    except TitanError as error:
        report(error, rank)
        return error.exit_code
    except KeyboardInterrupt:
        log.log.warning("interrupted")
        return EXIT_FAILED
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED
    finally:
        ranks.leave()


def _run(job: Job, me: ranks.Rank) -> int:
    run = build.build(job, me)
    _greet(run)
    trainer.train(run)
    if job.run.sample:
        text = sampling.continuation(run, job.run.sample)
        log.log.info(f"\nsample after step {run.step}:\n{job.run.sample}{text}\n")
    _part(run)
    return EXIT_DONE


def _greet(run: build.Run) -> None:
    job = run.job
    log.log.info(f"model: {job.model.name}, {run.world.plan.params:,} parameters; layout: {job.layout}")
    log.log.info(f"techniques: {', '.join(t.name for t in job.techniques) or 'none'}")
    log.log.info(
        f"batch: {job.train.global_batch_size} samples of {job.data.seq_len} tokens a step"
        f" = {job.micro_batch} x {job.micro_batches} micro batches x {job.batch_ranks} ranks"
    )
    described = job.optimizer.describe(build.named_parameters(run.parts, run.world))
    if described:
        log.log.info(f"optimizer: {described}")


def _part(run: build.Run) -> None:
    folder, job = run.job.folder, run.job
    log.log.info(f"run folder   {folder}")
    if run.checkpointer is not None:
        log.log.info(f"go on        the same command with --train.steps {2 * job.train.steps}")
    log.log.info(f"curves       tensorboard --logdir {folder.parent}")


if __name__ == "__main__":
    sys.exit(main())
