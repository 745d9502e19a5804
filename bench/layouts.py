"""Compare the quickstart's loss and gradient norm at many layouts with one rank: largest relative differences.

Rows with `ep` train the preset `moe-tiny` of `moe` in place of the quickstart's model, against one rank of it.
Resumed runs have twice the steps, or with experts as many: two scores of a token that are equal to within rounding
send it to another expert, and among the tokens of twenty steps there are such.

    python -m bench.layouts [--steps 10]
    python -m bench.layouts --only cp    # the layouts with this text in their names; writes no results

Every layout is a separate run through the launcher, on gloo ranks of this machine. The last rows train half of the
steps on one layout, resume on another, and train the other half there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tqdm import tqdm

from bench import results

SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
COMPILED = {"plugins.compile.enabled": "true"}
GATHER, ULYSSES = ({"plugins.context.method": method} for method in ("gather", "ulysses"))
EXPERTS = {"model.name": "moe", "model.preset": "moe-tiny"}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "dp_shard 2, tp 2, pp 2": (8, {"mesh.dp_shard": 2, "mesh.tp": 2, "mesh.pp": 2}),
    "tp 8": (8, {"mesh.tp": 8}),
    **{f"pp 4, {name}": (4, {"mesh.pp": 4, "plugins.pipeline.schedule": name}) for name in SCHEDULES},
    "dp_shard 3": (3, {"mesh.dp_shard": 3}),
    "hsdp 2x2": (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2}),
    "ddp 4": (4, {"mesh.dp_replicate": 4}),
    "activation checkpointing": (1, {"plugins.activation_checkpoint.mode": "full"}),
    "compile": (1, COMPILED),
    "compile, recompute selective, dp_shard 2, tp 2": (
        4,
        {**COMPILED, "plugins.activation_checkpoint.mode": "selective", "mesh.dp_shard": 2, "mesh.tp": 2},
    ),
    "cp 2, ring": (2, {"mesh.cp": 2}),
    "cp 4, ring": (4, {"mesh.cp": 4}),
    "cp 4, gather": (4, {"mesh.cp": 4, **GATHER}),
    "cp 4, ulysses": (4, {"mesh.cp": 4, **ULYSSES}),
    "cp 2, tp 2, ulysses": (4, {"mesh.cp": 2, "mesh.tp": 2, **ULYSSES}),
    "ddp 2, cp 2, gather": (4, {"mesh.dp_replicate": 2, "mesh.cp": 2, **GATHER}),
    "dp_shard 2, cp 2, tp 2": (8, {"mesh.dp_shard": 2, "mesh.cp": 2, "mesh.tp": 2}),
    "cp 2, pp 2": (4, {"mesh.cp": 2, "mesh.pp": 2}),
    "ep 2 of dp_shard 2": (2, {**EXPERTS, "mesh.dp_shard": 2, "mesh.ep": 2}),
    "ep 2 of dp_shard 4": (4, {**EXPERTS, "mesh.dp_shard": 4, "mesh.ep": 2}),
    "ep 4 of dp_shard 4": (4, {**EXPERTS, "mesh.dp_shard": 4, "mesh.ep": 4}),
    "ep 4 of dp_shard 2, cp 2": (4, {**EXPERTS, "mesh.dp_shard": 2, "mesh.cp": 2, "mesh.ep": 4}),
    "ep 2, dp_shard 2, tp 2": (4, {**EXPERTS, "mesh.dp_shard": 2, "mesh.ep": 2, "mesh.tp": 2}),
    "ep 2, dp_shard 2, pp 2": (4, {**EXPERTS, "mesh.dp_shard": 2, "mesh.ep": 2, "mesh.pp": 2}),
}
ENDS = {
    **LAYOUTS,
    "one rank": (1, {}),
    "dp_shard 2, tp 2": (4, {"mesh.dp_shard": 2, "mesh.tp": 2}),
    "pp 2, dp_shard 2": (4, {"mesh.pp": 2, "mesh.dp_shard": 2}),
    "one rank of experts": (1, EXPERTS),
}
"""What a resumed run may begin or end with."""
RESUMED = {
    "one rank, then dp_shard 2, tp 2, pp 2": ("one rank", "dp_shard 2, tp 2, pp 2"),
    "dp_shard 2, tp 2, pp 2, then ddp 4": ("dp_shard 2, tp 2, pp 2", "ddp 4"),
    "pp 4, 1F1B, then dp_shard 3": ("pp 4, 1F1B", "dp_shard 3"),
    "tp 8, then one rank": ("tp 8", "one rank"),
    "cp 4, ring, then dp_shard 2, tp 2": ("cp 4, ring", "dp_shard 2, tp 2"),
    "pp 2, dp_shard 2, then cp 2, tp 2, ulysses": ("pp 2, dp_shard 2", "cp 2, tp 2, ulysses"),
    "ep 4, then one rank": ("ep 4 of dp_shard 4", "one rank of experts"),
    "one rank, then ep 4": ("one rank of experts", "ep 4 of dp_shard 4"),
}
Curve = dict[int, tuple[float, float]]


def main() -> None:
    """Run all layouts, print a row per layout, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of each run; see above for resumed ones")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="layouts with this in their names")
    given = parser.parse_args()
    steps = given.steps
    chosen = [name for name in (*LAYOUTS, *RESUMED) if not given.only or any(part in name for part in given.only)]
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:

        @cache
        def reference(experts: bool, steps: int) -> Curve:
            return _train(folder, f"reference-{experts}-{steps}", 1, EXPERTS if experts else {}, steps)

        for name in tqdm(chosen, disable=None):
            if name in LAYOUTS:
                ends, whole = [LAYOUTS[name]], steps
            else:
                ends = [ENDS[end] for end in RESUMED[name]]
                whole = steps if _has_experts(ends[0]) else 2 * steps
                _train(folder, name, *ends[0], whole // 2)
            found = _train(folder, name, *ends[-1], whole)
            rows[name] = _compare(reference(_has_experts(ends[-1]), whole), found)
    for name, row in rows.items():
        print(f"{name:<48} loss {row['loss']:.1e}   gradient norm {row['grad_norm']:.1e}")
    if not given.only:
        print(results.write("layouts", {"steps": steps, "largest_relative_difference": rows}))


def _has_experts(end: tuple[int, dict[str, object]]) -> bool:
    return "model.name" in end[1]


def _train(folder: str, name: str, ranks: int, keys: dict[str, object], steps: int) -> Curve:
    """Train the quickstart, or go on with it where this name has trained before."""
    own = {
        "run.dir": folder,
        "run.name": name,
        "run.sample_prompt": "",
        "train.steps": steps,
        "metrics.every": 1,
        "metrics.tensorboard.enabled": "false",
        "plugins.bf16.enabled": "false",
        **keys,
    }
    words = [word for key, value in own.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "titan.launch", *words]
    done = subprocess.run(command, env={**os.environ, "NPROC": str(ranks)}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}\n{done.stderr}")
    rows = [json.loads(line) for line in (Path(folder) / name / "metrics.jsonl").read_text().splitlines()]
    curve = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}
    assert sorted(curve) == list(range(1, steps + 1)), f"{name}: rows of steps {sorted(curve)}"
    return curve


def _compare(reference: Curve, other: Curve) -> dict[str, float]:
    def worst(at: int) -> float:
        return max(abs(other[step][at] / reference[step][at] - 1) for step in reference)

    return {"loss": worst(0), "grad_norm": worst(1)}


if __name__ == "__main__":
    main()
