"""What `[plugins.bytes_sent]` costs: host time of a collective that is counted, and of one that is not.

    python -m bench.sent_bytes [--calls 1000]

Two gloo ranks of this machine all-reduce four numbers over and over: as a run without the metric does, and as a step
with it does. The ways take turns of fifty calls, so that both meet the same machine. Prints the medians of rank 0.
"""

import argparse
import os
from statistics import median
from time import perf_counter
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch import multiprocessing

from titan.contracts import Mesh
from titan.contracts.base.mesh import Layout
from titan.plugins.observe.bytes_sent import BytesSent, Config

RANKS, TURN = 2, 50
WAYS = ("not counted", "counted")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000, help="collectives of each way")
    calls = parser.parse_args().calls
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.spawn(_measure, (calls,), nprocs=RANKS)


def _measure(rank: int, calls: int) -> None:
    """On one rank: all ways in turns; rank 0 prints."""
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    numbers, seconds = torch.ones(4), {way: [] for way in WAYS}
    for _ in range(0, calls, TURN):
        for way in WAYS:
            sent = BytesSent(Config())
            sent.apply(Mock(), Mock(mesh=Mesh(Layout((), {}), torch.device("cpu"), rank), in_step=True))
            if way == "counted":
                sent.load_state_dict({})
            for _ in range(TURN):
                began = perf_counter()
                dist.all_reduce(numbers)
                seconds[way].append(perf_counter() - began)
            sent.close()
    if rank == 0:
        without, counted = (1e6 * median(seconds[way]) for way in WAYS)
        print(f"{WAYS[0]} {without:.0f} us, {WAYS[1]} {counted:.0f} us: {counted - without:.0f} us per collective")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
