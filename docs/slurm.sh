#!/usr/bin/env bash
# Trains under Slurm and requeues the job until all steps are done:
#
#     sbatch docs/slurm.sh --config configs/llama7b.toml [--table.key value ...]
#
# Before the time limit, Slurm sends SIGUSR1 to the run. The run saves a checkpoint, ends with exit code 75 and requeues
# this job (of a job array, only this task). The requeued job resumes from the checkpoint.
# Adapt the lines below. Options on the sbatch command line override them: sbatch --nodes 8 docs/slurm.sh ...
#
#     scancel --signal=USR1 JOB    the same at any time: save a checkpoint and requeue
#     scancel JOB                  save and end; the job is not requeued (Slurm allows KillWait, often 30 s)
#
# scancel sends SIGTERM. Slurm also sends SIGTERM when it preempts the job:
# - With PreemptMode=REQUEUE, Slurm requeues the job itself.
# - With PreemptMode=CANCEL and a GraceTime, the run saves and is not requeued: submit the job again. With
#   PreemptParameters=send_user_signal, Slurm sends the signal of --signal instead, and the run requeues the job.

# Name of the job and its output file (%j: the job number, the same after each requeue).
#SBATCH --job-name=titan
#SBATCH --output=slurm-%j.out
# Each run of the job appends to this file. By default a requeued job overwrites it.
#SBATCH --open-mode=append

# One task per node: the launcher. It starts one rank per GPU of its node, or NPROC ranks.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive

# Time limit of one run. The job runs as many times as it needs.
#SBATCH --time=24:00:00
# SIGUSR1 to the job step (the processes of srun below) 300 s before the time limit. Reserve enough time for two steps
# and a save: at the time limit Slurm sends SIGTERM, and the job is not requeued.
# With "B:USR1" the signal would go to this shell, which does not forward it. Only a script without srun, which ends in
# "exec ./run_train.sh", needs "B:USR1" (and scancel --batch --signal=USR1).
#SBATCH --signal=USR1@300
# Slurm may requeue the job: when the run requests it, after a node failure, or after preemption (PreemptMode=REQUEUE).
#SBATCH --requeue

# How many times the launcher restarts the ranks of a failed run before the job fails.
export MAX_RESTARTS=${MAX_RESTARTS:-3}

# srun starts one launcher per node. Without srun, only this script would run, on the first node, and refuse to train.
# If the launcher of one node is lost, the other nodes cannot continue, so --kill-on-bad-exit ends them.
# Call sbatch from the folder of run_train.sh. The launcher requeues the job when the run ends with exit code 75.
exec srun --kill-on-bad-exit=1 ./run_train.sh "$@"
