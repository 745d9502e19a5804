#!/usr/bin/env bash
# Trains under Slurm, and comes back by itself until the job is done:
#
#     sbatch docs/slurm.sh --config configs/llama7b.toml [--table.key value ...]
#
# Slurm signals the run before its time is up, or when others need the nodes; the run saves its state, ends with exit
# code 75 and has Slurm queue this very job again; the new run goes on from the checkpoint. Adapt the lines below;
# sbatch's own options win over them: sbatch --nodes 8 docs/slurm.sh ...

# What the job shows up as, and where its output goes (%j: the number of the job, the same after each requeue).
#SBATCH --job-name=titan
#SBATCH --output=slurm-%j.out
# Each run of the job appends to that file; by default a requeued one would begin it anew.
#SBATCH --open-mode=append

# One task a node: it is the launcher, which starts a rank for each GPU of its node (or as many as NPROC says).
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive

# The longest one run may take; the job as a whole takes as many as it needs.
#SBATCH --time=24:00:00
# SIGUSR1 to the job's step, which is srun's processes below, 300 s before the time is up: enough for two steps and a
# save. With "B:USR1" it would go to this shell instead, which does not pass it on.
#SBATCH --signal=USR1@300
# Slurm may queue the job again: when the run asks for it, when a node has failed, or when others need the nodes.
#SBATCH --requeue

# A failed run starts its ranks again this often before the job fails.
export MAX_RESTARTS=${MAX_RESTARTS:-3}

# If the launcher of a node is gone, the others cannot go on: end them. run_train.sh lies where sbatch was called; it
# queues the job again when it ends with 75.
exec srun --kill-on-bad-exit=1 ./run_train.sh "$@"
