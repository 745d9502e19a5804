"""Slurm: have it run this job again."""

import shutil
import subprocess
import sys
from collections.abc import Mapping


def requeue(env: Mapping[str, str]) -> None:
    """Put the Slurm job of this environment, if there is one, back into its queue.

    Slurm ends what is left of the job at once, so this comes last. Where it cannot be done, say what the user can do.
    """
    job = env.get("SLURM_JOB_ID")
    if not job:
        return
    tool = shutil.which("scontrol", path=env.get("PATH", ""))
    if tool is None:
        _tell(f"warning: there is no scontrol here, so job {job} is not queued again; submit it again to go on")
        return
    _tell(f"scontrol requeue {job}: Slurm runs this job again, and it goes on from its checkpoint")
    done = subprocess.run([tool, "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        _tell(f"warning: Slurm does not queue job {job} again ({done.stderr.strip()}); submit it again to go on")


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
