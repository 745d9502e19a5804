"""Where a node stands: the variables that a user, Slurm, Kubeflow or enroot sets (those of srun: test_slurm.py)."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.slurm import executable
from titan import launch
from titan.errors import ConfigError
from titan.ranks import process
from titan.ranks.meeting.launch_env import (
    LOCAL,
    LaunchEnv,
    drop_rank_variables,
    find_place,
    launched_world_size,
    max_restarts,
    rank_environment,
)


def _slurm(folder: Path, **env: str) -> dict[str, str]:
    """An environment with a `scontrol` that knows a node list and single nodes."""
    cases = '"n[7-8]") printf "n7\\nn8\\n" ;; n?) echo "$3" ;; *) exit 1 ;;'
    executable(folder / "scontrol", f'#!/bin/sh\ncase "$3" in {cases} esac\n')
    return {"PATH": f"{folder}:/usr/bin:/bin", **env}


def _step(nodes: int, tasks: int, listed: str = "n[7-8]") -> dict[str, str]:
    """What srun says of a step to each of its tasks."""
    return {
        "SLURM_JOB_NODELIST": listed,
        "SLURM_STEP_NODELIST": listed,
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(tasks),
    }


def test_default_is_one_rank_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan.ranks.meeting.launch_env.gpus", lambda: 0)
    assert find_place({}).world_size == 1


def test_one_node_needs_no_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor srun, in a batch script of one task, and where the user says so. A rank per GPU is the default."""
    monkeypatch.setattr("titan.ranks.meeting.launch_env.gpus", lambda: 8)
    for env, ranks in (
        ({"NPROC": "4", "MASTER_PORT": "1234"}, 4),
        ({"NPROC": ""}, 8),
        ({"NPROC_PER_NODE": "3"}, 3),
        ({"NPROC": "2", "NPROC_PER_NODE": "8"}, 2),
        ({"SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, 8),
        ({"SLURM_NNODES": "1", "SLURM_NTASKS": "8", "NPROC": "8"}, 8),
        ({"SLURM_NNODES": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "NPROC": "8"}, 8),
        ({"SLURM_NNODES": "2", "SLURM_PROCID": "0", "NNODES": "1"}, 8),
    ):
        assert find_place(env) == LaunchEnv(1, 0, ranks, LOCAL, 0), env


def test_several_nodes_and_the_environment_of_a_rank() -> None:
    env = {"NPROC": "4", "NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    place = find_place(env)
    assert place == LaunchEnv(3, 2, 4, "head", 1234)
    assert place.environment(1) == dict(
        RANK="9", LOCAL_RANK="1", WORLD_SIZE="12", LOCAL_WORLD_SIZE="4", MASTER_ADDR="head", MASTER_PORT="1234"
    )


def test_several_nodes_of_slurm_meet_at_the_first(tmp_path: Path) -> None:
    env = _slurm(tmp_path, NPROC="2", SLURM_NODEID="1", SLURM_JOB_ID="41", **_step(nodes=2, tasks=2))
    assert rank_environment({**env, "NPROC": "", "SLURM_PROCID": "1"}) is None
    assert find_place(env) == LaunchEnv(2, 1, 2, "n7", 20041)
    assert find_place({**env, "MASTER_ADDR": "n9", "MASTER_PORT": "7"}) == LaunchEnv(2, 1, 2, "n9", 7)


def test_a_step_of_another_job_is_not_this_ones(tmp_path: Path) -> None:
    """sbatch hands on the variables of the step that it was called in."""
    inherited = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n9"}
    env = _slurm(tmp_path, SLURM_PROCID="0", **(_step(nodes=2, tasks=8) | inherited))
    assert rank_environment(env) is None
    with pytest.raises(ConfigError, match="SLURM_NNODES = 2, but srun did not start this process"):
        find_place(env)
    assert rank_environment({**env, "SLURM_STEP_NODELIST": "n8", "SLURM_JOB_ID": "1"}) is not None


def test_own_variables_win_over_slurms(tmp_path: Path) -> None:
    env = _slurm(tmp_path, NPROC="2", NNODES="1", SLURM_NODEID="1", **_step(nodes=2, tasks=2))
    assert find_place(env).world_size == 2
    assert find_place({**env, "NNODES": "3", "NODE_RANK": "2"}) == LaunchEnv(3, 2, 2, "n7", 29500)


def test_srun_with_one_task_a_rank(tmp_path: Path) -> None:
    task = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "9000"}
    assert rank_environment(_slurm(tmp_path, **task, **_step(nodes=2, tasks=8))) == dict(
        RANK="5", LOCAL_RANK="1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4", MASTER_ADDR="n7", MASTER_PORT="20000"
    )


def test_a_step_of_one_task_is_alone_in_a_job_of_many() -> None:
    """`srun --ntasks=1 --preserve-env`, and salloc's shell on a compute node: the job's own variables stay."""
    env = {"SLURM_NNODES": "2", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "NPROC": "4"}
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert rank_environment({**env, **step}) is None
    assert find_place({**env, **step}) == LaunchEnv(1, 0, 4, LOCAL, 0)


@pytest.mark.parametrize(
    ("env", "held"),
    [
        ({"SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "NPROC": "8"}, "SLURM_NNODES = 2"),
        ({"SLURM_NNODES": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "MASTER_ADDR": "n1"}, "SLURM_NTASKS = 8"),
        ({"SLURM_NNODES": "2", "SLURM_NTASKS": "2"}, "SLURM_NNODES = 2"),
        ({"SLURM_NNODES": "1", "SLURM_NTASKS": "8"}, "SLURM_NTASKS = 8"),
    ],
    ids=["nodes", "tasks", "salloc, nodes", "salloc, tasks"],
)
def test_a_process_that_srun_did_not_start_is_no_rank(env: Mapping[str, str], held: str) -> None:
    assert rank_environment(env) is None
    with pytest.raises(ConfigError, match=f"{held}, but srun did not start this process; start it with srun"):
        find_place(env)


def test_a_rank_of_torchrun_lacks_nothing() -> None:
    assert rank_environment({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", **_step(nodes=1, tasks=9)}) == {}
    own = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"}
    assert rank_environment({**pod(1, "8"), **own, "TORCHELASTIC_RUN_ID": "none"}) == {}, "in a pod"


def test_restarts_are_none_unless_asked_for() -> None:
    assert (max_restarts({}), max_restarts({"MAX_RESTARTS": "3"}), max_restarts({"MAX_RESTARTS": "0"})) == (0, 3, 0)
    with pytest.raises(ConfigError, match="MAX_RESTARTS = '-1': must be an integer of at least 0"):
        max_restarts({"MAX_RESTARTS": "-1"})


def test_restarts_where_somebody_else_starts_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"MAX_RESTARTS = 2: .*use --max-restarts of torchrun"):
        rank_environment({"RANK": "1", "WORLD_SIZE": "2", "MAX_RESTARTS": "2"})
    srun = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "MASTER_ADDR": "h"}
    with pytest.raises(ConfigError, match=r"MAX_RESTARTS = 2: .*use --ntasks-per-node 1"):
        rank_environment({**srun, "MAX_RESTARTS": "2"})


TWO_NODES = {"NPROC": "2", "NNODES": "2", "NODE_RANK": "0"}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"NPROC": "many"}, "NPROC = 'many': must be an integer of at least 1"),
        ({"NPROC": "0"}, "NPROC = '0': must be an integer of at least 1"),
        ({"NPROC": "2", "NNODES": "2"}, "NODE_RANK is not set; with NNODES = 2 it must be 0 to 1"),
        ({**TWO_NODES, "NODE_RANK": "2"}, "NODE_RANK = 2: must be below NNODES = 2"),
        (TWO_NODES, "MASTER_ADDR is not set"),
        ({**TWO_NODES, "SLURM_JOB_NODELIST": "n[7-8]", "PATH": ""}, "scontrol is not in PATH"),
        ({**TWO_NODES, "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT = 'x'"),
        ({**TWO_NODES, "MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT = 65536: must be at most 65535"),
    ],
)
def test_faults_name_the_variable(env: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_place(env)


def test_a_node_list_that_scontrol_cannot_read(tmp_path: Path) -> None:
    env = _slurm(tmp_path, NPROC="2", SLURM_NODEID="0", **_step(nodes=2, tasks=2, listed="bad["))
    with pytest.raises(ConfigError, match=r"cannot read the node list 'bad\['"):
        find_place(env)


def test_nproc_per_node_does_not_start_ranks_where_srun_has() -> None:
    """NPROC does."""
    task = {"SLURM_PROCID": "3", "MASTER_ADDR": "n7", **_step(nodes=1, tasks=8)}
    assert rank_environment({"NPROC_PER_NODE": "8", **task}) == rank_environment(task) is not None
    assert rank_environment({"NPROC": "8", **task}) is None


# --- launchers that number pods or nodes, not ranks -----------------------------------------------------------------


def pod(number: int, per_pod: str, pods: int = 2) -> dict[str, str]:
    """What Kubeflow's training operator tells a pod of a PyTorchJob (pkg/controller.v1/pytorch/envvar.go, v1.7 on)."""
    world = pods * int(per_pod) if per_pod.isdecimal() else pods
    return {
        "PYTHONUNBUFFERED": "0",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "RANK": str(number),
        "WORLD_SIZE": str(world),
        "PET_NPROC_PER_NODE": per_pod,
        "PET_NODE_RANK": str(number),
        "PET_NNODES": str(pods),
    }


def test_a_pod_of_a_pytorchjob_is_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its RANK is the pod's number. Without torchrun, 8 ranks would wait for 16, or 7 of 8 GPUs would idle."""
    monkeypatch.setattr("titan.ranks.meeting.launch_env.gpus", lambda: 4)
    for per_pod, ranks in (("8", 8), ("auto", 4), ("1", 1)):
        env = pod(1, per_pod)
        assert rank_environment(env) is None
        assert find_place(env) == LaunchEnv(2, 1, ranks, "job-master-0", 23456)
    assert find_place({**pod(1, "8"), "NPROC": "2"}).ranks == 2
    assert find_place(pod(0, "8", pods=1)) == LaunchEnv(1, 0, 8, LOCAL, 0)


def test_brackets_of_an_ipv6_address_are_no_part_of_the_host() -> None:
    assert find_place({**TWO_NODES, "MASTER_ADDR": "[::1]"}).host == "::1"
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "[fe80::1%eth0]"}
    assert rank_environment(rank) == {"MASTER_ADDR": "fe80::1%eth0"}


def test_a_rank_has_an_upper_bound() -> None:
    with pytest.raises(ConfigError, match="RANK = 2: must be below WORLD_SIZE = 2"):
        rank_environment({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})


def test_a_pod_of_a_trainjob_is_a_node() -> None:
    """Kubeflow Trainer v2 says all with torchrun's own variables."""
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"}
    env |= {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500"}
    assert rank_environment(env) is None
    assert find_place(env) == LaunchEnv(2, 1, 8, "job-node-0-0.job", 29500)


def test_an_elastic_pytorchjob_needs_torchrun() -> None:
    with pytest.raises(ConfigError, match="PET_NNODES = '1:4': must be an integer of at least 1"):
        find_place({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "NPROC": "8"})


def test_the_hook_of_enroot_takes_a_launcher_for_a_rank(tmp_path: Path) -> None:
    """With one task per node; with one task per rank it is right (enroot, conf/hooks/extra/50-slurm-pytorch.sh)."""
    hook = {"MASTER_ADDR": "n7", "MASTER_PORT": "61041", "RANK": "1", "LOCAL_RANK": "0"}
    task = {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "NPROC": "8"}
    env = _slurm(tmp_path, **_step(nodes=2, tasks=2), **task, **hook, WORLD_SIZE="2")
    assert rank_environment(env) is None
    assert find_place(env) == LaunchEnv(2, 1, 8, "n7", 61041)
    assert rank_environment({**env, **_step(nodes=2, tasks=16), "WORLD_SIZE": "16"}) == {}
    assert rank_environment({**env, "LOCAL_WORLD_SIZE": "1"}) == {}, "torchrun on each node"


def test_rank_on_a_platform_that_titan_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may number nodes, as Kubeflow's did before v1.7; then the other GPUs of a node would idle."""
    monkeypatch.setattr("titan.ranks.meeting.launch_env.gpus", lambda: 8)
    with pytest.raises(ConfigError, match="RANK = 1 and WORLD_SIZE = 2 without LOCAL_RANK, and this process sees 8"):
        rank_environment({"RANK": "1", "WORLD_SIZE": "2"})
    assert rank_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}) == {}
    monkeypatch.setattr("titan.ranks.meeting.launch_env.gpus", lambda: 1)
    assert rank_environment({"RANK": "1", "WORLD_SIZE": "2"}) == {}


def test_a_process_that_is_no_rank_forgets_the_pods_number() -> None:
    env = {**pod(1, "8"), "LOCAL_RANK": "0", "NPROC": "1"}
    drop_rank_variables(env)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & env.keys() and env["NPROC"] == "1"


def test_the_only_rank_of_a_run_needs_no_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod, or where a batch script has set MASTER_ADDR: nobody else is there to meet."""
    for name, value in {**pod(0, "8"), "NPROC": "1", "NNODES": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    stores: list[object] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, **more: stores.append(store))
    monkeypatch.setattr(process, "complete_in_order", lambda: None)

    def train(words: list[str]) -> int:
        process.enter(process.Rank(0, launched_world_size(), 0, torch.device("cpu")), 1.0)
        return launched_world_size()

    monkeypatch.setattr("titan.train.main", train)
    assert launch.main([]) == 1
    assert isinstance(stores[0], dist.HashStore)
