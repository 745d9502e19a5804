"""Nodes and ranks of a run, and this node's place among them, from the environment of the user or a scheduler."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from titan.errors import ConfigError

Environment = Mapping[str, str]

LOCAL = "127.0.0.1"
NODES = ("NNODES", "PET_NNODES", "SLURM_STEP_NUM_NODES")
NODE = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID")
HOST = ("MASTER_ADDR", "PET_MASTER_ADDR")
MEETING_PORT = ("MASTER_PORT", "PET_MASTER_PORT")
"""Each in order of precedence: the user's own, Kubeflow's (the arguments of torchrun), Slurm's."""

STARTED = "TITAN_STARTED"  # by which ranks know when the command was started, in seconds of the monotonic clock
SCONTROL_S = 60.0  # longest wait for scontrol, which asks nobody about a node list

SLURM_PORTS = range(20000, 29000)  # a Slurm job meets at one by its number: jobs that share a node do not clash
STEP_TASKS = "SLURM_STEP_NUM_TASKS"
"""srun sets it. A batch script has SLURM_NNODES, SLURM_NTASKS and SLURM_PROCID too, and is alone."""


@dataclass(frozen=True)
class LaunchEnv:
    """This node among the nodes of a run, the ranks that each node starts, and where all ranks meet."""

    nodes: int
    node: int
    ranks: int
    host: str
    port: int

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes together."""
        return self.nodes * self.ranks

    def environment(self, local_rank: int) -> dict[str, str]:
        """What a rank of this node finds in its environment; the names are torchrun's."""
        number = self.node * self.ranks + local_rank
        return _variables(number, local_rank, self.world_size, self.ranks, self.host, self.port)


def find_place(env: Environment) -> LaunchEnv:
    """Read where to run from NPROC, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, or from a step of Slurm's, or from
    the PET_* variables of a pod of Kubeflow's. The port is 0 on a single node: nobody needs it before the ranks start.

    ConfigError: a variable is no number, out of range, or missing; or Slurm holds nodes or tasks for this job on which
    nobody has started anything.
    """
    env = _own(env)
    _refuse_to_be_alone(env)
    nodes = _number(env, NODES, 1, at_least=1)
    pod = env.get("PET_NPROC_PER_NODE", "")  # of a PyTorchJob: "auto" (the default), "gpu", "cpu" or a number
    of_pod = int(pod) if pod.isdecimal() else 0
    ranks = _number(env, ("NPROC", "NPROC_PER_NODE"), 0, at_least=1) or of_pod or max(1, gpus())
    if nodes == 1:
        return LaunchEnv(1, 0, ranks, LOCAL, 0)
    node = _number(env, NODE, -1, at_least=0)
    if node < 0:
        raise ConfigError(f"NODE_RANK is not set; with NNODES = {nodes} it must be 0 to {nodes - 1}", "environment")
    if node >= nodes:
        raise ConfigError(f"NODE_RANK = {node}: must be below NNODES = {nodes}", "environment")
    return LaunchEnv(nodes, node, ranks, *_meeting_point(env))


def rank_environment(env: Environment) -> dict[str, str] | None:
    """What this process lacks to be a rank, when torchrun or `srun` started one process per rank; None when not so.

    NPROC asks this process to start ranks, also as one of many tasks of `srun`.

    ConfigError: Slurm does not say where the ranks meet, or nobody is there to start them again; or RANK may be the
    number of a node.
    """
    if "RANK" in env and "WORLD_SIZE" in env and not _rank_is_of_node(env):
        if _number(env, ("RANK",), 0, at_least=0) >= (size := _number(env, ("WORLD_SIZE",), 1, at_least=1)):
            raise ConfigError(f"RANK = {env['RANK']}: must be below WORLD_SIZE = {size}", "environment")
        _refuse_doubt(env)
        _refuse_restarts(env, "RANK is set, so titan does not start the ranks; use --max-restarts of torchrun")
        host = env.get("MASTER_ADDR", "")
        return {} if plain_host(host) == host else {"MASTER_ADDR": plain_host(host)}
    env = _own(env)
    nodes = _number(env, NODES, 1, at_least=1)
    tasks = _number(env, (STEP_TASKS,), 1, at_least=1)
    if ranks_asked_for(env) or tasks <= nodes:
        return None
    _refuse_restarts(env, "Slurm starts each rank; use --ntasks-per-node 1, so that titan starts them")
    host, port = _meeting_point(env)
    return _variables(env["SLURM_PROCID"], env.get("SLURM_LOCALID", "0"), tasks, -(-tasks // nodes), host, port)


def _variables(*values: int | str) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: str(value) for name, value in zip(names, values, strict=True)}


def launched_world_size() -> int:
    """Ranks this process was launched among, from the launcher's environment; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def drop_rank_variables(env: MutableMapping[str, str]) -> None:
    """Drop the variables of a rank, in a process that is none or the only one: they may be those of its node."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)


def ranks_asked_for(env: Environment) -> int:
    """Ranks that NPROC asks this process to start on its node, also where it need not start any; 0: not set.
    NPROC_PER_NODE, which cluster profiles export for torchrun, asks for nothing: it is the number of ranks where this
    process starts ranks anyway and NPROC is not set. ConfigError: it is no number of ranks."""
    return _number(env, ("NPROC",), 0, at_least=1)


def max_restarts(env: Environment) -> int:
    """MAX_RESTARTS: how often the ranks of a failed run are started again; ConfigError: it is no number."""
    return _number(env, ("MAX_RESTARTS",), 0, at_least=0)


def _number(env: Environment, names: Sequence[str], default: int, *, at_least: int) -> int:
    """The first of these variables that is set, or the default."""
    name = next(filter(env.get, names), None)
    if name is None:
        return default
    if not env[name].isdecimal() or int(env[name]) < at_least:
        raise ConfigError(f"{name} = {env[name]!r}: must be an integer of at least {at_least}", "environment")
    return int(env[name])


def _rank_is_of_node(env: Environment) -> bool:
    """Whether RANK is the number of a node, which a launcher is to start ranks on, and no rank's.

    Kubeflow numbers the pods of a PyTorchJob by RANK, and by PET_NODE_RANK too. enroot's hook 50-slurm-pytorch.sh takes
    RANK, WORLD_SIZE and LOCAL_RANK from Slurm's task, though a step may have one task per node. For a rank of its own
    torchrun sets LOCAL_WORLD_SIZE beside them, which neither of the two does.
    """
    if "LOCAL_WORLD_SIZE" in env:
        return False
    if "PET_NODE_RANK" in env:
        return "LOCAL_RANK" not in env
    tasks = env.get(STEP_TASKS, "")
    one_per_node = tasks.isdecimal() and int(tasks) <= _number(env, ("SLURM_STEP_NUM_NODES",), 1, at_least=1)
    return one_per_node and (env["RANK"], env["WORLD_SIZE"]) == (env.get("SLURM_PROCID"), tasks)


def _refuse_doubt(env: Environment) -> None:
    """RANK without LOCAL_RANK may be a node's number, on a platform that titan does not know: one rank would then train
    per node, and its other GPUs idle."""
    if "LOCAL_RANK" in env or (seen := gpus()) <= 1:
        return
    doubt = f"RANK = {env['RANK']} and WORLD_SIZE = {env['WORLD_SIZE']} without LOCAL_RANK"
    advice = "where RANK is the number of a node, unset both and set NNODES and NODE_RANK; else set LOCAL_RANK"
    raise ConfigError(f"{doubt}, and this process sees {seen} GPUs; {advice}", "environment")


def _own(env: Environment) -> Environment:
    """The environment without what sbatch exports of a step that it was called in, where that ran on other nodes."""
    step, job = env.get("SLURM_STEP_NODELIST"), env.get("SLURM_JOB_NODELIST")
    if not step or not job or step == job or set(_hosts(env, step)) <= set(_hosts(env, job)):
        return env
    return {name: value for name, value in env.items() if not name.startswith("SLURM_STEP_")}


def _refuse_to_be_alone(env: Environment) -> None:
    """A batch script is one process on the first node of its job, whatever SLURM_NNODES and SLURM_NTASKS promise. So is
    a shell of salloc, which may even run on the login node."""
    if env.get(STEP_TASKS) or env.get("NNODES"):
        return
    nodes, tasks = (_number(env, (name,), 1, at_least=1) for name in ("SLURM_NNODES", "SLURM_NTASKS"))
    if nodes > 1:
        held, choice = f"SLURM_NNODES = {nodes}", "set NNODES=1 to use this node alone"
    elif tasks > 1 and not ranks_asked_for(env):
        held, choice = f"SLURM_NTASKS = {tasks}", "set NPROC to the number of ranks that this process starts"
    else:
        return
    how = f"start it with srun (example: configs/launch/slurm-nvidia.sh), or {choice}"
    raise ConfigError(f"{held}, but srun did not start this process; {how}", "environment")


def _refuse_restarts(env: Environment, why: str) -> None:
    if restarts := max_restarts(env):
        raise ConfigError(f"MAX_RESTARTS = {restarts}: {why}", "environment")


def _meeting_point(env: Environment) -> tuple[str, int]:
    job = env.get("SLURM_JOB_ID", "")
    default = SLURM_PORTS[int(job) % len(SLURM_PORTS)] if job.isdecimal() else 29500
    port = _number(env, MEETING_PORT, default, at_least=1)
    if port >= 1 << 16:
        raise ConfigError(f"MASTER_PORT = {port}: must be at most 65535", "environment")
    return plain_host(next((env[name] for name in HOST if env.get(name)), "")) or _first_slurm_host(env), port


def plain_host(host: str) -> str:
    """A host without the brackets by which an IPv6 address is told from its port."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _first_slurm_host(env: Environment) -> str:
    listed, why = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST"), ""
    if listed and (hosts := _hosts(env, listed)):
        return hosts[0]
    if listed:
        tool = shutil.which("scontrol", path=env.get("PATH", ""))
        why = f"cannot read the node list {listed!r}" if tool else "is not in PATH to look it up"
        why = f", and scontrol {why}"
    raise ConfigError(f"MASTER_ADDR is not set{why}; set it to the host of node 0", "environment")


def _hosts(env: Environment, listed: str) -> list[str]:
    """The hosts of a node list, in order; none where scontrol does not know them."""
    tool = shutil.which("scontrol", path=env.get("PATH", ""))
    if tool is None:
        return []
    words = [tool, "show", "hostnames", listed]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=SCONTROL_S).stdout.split()
    except subprocess.SubprocessError:  # it took too long, or does not know them
        return []


def gpus() -> int:
    """CUDA devices of this node; asks without initializing CUDA, so that the process may still fork."""
    import torch  # only here: it takes a second, and a wrong variable should be said at once

    return torch.cuda.device_count()


def cores() -> int:
    """Number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
