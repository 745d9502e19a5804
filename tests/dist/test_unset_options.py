"""Ranks with devices of different sizes agree on the options that memory decides."""

import torch
import torch.distributed as dist

from tests.planned import job_of
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB, peak_bytes
from titan.ranks import process
from titan.testing.ranks import run_ranks
from titan.training import foresight

WORDS = ("--mesh.dp_shard", "2", "--train.global_batch_size", "8", "--train.micro_batch_size", "2")


def _chosen(sizes: tuple[float, ...]) -> int | None:
    number = dist.get_rank()
    process.total_gib = lambda device: sizes[number]
    job = foresight.settled(job_of(*WORDS), process.Rank(number, len(sizes), number, torch.device("cpu")))
    return next(t.config.zero_stage for t in job.techniques if hasattr(t.config, "zero_stage"))


def test_the_smallest_device_counts() -> None:
    job = job_of(*WORDS)
    gib = peak_bytes(costs_of(job), job.layout, DeviceMemory(0.0)) / GIB
    assert run_ranks(_chosen, 2, (1.1 * gib, 1.1 * gib)) == [None, None]
    assert run_ranks(_chosen, 2, (1.1 * gib, 0.9 * gib)) == [3, 3]
