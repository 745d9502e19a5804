"""Compare predicted with measured step times on this machine, from `titan doctor`, `titan plan` and `titan train`.

    python -m bench.doctor [--rounds 2] [--steps 6] [--first 10] [--seconds 15]

Ranks share the machine's cores, and its speed drifts. Each round therefore runs `titan doctor` with the layout's number
of ranks right before it trains the layout. The first steps of each run are discarded. The medians of all steps and of
the rounds' predictions are compared. Prints one row per layout, the errors, and how many pairs of layouts are ranked
correctly; writes all samples under bench/results. Nothing else may run on the machine.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import results

WARM_UP = 3
MODEL = {
    "model.n_layers": 8,
    "model.dim": 256,
    "model.n_heads": 8,
    "model.n_kv_heads": 8,
    "model.ffn_dim": 768,
    "model.max_seq_len": 256,
    "data.seq_len": 256,
    "train.global_batch_size": 16,
    "train.micro_batch_size": 2,
    "plugins.bf16.enabled": "false",
}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one rank": (1, {}),
    "dp_replicate 2": (2, {"mesh.dp_replicate": 2}),
    "dp_shard 2": (2, {"mesh.dp_shard": 2}),
    "tp 2": (2, {"mesh.tp": 2}),
    "pp 2": (2, {"mesh.pp": 2}),
    "dp_shard 4": (4, {"mesh.dp_shard": 4}),
    "dp_shard 2, tp 2": (4, {"mesh.dp_shard": 2, "mesh.tp": 2}),
    "dp_shard 2, pp 2": (4, {"mesh.dp_shard": 2, "mesh.pp": 2}),
    "dp_replicate 2, dp_shard 4": (8, {"mesh.dp_replicate": 2, "mesh.dp_shard": 4}),
    "dp_shard 2, tp 2, pp 2": (8, {"mesh.dp_shard": 2, "mesh.tp": 2, "mesh.pp": 2}),
}


def main() -> None:
    """Measure, predict, train; print a table and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="times that each layout is measured; default: 2")
    parser.add_argument(
        "--steps", type=int, default=6, help=f"measured steps of each run, after {WARM_UP} warm-up steps"
    )
    parser.add_argument("--first", type=int, default=len(LAYOUTS), help="number of layouts, from the first")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each titan doctor run")
    args = parser.parse_args()
    layouts = dict(itertools.islice(LAYOUTS.items(), args.first))
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in layouts}
    for name in tqdm([*layouts] * args.rounds, disable=None):
        with tempfile.TemporaryDirectory() as folder:
            turns[name].append(_turn(folder, *layouts[name], args.seconds, args.steps))
    rows = {name: {"ranks": layouts[name][0], "turns": taken, **_compare(taken)} for name, taken in turns.items()}
    errors, right = [abs(row["error"]) for row in rows.values()], _ranked_right(list(rows.values()))
    _show(rows)
    print(f"\nabsolute error: mean {statistics.mean(errors):.1%}, largest {max(errors):.1%}")
    print(f"pairs of layouts ranked correctly: {sum(right)} of {len(right)}")
    print(results.write("doctor", {"layouts": rows, "pairs": len(right), "pairs_ranked_right": sum(right)}))


def _turn(folder: str, ranks: int, keys: Mapping[str, object], seconds: float, steps: int) -> dict[str, Any]:
    """One round of a layout: measure the machine, predict, train."""
    cluster = _examine(folder, ranks, seconds)
    samples = _train(folder, ranks, keys, steps)
    return {"predicted": _plan(cluster, ranks, keys), "samples_s": samples, "cluster": cluster.read_text()}


def _show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'':<30}{'ranks':>6}{'measured s':>12}{'spread':>8}{'predicted s':>13}{'error':>8}")
    for name, row in rows.items():
        print(f"{name:<30}{row['ranks']:>6}{row['measured_s']:>12.3f}{row['spread']:>8.0%}", end="")
        print(f"{row['predicted_s']:>13.3f}{row['error']:>+8.1%}")


def _compare(turns: list[dict[str, Any]]) -> dict[str, float]:
    samples = [second for turn in turns for second in turn["samples_s"]]
    measured = statistics.median(samples)
    predicted = statistics.median(float(turn["predicted"]["step_time_s"]) for turn in turns)
    spread = (max(samples) - min(samples)) / measured
    return {"predicted_s": predicted, "measured_s": measured, "spread": spread, "error": predicted / measured - 1}


def _ranked_right(rows: list[dict[str, Any]]) -> list[bool]:
    """Of each pair of layouts, whether the one predicted to be faster is."""
    pairs = itertools.combinations(rows, 2)
    return [(a["predicted_s"] < b["predicted_s"]) == (a["measured_s"] < b["measured_s"]) for a, b in pairs]


def _examine(folder: str, ranks: int, seconds: float) -> Path:
    path = Path(folder) / "cluster.toml"
    _titan(ranks, "doctor", "--seconds", str(seconds), "--output", str(path), "--json")
    return path


def _plan(cluster: Path, ranks: int, keys: Mapping[str, object]) -> dict[str, Any]:
    where = ["--config", "quickstart", "--cluster", str(cluster), "--world-size", str(ranks)]
    found: dict[str, Any] = json.loads(_titan(1, "plan", *where, "--json", *_overrides({**MODEL, **keys})))
    return {key: found[key] for key in ("step_time_s", "time_s")}


def _train(folder: str, ranks: int, keys: Mapping[str, object], steps: int) -> list[float]:
    """Seconds of each step after the warm-up."""
    own = {
        "run.dir": folder,
        "run.name": "run",
        "run.sample_prompt": "",
        "train.steps": WARM_UP + steps,
        "metrics.every": 1,
        "metrics.tensorboard.enabled": "false",
        "metrics.console.enabled": "false",
        "checkpoint.enabled": "false",
    }
    _titan(ranks, "train", "--config", "quickstart", *_overrides({**own, **MODEL, **keys}))
    rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["step_time_s"] for row in rows if "step_time_s" in row][WARM_UP:]


def _overrides(keys: Mapping[str, object]) -> list[str]:
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def _titan(ranks: int, *words: str) -> str:
    command = [sys.executable, "-m", "titan.cli", *words]
    done = subprocess.run(command, env={**os.environ, "NPROC": str(ranks)}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
