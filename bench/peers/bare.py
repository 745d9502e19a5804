"""The loop that a researcher would write, for `bench.peers`: PyTorch's modules and optimizer, on one rank."""

import json
import sys

import torch

from bench.overhead import bare_loop
from bench.peers.cases import batches
from bench.peers.titan import job_of
from bench.peers.turns import Waiting, share_cores
from titan.contracts import Batch


def main() -> None:
    """Train until stdin ends."""
    asked = json.loads(sys.argv[1])
    share_cores(asked["ranks"])
    device = torch.device("cpu")
    bf16 = asked["dtype"] == "bfloat16"
    step = bare_loop(job_of(asked), device, bf16=bf16, compiled=bool(asked["backend"]))
    for tokens, labels in Waiting(batches(asked)):
        step([Batch(tokens, labels)])


if __name__ == "__main__":
    main()
