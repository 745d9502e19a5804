"""Makes the run of a version that is about to be released: its first steps, and the losses of those after them.

    python tests/released/make.py tests/released/VERSION

It trains with the titan that Python imports, through the command alone, in a folder of its own: paths in a resolved job
are absolute.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WORK = Path("/tmp/titan-released")
KEPT, ALL = 4, 8
"""Steps until the checkpoint that is kept, and until the end of the run that goes on from it."""


def make(folder: Path) -> None:
    """Fill a new folder: config.toml, checkpoints/, and losses.json with the losses of the steps after."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    for name in ("job.toml", "text.txt"):
        shutil.copy(HERE / name, WORK)
    run = WORK / "runs" / "released"
    _train(KEPT)
    folder.mkdir(parents=True)
    shutil.copy(run / "config.toml", folder)
    shutil.copytree(run / "checkpoints", folder / "checkpoints")
    _train(ALL)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["step"] > KEPT}
    (folder / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")
    shutil.rmtree(WORK)


def _train(steps: int) -> None:
    words = ["--config", "job.toml", "--data.cache", "cache", "--run.device", "cpu", "--train.steps", str(steps)]
    subprocess.run([sys.executable, "-m", "titan.train", *words], cwd=WORK, check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
