#!/usr/bin/env bash
# Trains under Slurm, and comes back by itself until the job is done:
#
#     sbatch docs/slurm.sh --config configs/llama7b.toml [--table.key value ...]
#
# Before its time is up, Slurm sends the run SIGUSR1. The run saves its state, ends with exit code 75 and has Slurm queue
# this very job again (of an array, this task alone). The new run goes on from the checkpoint. Adapt the lines below;
# sbatch's own options win over them: sbatch --nodes 8 docs/slurm.sh ...
#
#     scancel --signal=USR1 JOB    the same at any time: save, and go back into the queue
#     scancel JOB                  save and end; the job is not queued again (Slurm allows it KillWait, often 30 s)
#
# scancel sends SIGTERM, and so does Slurm when it needs the nodes. With PreemptMode=REQUEUE, Slurm queues the job again
# itself. With PreemptMode=CANCEL and a GraceTime, the run saves and is not queued again, unless your Slurm has
# PreemptParameters=send_user_signal, which sends the signal of --signal instead; else submit the job again.

# What the job shows up as, and where its output goes (%j: the number of the job, the same after each requeue).
#SBATCH --job-name=titan
#SBATCH --output=slurm-%j.out
# Each run of the job appends to that file; by default a requeued one would begin it anew.
#SBATCH --open-mode=append

# One task per node: it is the launcher, which starts a rank for each GPU of its node (or as many as NPROC says).
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive

# The longest one run may take; the job as a whole takes as many as it needs.
#SBATCH --time=24:00:00
# SIGUSR1 to the job's step, which is srun's processes below, 300 s before the time is up. Leave enough for two steps and
# a save: when the time is up, SIGTERM comes, and the job is not queued again. With "B:USR1" the signal would go to this
# shell instead, which does not pass it on; only a script without srun, which ends in "exec ./run_train.sh", needs it
# (and scancel --batch --signal=USR1).
#SBATCH --signal=USR1@300
# Slurm may queue the job again: when the run asks for it, when a node has failed, or when others need the nodes
# (PreemptMode=REQUEUE).
#SBATCH --requeue

# A failed run starts its ranks again this often before the job fails.
export MAX_RESTARTS=${MAX_RESTARTS:-3}

# srun starts the launchers; without it, this script alone would run, on the first node, and refuse to train.
# If the launcher of a node is gone, the others cannot go on: end them. run_train.sh lies where sbatch was called; it
# queues the job again when it ends with 75.
exec srun --kill-on-bad-exit=1 ./run_train.sh "$@"
