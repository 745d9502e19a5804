"""Mixtures of experts beside a dense model of the same active size, on the text of the quickstart.

    python -m bench.experts [--steps 240] [--plot docs/experts.svg]

Trains three jobs one after the other on the same tokens: the dense llama `nano`; `moe-tiny`, of which a token passes as
many parameters; and the latter without anything that balances it. Prints their losses on the validation split and the
load of the busiest expert, writes all rows under bench/results, and draws them. About five minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench import results
from bench.headlines import headline
from titan.config import load_job

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"
MIXTURE = ("--model.name", "moe", "--model.preset", "moe-tiny")
JOBS = {
    "dense": ("--model.name", "llama", "--model.preset", "nano"),
    "moe": (*MIXTURE, "--model.balance_rate", "0.01"),  # a run of some hundred steps has no time for the usual 0.001
    "moe, unbalanced": (*MIXTURE, "--model.balance", "none"),
}
WARMUP = 20
EVERY_STEP = ("--metrics.every", "1", "--metrics.console.enabled", "false", "--metrics.tensorboard.enabled", "false")
SHOWN = ("step", "loss", "validation_loss", "expert_load")


def main() -> None:
    """Train all, print the headline, write the rows and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="steps of each job")
    parser.add_argument("--plot", type=Path, help="a .svg, .png or .pdf to draw")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: _trained(name, words, args.steps, Path(folder)) for name, words in JOBS.items()}
    found = {"steps": args.steps, "runs": runs}
    print(headline("experts", found))
    if args.plot:
        _draw(runs, args.plot)
    print(results.write("experts", found))


def _trained(name: str, words: tuple[str, ...], steps: int, folder: Path) -> dict[str, Any]:
    """Parameters of a job, and the rows of its run."""
    spec = load_job(CONFIG, list(words), 1).spec
    said = ("--run.dir", str(folder), "--run.name", name, "--train.steps", str(steps), "--checkpoint.enabled", "false")
    # As the quickstart says, a narrow model learns faster from larger initial weights.
    same = ("--model.init_std", "0.04", "--lr_schedule.warmup_steps", str(WARMUP))
    same += ("--lr_schedule.decay_steps", str(max(1, steps - WARMUP)))
    command = [sys.executable, "-m", "titan.train", "--config", str(CONFIG), *words, *same, *said, *EVERY_STEP]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{key: row[key] for key in SHOWN if key in row} for row in map(json.loads, lines)]
    return {"params": spec.params, "active_params": spec.active_params, "rows": rows}


def _draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Training losses and validation losses, and below the load of the busiest expert."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, loads = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, run in runs.items():
        label = f"{name}: {run['active_params'] / 1e6:.1f} M active of {run['params'] / 1e6:.1f} M"
        (line,) = losses.plot(*_series(run, "loss"), linewidth=0.8, alpha=0.5)
        losses.plot(*_series(run, "validation_loss"), "o-", color=line.get_color(), label=label)
        if name != "dense":
            loads.plot(*_series(run, "expert_load"), color=line.get_color())
    losses.set_ylabel("nats per token\n(dots: validation)")
    losses.legend()
    loads.set_ylabel("busiest expert\nover the mean")
    loads.set_xlabel("step")
    for axes in (losses, loads):
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _series(run: dict[str, Any], key: str) -> tuple[list[int], list[float]]:
    rows = [row for row in run["rows"] if key in row]
    return [row["step"] for row in rows], [row[key] for row in rows]


if __name__ == "__main__":
    main()
