#!/usr/bin/env bash
# Trains under Slurm in a container of Apptainer (or Singularity): one task per node. docs/hpc.md says more.
#
#     IMAGE=/shared/titan.sif sbatch configs/launch/slurm-apptainer.sh --config /shared/mine.toml [--table.key VALUE]
#
# titan is installed in the image: pip install /path/to/titan in %post, on top of an image with PyTorch for your GPUs.

#SBATCH --job-name=titan
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
set -euo pipefail

image=${IMAGE:?a SIF file with titan installed}
# Folders of the host that the run reads and writes, by the same names in the container: config, data, run, cache.
shared=${SHARED:-$PWD}
# --nv: GPUs and libraries of NVIDIA; --rocm: those of AMD.
gpus=${APPTAINER_GPUS:---nv}

[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export MAX_RESTARTS=${MAX_RESTARTS:-3}

# The container has no scontrol. What titan would ask it for, this script does: the first host of the job, and the
# requeue. Without SLURM_JOB_ID titan leaves the requeue alone.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 9000))}
cancelled=
trap 'cancelled=yes' TERM

# The first launcher that ends with 75 must not have srun end the others.
code=0
srun --kill-on-bad-exit=0 --wait=120 apptainer exec "$gpus" --bind "$shared" --pwd "$shared" "$image" \
    env -u SLURM_JOB_ID titan train "$@" || code=$?

# 75: preempted, and a checkpoint is saved. Slurm sends SIGTERM when the job is canceled.
if [ "$code" -eq 75 ] && [ -z "$cancelled" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
