"""Requeueing of the Slurm job after a preemption."""

import shutil
import signal
import subprocess
from collections.abc import Collection, Mapping

from titan.terminal import say

ANSWER_S = 120.0  # longest wait for Slurm's controller, which may be busy


def requeue(env: Mapping[str, str], heard: Collection[int]) -> None:
    """Put the Slurm job of this environment, if there is one, back into its queue, unless somebody ends the job.

    Slurm ends what is left of the job at once, so this comes last. Where it cannot be done, say what the user can do.

    heard: numbers of the signals that the run was sent. SIGUSR1 asks for room, as a time limit does without a signal.
    Any other ends the job: `scancel` sends SIGTERM, and Slurm would run a job again that it is about to cancel. A Slurm
    that preempts by requeueing (PreemptMode=REQUEUE) sends SIGTERM too, and queues the job again itself.
    """
    if not env.get("SLURM_JOB_ID"):
        return
    job = env["SLURM_JOB_ID"]
    # One task of an array has the array's own number, by which scontrol means all of its tasks. The others have numbers
    # of their own. A job that a task has submitted inherits the task's SLURM_ARRAY_*, which mean nothing there.
    job = f"{job}_{env['SLURM_ARRAY_TASK_ID']}" if env.get("SLURM_ARRAY_JOB_ID") == job else job
    if ends := sorted(signal.Signals(number).name for number in heard if number != signal.SIGUSR1):
        why = f"because it received {ends[-1]}; unless Slurm requeues it, submit it again to resume"
        say(f"titan does not requeue job {job}, {why}")
        return
    tool = shutil.which("scontrol", path=env.get("PATH", ""))
    if tool is None:
        say(f"warning: scontrol is not in PATH, so job {job} is not requeued; submit it again to resume")
        return
    say(f"scontrol requeue {job}: asking Slurm to run this job again; it will resume from its checkpoint")
    try:
        done = subprocess.run([tool, "requeue", job], capture_output=True, text=True, check=False, timeout=ANSWER_S)
        refusal = (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
    except subprocess.TimeoutExpired:
        refusal = f"no answer within {ANSWER_S:g} s"
    if refusal:
        say(f"warning: Slurm refuses to requeue job {job} ({refusal}); submit it again to resume")
