"""The template of docs/slurm.sh, dry: two nodes on this machine, with an `srun` and an `scontrol` made for the test."""

import os
import subprocess
import sys
from pathlib import Path

from tests.bell import job
from tests.jobs import read_rows, train_job
from titan.ranks import nodes

ROOT = Path(__file__).parents[2]

SRUN = """\
#!{python}
# Runs its command once a node, as Slurm does: one environment each; at {ready} steps SIGUSR1 to every process of the
# step, twice; and when a task ends badly, the others are killed.
import os, pathlib, signal, subprocess, sys, time

assert sys.argv[1] == "--kill-on-bad-exit=1", sys.argv
tasks = []
for node in ("0", "1"):
    own = dict(SLURM_NODEID=node, SLURM_PROCID=node, SLURM_NNODES="2", SLURM_NTASKS="2", SLURM_JOB_NODELIST="n[1-2]")
    tasks.append(subprocess.Popen(sys.argv[2:], env={{**os.environ, **own, "FAKE_STEP": "{folder}"}}))

def send(number):
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if b"FAKE_STEP={folder}\\0" in (folder / "environ").read_bytes():
                os.kill(int(folder.name), number)
        except OSError:
            pass

rows = pathlib.Path("{folder}/run/metrics.jsonl")
told = rows.exists()
while any(task.poll() is None for task in tasks):
    if not told and rows.exists() and len(rows.read_text().splitlines()) == {ready}:
        send(signal.SIGUSR1)
        send(signal.SIGUSR1)
        told = True
    if any(task.poll() for task in tasks):
        send(signal.SIGKILL)
    time.sleep(0.02)
sys.exit(max(task.returncode for task in tasks))
"""

SCONTROL = """\
#!/bin/sh
case "$1" in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >>{folder}/requeued ;;
esac
"""


def sbatch(folder: Path, argv: list[str], port: int) -> subprocess.CompletedProcess[str]:
    """What the batch node does with the template."""
    fakes = folder / "bin"
    fakes.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (fakes / name).write_text(text.format(python=sys.executable, folder=folder, ready=3))
        (fakes / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{fakes}:{os.environ['PATH']}", "TITAN_PYTHON": sys.executable, "SLURM_JOB_ID": "41",
        "MASTER_PORT": str(port), "NPROC": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["bash", ROOT / "docs" / "slurm.sh", *argv]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)


def test_a_job_comes_back_until_it_is_done(tmp_path: Path) -> None:
    """The run waits before step 4 for the signal that the first three rows call."""
    argv = job(tmp_path, "--mesh.dp_shard", "2", to="nobody")
    with nodes.listen(0) as listening:
        port = listening.getsockname()[1]
    first = sbatch(tmp_path, argv, port)
    assert first.returncode == 75, first.stderr
    # The rank that waits has begun step 4; the other one may hear of it before it does.
    step = 4 if "at step 4" in first.stderr else 5
    assert f"preempted by SIGUSR1 at step {step}" in first.stderr
    assert first.stderr.splitlines()[-1].startswith("scontrol requeue 41")
    assert (tmp_path / "requeued").read_text() == "41\n"
    second = sbatch(tmp_path, argv, port)
    assert second.returncode == 0, second.stderr
    assert f"step-0000000{step}, step {step}" in second.stderr
    assert (tmp_path / "requeued").read_text() == "41\n"
    rows, whole = read_rows(tmp_path / "run"), train_job(tmp_path, 2, "--mesh.dp_shard", "2", name="whole").rows
    assert {step: row["loss"] for step, row in rows.items()} == {step: row["loss"] for step, row in whole.items()}
