#!/usr/bin/env bash
# Trains under Slurm on NVIDIA GPUs, one task per node, and requeues itself until the job is done. docs/hpc.md says
# more. From the repository:
#
#     sbatch configs/launch/slurm-nvidia.sh --config configs/llama7b.toml [--table.key value ...]
#
# Slurm sends the run SIGUSR1 before the time limit. The run saves a checkpoint, exits with code 75, and has Slurm
# requeue this job (of a job array, only this task). The requeued job resumes from its checkpoint. Adapt what follows.
# Options of sbatch override them: sbatch --nodes 8 configs/launch/slurm-nvidia.sh ...
#
#     scancel --signal=USR1 JOB    save now and requeue
#     scancel JOB                  save and end; the job is not requeued (the save must fit into KillWait, often 30 s)
#
# scancel sends SIGTERM, and so does Slurm when it preempts the job:
#     PreemptMode=REQUEUE                   Slurm requeues the job itself
#     PreemptMode=CANCEL with a GraceTime   the run saves and is not requeued: submit the job again. With
#                                           PreemptParameters=send_user_signal, Slurm sends the signal of --signal
#                                           instead, and the run requeues its job

# Name in the queue, and the file for the output (%j: the job id, which a requeue keeps).
#SBATCH --job-name=titan
#SBATCH --output=slurm-%j.out
# Append to that file after a requeue; by default Slurm would overwrite it.
#SBATCH --open-mode=append

# One task per node: the launcher, which starts one rank per GPU of its node (or NPROC ranks). All ranks see all GPUs of
# the node, as NCCL needs to find NVLink. --gpus-per-task=1 would hide them from each other.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive

# Time limit of one run. A job may need several runs, one per requeue.
#SBATCH --time=24:00:00
# SIGUSR1 to the job step (the processes of srun) 300 s before the time limit. Leave time for two steps and a save:
# at the limit, SIGTERM comes, and the job is not requeued. "B:USR1" would send the signal to this shell, which does not
# forward it. Only a script that ends in "exec ./run_train.sh", without srun, needs "B:USR1"
# (and scancel --batch --signal=USR1).
#SBATCH --signal=USR1@300
# Allow Slurm to requeue the job: on request of the run, after a node failure, or on preemption (PreemptMode=REQUEUE).
#SBATCH --requeue

set -euo pipefail

# How often a run restarts its ranks after a failure before the job fails.
export MAX_RESTARTS=${MAX_RESTARTS:-3}

# From 22.05 on, srun does not take --cpus-per-task from sbatch: a launcher and its ranks would share one core.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# Set up .venv once, here on the first node; the launchers of all nodes refuse to do so at once. TITAN_PYTHON names
# another Python.
scripts/python.sh >/dev/null

# srun starts one launcher per node. Without srun, this script would run on the first node only and refuse to train.
# --kill-on-bad-exit: if the launcher of one node is gone, end the launchers of the other nodes. sbatch must be called
# from the repository, where run_train.sh is; run_train.sh requeues the job when it exits with 75.
exec srun --kill-on-bad-exit=1 ./run_train.sh "$@"
