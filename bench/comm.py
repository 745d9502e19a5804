"""Ways to send less, compared in one run: bytes sent, loss and time of each, against an all-reduce of gradients.

    python -m bench.comm [--steps 240] [--methods all-reduce,zero-1] [--plot docs/communication.svg]

Trains the quickstart once per method, on gloo ranks of this machine: the same model, seed, tokens and schedule. What a
rank sends is the metric `bytes_sent`. Prints the headline, writes all rows under bench/results, and draws loss against
bytes. `python -m bench.tables` then writes the table of docs/communication.md.

Limits: one seed, a model of 2.8 M parameters, one machine. Ranks share its cores, so a step time shows what a method
costs the CPU and no network; what a method gains over a slow link is its bytes. Runs follow each other, so step times
also show what else the machine did. Each step has a row, for which gossip compares all weights: its time has that too.
Where workers keep their own pace (`server-2`), losses and bytes are those of the first worker, which is the server.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from tqdm import tqdm

from bench import results
from bench.headlines import headline
from titan.config import load_job
from titan.errors import ConfigError

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"
VALIDATIONS = 4
SMOOTH = 10
"""Steps of which a point of the picture is the mean."""


@dataclass(frozen=True)
class Method:
    """Keys of a method's job, its ranks, and the name of the all-reduce that it is compared with."""

    keys: dict[str, object]
    ranks: int = 4
    baseline: str = "all-reduce"


def _prefixed(table: str, **keys: object) -> dict[str, object]:
    return {f"{table}.{key}": value for key, value in keys.items()}


def _local(**keys: object) -> Method:
    return Method({"mesh.worker": 4, **_prefixed("plugins.local_steps", **keys)})


def _compressed(method: str) -> Method:
    options = _prefixed("plugins.compressed_gradients", method=method, warmup_steps=20)  # that of the learning rate
    return Method({"mesh.dp_replicate": 4, **options})


def _gossip(graph: str, ranks: int = 4, baseline: str = "all-reduce") -> Method:
    return Method({"mesh.worker": ranks, "plugins.gossip.graph": graph}, ranks, baseline)


NESTEROV = {"every": 16, "outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}  # of arXiv 2311.08105
METHODS = {
    "all-reduce": Method({"mesh.dp_replicate": 4}),
    "zero-1": Method({"mesh.dp_shard": 4, "plugins.fsdp.zero_stage": 1}),
    "zero-3": Method({"mesh.dp_shard": 4, "plugins.fsdp.zero_stage": 3}),
    "local-sgd-4": _local(every=4, outer="average"),
    "local-sgd-16": _local(every=16, outer="average"),
    "diloco-16": _local(**NESTEROV),
    "diloco-16-int8": _local(**NESTEROV, exchange="int8"),
    "diloco-16-int4": _local(**NESTEROV, exchange="int4"),
    **{method: _compressed(method) for method in ("powersgd", "topk", "randk", "sign", "int8")},
    **{f"gossip-{graph}": _gossip(graph) for graph in ("ring", "exponential", "one_peer")},
    **{
        f"server-{staleness}": Method({"mesh.worker": 4, "plugins.parameter_server.staleness": staleness})
        for staleness in (0, 2)
    },
    "all-reduce-8": Method({"mesh.dp_replicate": 8}, 8, "all-reduce-8"),
    "gossip-torus-8": _gossip("torus", 8, "all-reduce-8"),
}
"""All methods; a further one is a further line."""


def main() -> None:
    """Train all, print the headline, write the rows and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="steps of each run")
    parser.add_argument("--methods", default=",".join(METHODS), help="names with commas between them; default: all")
    parser.add_argument("--plot", type=Path, help="a .svg, .png or .pdf to draw")
    args = parser.parse_args()
    names = args.methods.split(",")
    if unknown := [name for name in names if name not in METHODS]:
        parser.error(f"--methods: unknown: {', '.join(unknown)}; known: {', '.join(METHODS)}")
    names = list(dict.fromkeys(each for name in names for each in (METHODS[name].baseline, name)))
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                load_job(CONFIG, _words(name, args.steps, folder), METHODS[name].ranks)
            except ConfigError as error:  # before an hour of other methods
                parser.error(f"--methods: {name}: {error}")
        runs = {name: _trained(name, args.steps, folder) for name in tqdm(names, disable=None)}
    found = {"steps": args.steps, "runs": runs}
    print(headline("comm", found))
    if args.plot:
        _draw(runs, args.plot)
    print(results.write("comm", found))


def _words(name: str, steps: int, folder: str) -> list[str]:
    """The command line of a method's job."""
    keys = {
        "run.dir": folder,
        "run.name": name,
        "run.sample_prompt": "",
        "train.steps": steps,
        "checkpoint.enabled": "false",
        "metrics.every": 1,
        "plugins.bytes_sent.enabled": "true",
        "metrics.console.enabled": "false",
        "metrics.tensorboard.enabled": "false",
        "validation.every": max(1, steps // VALIDATIONS),
        **METHODS[name].keys,
    }
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def _trained(name: str, steps: int, folder: str) -> dict[str, Any]:
    """The rows of a method's run: of each step its loss, bytes sent and seconds; (step, loss) of each validation."""
    method = METHODS[name]
    command = [sys.executable, "-m", "titan.launch", "--config", str(CONFIG), *_words(name, steps, folder)]
    done = subprocess.run(command, env={**os.environ, "NPROC": str(method.ranks)}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}\n{done.stderr}")
    rows = [json.loads(line) for line in Path(folder, name, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained, validated = ([row for row in rows if key in row] for key in ("loss", "validation_loss"))
    assert [row["step"] for row in trained] == list(range(1, steps + 1)), f"{name}: rows of some steps are missing"
    return {
        "ranks": method.ranks,
        "baseline": method.baseline,
        "loss": [round(row["loss"], 5) for row in trained],
        "bytes_sent": [round(row["bytes_sent"]) for row in trained],
        "step_s": [round(row["step_time_s"], 4) for row in trained],
        "validation": [(row["step"], round(row["validation_loss"], 5)) for row in validated],
    }


def _draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Loss against the bytes sent so far, a curve per method: training smoothed, and dots for validation."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)
    for name, run in runs.items():
        sent = [total / 1e6 for total in accumulate(run["bytes_sent"])]
        ends = range(SMOOTH, len(sent) + 1, SMOOTH)
        losses = [mean(run["loss"][end - SMOOTH : end]) for end in ends]
        (line,) = axes.plot([sent[end - 1] for end in ends], losses, linewidth=1, label=name)
        steps, values = zip(*run["validation"], strict=True)
        axes.plot([sent[step - 1] for step in steps], values, "o", color=line.get_color(), markersize=4)
    axes.set_xscale("log")
    least = min(sum(run["bytes_sent"]) for run in runs.values()) / 1e6
    axes.set_xlim(left=least / 10)  # before its first exchange, a method has sent some bytes per step
    axes.set_xlabel("megabytes that a rank has sent")
    axes.set_ylabel("nats per token (dots: validation)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
