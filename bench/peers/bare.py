"""The loop that a researcher would write, for `bench.peers`: PyTorch's modules and optimizer, on one rank."""

import json
import sys

from titan.ranks.launcher import let_threads_sleep

let_threads_sleep()  # before torch is imported

import torch  # noqa: E402

from bench.overhead import bare_loop  # noqa: E402
from bench.peers.cases import batches  # noqa: E402
from bench.peers.titan import job_of  # noqa: E402
from bench.peers.turns import Waiting, share_cores  # noqa: E402
from titan.contracts import Batch  # noqa: E402


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
