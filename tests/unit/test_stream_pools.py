"""Predicted memory that the allocator reserves: each stream has a pool, whose free blocks no other stream uses."""

from dataclasses import replace

import pytest

from tests.planned import CLUSTER, job_of
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB, memories
from titan.planner.step.predict import Planner

PIPED = ("--model.preset", "mini", "--mesh.pp", "2", "--mesh.dp_shard", "2", "--train.global_batch_size", "16")
PIPED += ("--train.micro_batch_size", "1", "--plugins.fsdp.zero_stage", "1")
BF16 = ("--plugins.bf16.enabled", "true")
FULL, SELECTIVE = (("--plugins.activation_checkpoint.mode", mode) for mode in ("full", "selective"))
B1 = ("--model.preset", "llama3-1b", "--model.tied", "false", *BF16, "--data.seq_len", "8192")
B3 = ("--model.preset", "llama3-3b", "--model.tied", "false", *BF16, "--data.seq_len", "4096")
B8 = ("--model.preset", "llama3-8b", "--model.n_layers", "8", "--model.tied", "false", *BF16, "--data.seq_len", "8192")
FOUR_TIMES = ("--train.global_batch_size", "4", "--train.micro_batch_size", "1")
ONCE = ("--train.global_batch_size", "1")
COMPILED = ("--plugins.compile.enabled", "true")
EAGER = ("--plugins.compile.enabled", "false")
STAGE_3 = ("--plugins.fsdp.zero_stage", "3")
RESERVED = {
    "1B": ((*B1, *ONCE, *COMPILED, *STAGE_3), 28.30, 33.26),
    "8B, 8 layers": ((*B8, *ONCE, *COMPILED, *STAGE_3), 44.50, 53.65),
    "3B, selective recomputation": ((*B3, *ONCE, *COMPILED, *SELECTIVE, *STAGE_3), 55.24, 64.43),
    "3B, selective, micro batches": ((*B3, *FOUR_TIMES, *COMPILED, *SELECTIVE, *STAGE_3), 63.85, 65.91),
    "cast: 1B": ((*B1, *ONCE, *COMPILED), 29.42, 30.43),
    "cast: 1B, micro batches": ((*B1, *FOUR_TIMES, *COMPILED), 35.00, 35.04),
    "cast: 8B, 8 layers": ((*B8, *ONCE, *COMPILED), 46.03, 47.71),
    "cast: 8B, 8 layers, micro batches": ((*B8, *FOUR_TIMES, *COMPILED), 56.09, 56.26),
    "cast: 1B, eager": ((*B1, *ONCE, *EAGER), 31.42, 32.48),
    "cast: 3B, full recomputation": ((*B3, *ONCE, *COMPILED, *FULL), 53.87, 55.30),
    "cast: 3B, selective recomputation": ((*B3, *ONCE, *COMPILED, *SELECTIVE), 54.39, 57.61),
    "cast: 3B, selective, micro batches": ((*B3, *FOUR_TIMES, *COMPILED, *SELECTIVE), 67.63, 67.73),
}
"""Jobs of one rank -> GiB at the peak of a step: allocated, and reserved in the pools of all streams.

From PyTorch 2.11's allocator with expandable segments, without a device.
"""


@pytest.mark.parametrize(("words", "allocated", "reserved"), RESERVED.values(), ids=RESERVED.keys())
def test_each_stream_reserves_its_own_peak(words: tuple[str, ...], allocated: float, reserved: float) -> None:
    job = job_of(*words)
    (planned,) = memories(costs_of(job), job.layout, DeviceMemory(79.1))
    assert planned.allocated / GIB == pytest.approx(allocated, rel=0.03)
    assert planned.reserved / GIB == pytest.approx(reserved, rel=0.03)
    assert planned.total == planned.reserved + 2 * GIB
    (one_pool,) = memories(costs_of(job), job.layout, DeviceMemory(79.1, stream_pools=False))
    assert one_pool.allocated == planned.allocated
    assert one_pool.cached == pytest.approx(0.02 * (one_pool.activations + one_pool.buffers))


@pytest.mark.parametrize(
    "words",
    [
        ("--mesh.dp_shard", "2", "--plugins.fsdp.zero_stage", "3"),
        ("--mesh.dp_shard", "2", "--mesh.dp_replicate", "2", "--plugins.fsdp.zero_stage", "3"),
        ("--mesh.dp_shard", "4", "--train.micro_batch_size", "2"),
        ("--mesh.pp", "2", "--mesh.dp_shard", "2", "--train.micro_batch_size", "1"),
    ],
    ids=["shards", "replicas", "micro batches", "stages"],
)
def test_pools_hold_no_less_than_tensors(words: tuple[str, ...]) -> None:
    job = job_of("--model.preset", "mini", "--train.global_batch_size", "16", *words)
    for planned in memories(costs_of(job), job.layout, DeviceMemory(79.1, fragmented=0.0)):
        assert planned.cached > 0


def test_without_fsdp_there_is_one_pool() -> None:
    job = job_of("--model.preset", "mini")
    (planned,) = memories(costs_of(job), job.layout, DeviceMemory(79.1, fragmented=0.0))
    assert costs_of(job).gather is None
    assert planned.cached == 0


def test_a_search_gives_a_stage_the_memory_that_a_plan_gives_it() -> None:
    """Though it prepares stages before it knows the schedule."""
    job = job_of(*PIPED)
    costs, planner = costs_of(job), Planner(CLUSTER)
    alone = replace(costs, pipeline_axis="")
    early = planner.draft(costs, job.layout, planner.stage_costs(alone, job.layout)).memory()
    assert early == Planner(CLUSTER).draft(costs, job.layout).memory()
