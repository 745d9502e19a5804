"""What `titan train --help` prints. A light module: other commands, and a launcher, need no trainer for it."""

USAGE = """usage: ./run_train.sh [--config FILE] [--table.key VALUE ...]
       titan train   [--config FILE] [--table.key VALUE ...]
       --traceback shows stack traces of errors

Train a language model. Without --config: configs/quickstart.toml. Any key of the TOML can be given on the command line
(--train.steps 100, --mesh.tp 2, --plugins.bf16.enabled false); the command line overrides the file.

  titan config --config FILE            print the resolved job, with every default filled in
  titan plugins                         list models, techniques, datasets, optimizers, ... and their options

environment: NPROC or NPROC_PER_NODE (ranks on this node; default: its GPUs, else 1), NNODES, NODE_RANK, MASTER_ADDR,
MASTER_PORT, or Slurm's variables; MAX_RESTARTS (restarts of all ranks after a failure; default: 0); OMP_NUM_THREADS
(CPU threads per rank)

exit codes: 0 done, 1 failed, 2 wrong input, 75 preempted. A run is preempted by SIGTERM, SIGUSR1 or --run.max_minutes:
it saves a checkpoint and exits, and the same command resumes it. Under Slurm the job is requeued, except after SIGTERM,
which scancel sends.
"""
