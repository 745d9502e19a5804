"""Every file of configs/launch/ parses, and is run to the point where titan reads its environment, in a faked one."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import Job, Slurm, executable
from tests.unit.test_launch_env import pod
from titan.ranks.meeting.launch_env import LaunchEnv, find_place, rank_environment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "launch"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
SLURM = [path for path in SCRIPTS if path.name.startswith("slurm-")]

STUB = """\
#!/bin/sh
# A Python with titan that only says what it would do.
[ "$1" = - ] && exit 0
exec {python} {asks} "$@"
"""

ASKS = """\
import json, os, sys
from dataclasses import asdict
from titan.ranks.meeting.launch_env import find_place, rank_environment

env = dict(os.environ)
if "CONTAINER" in env:
    env["PATH"] = ""  # which has no scontrol
mine = rank_environment(env)
said = {"argv": sys.argv[1:], "rank": mine, "place": None if mine else asdict(find_place(env)), "env": env}
sys.stdout.write(json.dumps(said) + chr(10))
sys.exit(75 if env.get("PREEMPTED") and "SLURM_RESTART_COUNT" not in env else 0)
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """What TITAN_PYTHON names."""
    (tmp_path / "asks.py").write_text(ASKS)
    return executable(tmp_path / "python", STUB.format(python=sys.executable, asks=tmp_path / "asks.py"))


@pytest.fixture
def slurm(tmp_path: Path, stub: Path) -> Iterator[Slurm]:
    """Whose nodes have apptainer, and titan in every container."""
    with Slurm(tmp_path) as running:
        executable(tmp_path / "slurm" / "bin" / "titan", f'#!/bin/sh\nCONTAINER=1 exec {stub} "$@"\n')
        executable(tmp_path / "slurm" / "bin" / "apptainer", '#!/bin/sh\nshift 7; exec "$@"\n')
        yield running


def said(job: Job) -> list[dict[str, Any]]:
    """What the processes of a job that has ended said, in the order of Slurm's tasks."""
    assert job.await_end() == "COMPLETED", job.lines
    words = [json.loads(line) for line in job.lines if line.startswith("{")]
    return sorted(words, key=lambda each: (each["env"].get("SLURM_RESTART_COUNT", ""), each["env"]["SLURM_PROCID"]))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_can_be_run(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)
    assert f"configs/launch/{path.name}" in path.read_text(), "how to start it"


@pytest.mark.parametrize("path", SLURM, ids=lambda path: path.name)
def test_options_of_sbatch(path: Path) -> None:
    """sbatch stops to read them at the first command."""
    lines = path.read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert {"--requeue", "--open-mode=append", "--signal=USR1@300"} <= set(options)
    assert all(re.fullmatch(r"--[a-z-]+(=\S+)?", option) for option in options)
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:])


def test_slurm_nvidia_starts_a_launcher_per_node(slurm: Slurm, stub: Path) -> None:
    job = slurm.submit(str(FOLDER / "slurm-nvidia.sh"), "--a.b", "1", TITAN_PYTHON=str(stub), NPROC="8")
    assert job.options["ntasks-per-node"] == "1"
    nodes = said(job)
    places = [{"nodes": 2, "node": node, "ranks": 8, "host": "127.0.0.1", "port": 20041} for node in (0, 1)]
    assert [node["place"] for node in nodes] == places
    assert all(node["argv"] == ["-P", "-m", "titan.launch", "--a.b", "1"] for node in nodes)
    assert all((node["env"]["SRUN_CPUS_PER_TASK"], node["env"]["MAX_RESTARTS"]) == ("64", "3") for node in nodes)


@pytest.mark.parametrize("binding", [{}, {"GPU_BINDING": "--gpu-bind=none"}], ids=["one GPU per task", "all GPUs"])
def test_slurm_amd_starts_a_rank_per_gpu(
    binding: dict[str, str], slurm: Slurm, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # the file keeps what is set
    file = str(FOLDER / "slurm-amd.sh")
    job = slurm.submit("--ntasks-per-node=2", file, "--a.b", "1", TITAN_PYTHON=str(stub), **binding)
    ranks = said(job)
    assert [(each["rank"]["RANK"], each["rank"]["LOCAL_RANK"]) for each in ranks] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "1"),
    ]
    env, rank = ranks[3]["env"], ranks[3]["rank"]
    assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("4", "2")
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("hsn0,hsn1,hsn2,hsn3", "hsn0")
    assert (env["OMP_NUM_THREADS"], env["SRUN_CPUS_PER_TASK"]) == ("7", "7")
    assert env["MIOPEN_USER_DB_PATH"] == env["MIOPEN_CUSTOM_CACHE_DIR"] == "/tmp/miopen-41"


@pytest.mark.parametrize("name", ["slurm-pyxis.sh", "slurm-apptainer.sh"])
def test_containers_have_no_scontrol(name: str, slurm: Slurm, tmp_path: Path) -> None:
    """The script says where nodes meet, and has a preempted job run again."""
    job = slurm.submit(str(FOLDER / name), "--a.b", "1", IMAGE=f"{tmp_path}/image", NPROC="8", PREEMPTED="yes")
    lives = said(job)
    assert [(each["place"]["node"], each["env"].get("SLURM_RESTART_COUNT")) for each in lives] == [
        (0, None),
        (1, None),
        (0, "1"),
        (1, "1"),
    ]
    assert all(each["argv"] == ["train", "--a.b", "1"] and "SLURM_JOB_ID" not in each["env"] for each in lives)
    assert lives[1]["place"] == {"nodes": 2, "node": 1, "ranks": 8, "host": "127.0.0.1", "port": 20041}
    assert job.restarts == 1


def test_containers_need_an_image(slurm: Slurm) -> None:
    job = slurm.submit(str(FOLDER / "slurm-pyxis.sh"))
    assert job.await_end() == "FAILED" and "IMAGE: a squashfs file with titan installed" in "".join(job.lines)


@pytest.mark.parametrize(
    ("env", "arguments"),
    [
        ({"NPROC": "8"}, {"nproc_per_node": "8", "nnodes": "1", "standalone": True, "max_restarts": 0}),
        ({"MAX_RESTARTS": "3"}, {"nproc_per_node": "gpu", "max_restarts": 3}),
        (
            {"NPROC": "8", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "n7"},
            {"nnodes": "2", "node_rank": 1, "master_addr": "n7", "master_port": 29500, "standalone": False},
        ),
    ],
    ids=["one node", "restarts", "two nodes"],
)
def test_torchrun_is_asked_for_ranks(env: dict[str, str], arguments: dict[str, Any], tmp_path: Path) -> None:
    from torch.distributed.run import parse_args

    stub = executable(tmp_path / "python", '#!/bin/sh\n[ "$1" = - ] || printf "%s\\n" "$@"\n')
    command, more = [FOLDER / "torchrun.sh", "--a.b", "1"], {"TITAN_PYTHON": str(stub), "PATH": os.environ["PATH"]}
    words = subprocess.run(command, env={**more, **env}, capture_output=True, text=True, check=True).stdout.split()
    assert words[:3] == ["-P", "-m", "torch.distributed.run"]
    parsed = parse_args(words[3:])
    assert {name: getattr(parsed, name) for name in arguments} == arguments
    assert parsed.module and (parsed.training_script, parsed.training_script_args) == ("titan.train", ["--a.b", "1"])
    assert "SIGUSR1" in parsed.signals_to_handle


def _pods(spec: dict[str, Any], name: str) -> Iterator[dict[str, str]]:
    """The environments of a PyTorchJob's pods: the container's own, and what the training operator adds."""
    replicas = spec["pytorchReplicaSpecs"]
    pods = [(kind, number) for kind in ("Master", "Worker") for number in range(replicas[kind]["replicas"])]
    for number, (kind, _) in enumerate(pods):
        [container] = replicas[kind]["template"]["spec"]["containers"]
        [port] = [each["containerPort"] for each in container["ports"] if each["name"] == "pytorchjob-port"]
        told = {"MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": str(port)}
        own = {each["name"]: each["value"] for each in container["env"]}
        yield own | pod(number, spec["nprocPerNode"], len(pods)) | told


def test_kubernetes_starts_a_launcher_per_pod(stub: Path) -> None:
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    environments = list(_pods(manifest["spec"], manifest["metadata"]["name"]))
    assert [rank_environment(env) for env in environments] == [None, None]
    assert [find_place(env) for env in environments] == [LaunchEnv(2, n, 8, "titan-master-0", 23456) for n in (0, 1)]
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        [container] = pod["containers"]
        assert container["name"] == "pytorch" and container["command"] == ["titan", "train"]
        command = [str(stub), *container["command"][1:], *container.get("args", [])]
        pod_says = subprocess.run(command, env=environments[0], capture_output=True, text=True, check=True).stdout
        assert json.loads(pod_says)["place"]["ranks"] == 8 and "--config" in json.loads(pod_says)["argv"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(manifest["spec"]["nprocPerNode"])
        assert pod["terminationGracePeriodSeconds"] > 30
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/shared", "/dev/shm", "/tmp"} <= mounts and container["env"][1]["value"] in mounts
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_every_file_is_run() -> None:
    """By the tests above."""
    run = {"kubernetes.yaml", "torchrun.sh", *(f"slurm-{one}.sh" for one in ("amd", "apptainer", "nvidia", "pyxis"))}
    assert {path.name for path in FOLDER.iterdir() if path.is_file() and path.name != "__init__.py"} == run


# --- docs/hpc.md --------------------------------------------------------------------------------------------------

RUN_ELSEWHERE = {
    "NPROC=2 configs/launch/torchrun.sh": "for real, by tests/dist/test_docs.py",
    "error: ": "output; tests/unit/test_docs_output.py compares it with the source",
}
"""How lines of docs/hpc.md begin that no test of this file runs, and why."""

KUBECTL = """\
#!/bin/sh
[ "$1" = apply ] && [ "$2" = -f ] && exec cat "$3"
[ "$1" = logs ] && [ "$2" = -f ] && echo "$3"
"""


def commands_of_the_page() -> list[str]:
    """The lines of all blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "docs" / "hpc.md").read_text(), re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if not line.startswith(tuple(RUN_ELSEWHERE))]


def test_the_page_has_commands() -> None:
    tools = {re.sub(r"^(\w+=\S+ )*", "", line).split()[0] for line in commands_of_the_page()}
    assert tools == {"sbatch", "kubectl"} and len(commands_of_the_page()) == 6


@pytest.mark.parametrize("command", [line for line in commands_of_the_page() if "sbatch " in line])
def test_sbatch_of_the_page(command: str, slurm: Slurm, stub: Path) -> None:
    """As written, but for the number of nodes; every process that it starts gets the words of the command line."""
    two_nodes = re.sub(r"--nodes \d+", "--nodes 2", command)
    done = slurm("bash", "-c", two_nodes, TITAN_PYTHON=str(stub), NPROC="2" if "amd" not in command else "")
    assert done.returncode == 0, done.stderr
    [job] = slurm.jobs
    started = said(job)
    assert len(started) == (16 if "amd" in command else 2)
    words = command.partition(".sh ")[2].split()
    assert words[0] == "--config" and all(each["argv"][-2:] == words for each in started)
    assert all((each["rank"] is None) == ("amd" not in command) for each in started)


def test_kubectl_of_the_page(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    executable(tmp_path / "kubectl", KUBECTL)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    apply, logs = (
        subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        for line in commands_of_the_page()
        if line.startswith("kubectl ")
    )
    first_pod = f"{yaml.safe_load(apply)['metadata']['name']}-master-0"  # as the operator calls it
    assert logs.strip() == first_pod
