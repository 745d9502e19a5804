#!/usr/bin/env bash
# Trains under Slurm on AMD GPUs with a Slingshot network, as on Frontier: one task per GPU. docs/hpc.md says more.
# From the repository:
#
#     sbatch -A PROJECT configs/launch/slurm-amd.sh --config configs/gpt22b.toml [--table.key value ...]
#
# Like slurm-nvidia.sh, it requeues itself after SIGUSR1. MAX_RESTARTS is refused, as srun starts each rank.

#SBATCH --job-name=titan
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue

# Eight tasks per node, one for each GPU (GCD) of four MI250X. Seven cores each: Frontier reserves one of eight.
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
# Frontier: the rendezvous protocol that RCCL prefers on many nodes, with FI_CXI_RDZV_PROTO below.
##SBATCH --network=disable_rdzv_get
set -euo pipefail

# Modules of the site. Frontier's rccl-net-plugin (aws-ofi-rccl) comes after rocm. It sets NCCL_NET_PLUGIN and the
# variables for libfabric below; without a plugin, RCCL sends over TCP sockets.
#     module load PrgEnv-gnu/8.7.0 cpe/26.03 rocm/7.1.1 rccl-net-plugin craype-accel-amd-gfx90a
#     export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH
# With a plugin that you built, name its library instead:
#     export NCCL_NET_PLUGIN=/path/to/librccl-net.so

# Interfaces of Slingshot: for the bootstrap of RCCL, and for gloo, which carries little and needs one. Frontier's guide
# advises hsn0 alone for RCCL too where a job hangs.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-hsn0,hsn1,hsn2,hsn3}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-hsn0}

# The address of this node, which is the first of the job: its name may belong to another network.
MASTER_ADDR=${MASTER_ADDR:-$(hostname -i | cut -d' ' -f1)}
export MASTER_ADDR

# What Frontier's guide recommends for RCCL over libfabric.
export NCCL_CROSS_NIC=${NCCL_CROSS_NIC:-1}
export NCCL_NET_GDR_LEVEL=${NCCL_NET_GDR_LEVEL:-PHB}
export HSA_FORCE_FINE_GRAIN_PCIE=${HSA_FORCE_FINE_GRAIN_PCIE:-1}
export FI_MR_CACHE_MONITOR=${FI_MR_CACHE_MONITOR:-kdreg2}
export FI_CXI_DISABLE_HOST_REGISTER=${FI_CXI_DISABLE_HOST_REGISTER:-1}
export FI_CXI_DEFAULT_CQ_SIZE=${FI_CXI_DEFAULT_CQ_SIZE:-131072}
export FI_CXI_DEFAULT_TX_SIZE=${FI_CXI_DEFAULT_TX_SIZE:-2048}
export FI_CXI_RDZV_PROTO=${FI_CXI_RDZV_PROTO:-alt_read}
export FI_CXI_RDZV_EAGER_SIZE=${FI_CXI_RDZV_EAGER_SIZE:-0}
export FI_CXI_RDZV_THRESHOLD=${FI_CXI_RDZV_THRESHOLD:-0}
export FI_CXI_RDZV_GET_MIN=${FI_CXI_RDZV_GET_MIN:-0}
export FI_CXI_RX_MATCH_MODE=${FI_CXI_RX_MATCH_MODE:-hybrid}

# MIOpen keeps a database in the home folder, which fails on shared file systems. A folder on each node's own disk.
export MIOPEN_USER_DB_PATH=${MIOPEN_USER_DB_PATH:-/tmp/miopen-${SLURM_JOB_ID:-0}}
export MIOPEN_CUSTOM_CACHE_DIR=${MIOPEN_CUSTOM_CACHE_DIR:-$MIOPEN_USER_DB_PATH}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-7}}

# From 22.05 on, srun does not take --cpus-per-task from sbatch.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# Set up .venv once, here on the first node; tasks refuse to do so at once. TITAN_PYTHON names another Python, such as
# that of an environment on the nodes' own disks.
scripts/python.sh >/dev/null

# Each task sees the GPU that is closest to its cores, as device 0, and titan takes it as this rank's device. The other
# form is GPU_BINDING=--gpu-bind=none: each task sees all GPUs of its node, and rank N of the node takes device N,
# wherever its cores are. --gpus-per-task needs the number of tasks.
read -ra binding <<<"${GPU_BINDING:---gpus-per-task=1 --gpu-bind=closest}"
tasks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))

# Each task is a rank; ranks meet at the first node. The first rank asks for the requeue when it has ended, so the end
# of another one must not end it at once: --wait ends what is left 120 s later.
exec srun --ntasks="$tasks" --kill-on-bad-exit=0 --wait=120 "${binding[@]}" ./run_train.sh "$@"
