"""torchtitan 0.2.2, for `bench.peers`: its Trainer.train. Needs torchtitan and what it imports."""

import json
import sys

from bench.gpu.opponent import accept_cpu, be_alone, trainer_of
from bench.peers.turns import Waiting, share_cores


def main() -> None:
    """Train until stdin ends."""
    asked = json.loads(sys.argv[1])
    accept_cpu()
    if asked["ranks"] == 1:
        be_alone()
    share_cores(asked["ranks"])
    trainer = trainer_of(asked)
    trainer.dataloader = Waiting(trainer.dataloader)
    trainer.step = 1  # the first step would be logged
    trainer.train()


if __name__ == "__main__":
    main()
