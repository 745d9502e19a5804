"""What a job of thousands of ranks asks of its machine: sockets, opens of token shards, time for checkpoints.

    python -m bench.scale [--ranks 2048]

Sockets and opens are counted on 8 ranks of this machine. Planning and loading a checkpoint are timed for a faked 65 B
job on --ranks ranks: what rank 0 does, through titan's index and through PyTorch's DCP. Takes a few minutes on two
cores. Prints each figure; writes all of them under bench/results.
"""

import argparse
import json

from bench import results
from bench.scale import checkpoint, shards, sockets

SMALL = 8
SHARDS = 32


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2048, help="of the faked job; a multiple of 512 (default: 2048)")
    ranks = parser.parse_args().ranks
    if ranks < checkpoint.LEAST or ranks % checkpoint.LEAST:
        parser.error(f"--ranks {ranks} is not a multiple of {checkpoint.LEAST}")
    opens = shards.measure(SMALL, SHARDS)  # first: its ranks need a fork server that has imported what they use
    found = {
        "sockets": sockets.measure(SMALL),
        "shards": opens,
        "checkpoint": {"ranks": ranks, "fraction": checkpoint.FRACTION, **checkpoint.measure(ranks)},
    }
    print(json.dumps(found, indent=1))
    print(f"written: {results.write('scale', found)}")


if __name__ == "__main__":
    main()
