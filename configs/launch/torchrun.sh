#!/usr/bin/env bash
# Trains with torchrun on one node, or on several where each runs this command. docs/hpc.md says more.
#
#     NPROC=8 configs/launch/torchrun.sh --config configs/llama7b.toml [--table.key value ...]
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 NPROC=8 configs/launch/torchrun.sh --config ...  # on node0; 1 on node1
#
# Prefer ./run_train.sh, which takes the same variables: torchrun ends with 1 where the run ends with 2 or 75, and kills
# ranks 30 s after a signal, though their checkpoint may not be written.
set -euo pipefail

root=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
python=$("$root/scripts/python.sh")

# torchrun reads the PET_* variables; arguments win over them.
arguments=(--nproc-per-node "${NPROC:-gpu}" --nnodes "${NNODES:-1}")
if [ "${NNODES:-1}" = 1 ]; then
    arguments+=(--standalone) # a free port
else
    arguments+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
# By default SIGUSR1 kills torchrun, and its ranks go on as orphans.
arguments+=(--signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
# torchrun restarts its ranks after exit codes 2 and 75 too, which titan's own launcher does not.
arguments+=(--max-restarts "${MAX_RESTARTS:-0}")

# Nothing that lies in the working directory stands in for an installed package.
export PYTHONSAFEPATH=1
exec "$python" -P -m torch.distributed.run "${arguments[@]}" -m titan.train "$@"
