"""What techniques gain on H200s, by counting: step time and memory that `titan plan` computes from bytes and FLOPs.

    python -m bench.counted

Nothing is measured. Each table is one job with and without a technique; its first row is the plain way, to which the
others are relative. The rates of the device are those of configs/clusters/h200.toml.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import results
from bench.headlines import counted
from bench.savings import Words, float8, offload, pure, recompute, words
from titan.config import load_job
from titan.planner.machine import cluster
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner

CONFIG = Path(__file__).parent / "gpu" / "speed.toml"
PACKED = words(data__packing="document_mask")


def model(preset: str, tokens: int, batch: int = 1, **more: object) -> list[str]:
    """Of a Llama on sequences of so many tokens, so many of them per micro batch."""
    batches = {"train__global_batch_size": batch, "train__micro_batch_size": batch}
    return words(model__preset=preset, model__tied="false", data__seq_len=tokens, **{**batches, **more})


B1, B3, B8 = model("llama3-1b", 8192), model("llama3-3b", 4096), model("llama3-8b", 8192, mesh__tp=8)

TABLES: Mapping[str, tuple[int, Words, Mapping[str, Words]]] = {
    "1B, 8,192 tokens, one GPU": (
        1,
        B1,
        {
            "plain": [],
            "all logits at once": words(loss__chunk_tokens=8192),
            "not compiled": words(plugins__compile__enabled="false"),
            "activation_checkpoint, selective": recompute("selective"),
            "activation_checkpoint, full": recompute("full"),
            "adamw_8bit": words(optimizer__name="adamw_8bit"),
            "pure, nearest": pure("nearest"),
            "pure, stochastic": pure("stochastic"),
            "offload, optimizer": offload(optimizer=True),
            "offload, activations": offload(optimizer=False, activations=True),
            "muon": words(optimizer__name="muon"),
        },
    ),
    "1B, 64 tokens, without clipping, one GPU": (
        1,
        model("llama3-1b", 64, train__grad_clip=0),
        {"plain": [], "update_in_backward": words(plugins__update_in_backward__enabled="true")},
    ),
    "1B, packed documents of 8,192 tokens, one GPU": (
        1,
        [*B1, *PACKED],
        {"a mask": words(plugins__attention__enabled="false"), "varlen": words(plugins__attention__backend="varlen")},
    ),
    "3B, 4,096 tokens, one GPU": (
        1,
        B3,
        {
            "bf16": [],
            "float8, tensorwise": float8("tensorwise"),
            "float8, rowwise": float8("rowwise"),
            "float8, rowwise_with_gw_hp": float8("rowwise_with_gw_hp"),
        },
    ),
    "8B, 8,192 tokens, tensor parallel over 8": (
        8,
        B8,
        {"plain": [], "async_tp": words(plugins__tensor__async_tp="true")},
    ),
}
"""Table -> (GPUs, words of all its jobs, job -> its own words)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Count all tables, print them, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    tables = {
        name: {job: predicted([*shared, *own], ranks) for job, own in jobs.items()}
        for name, (ranks, shared, jobs) in TABLES.items()
    }
    for name, rows in tables.items():
        print(f"\n{name}")
        for job, (time, memory) in counted(rows).items():
            print(f"{job:40} time {time:.2f}, memory {memory:.2f}")
    print(results.write("counted", {"cluster": "h200", "tables": tables}))


def predicted(own: Words, ranks: int) -> dict[str, float]:
    """Seconds per step, and GiB of the fullest rank, by the plan."""
    job = load_job(CONFIG, own, ranks)
    step = Planner(cluster.load("h200")).predict(costs_of(job), job.layout)
    return {"seconds": step.step_time_s, "gib": max(memory.total for memory in step.memory) / 2**30}


if __name__ == "__main__":
    main()
