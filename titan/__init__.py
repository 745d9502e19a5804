"""titan: a PyTorch-native trainer for large language models. Start at docs/design.md."""

import os

__version__ = "0.1.0"

# OpenMP's threads give up their core soon when they wait. By default they spin, for long; on cores that others use too,
# a thread that spins keeps the one it waits for from running. A step of the quickstart on two cores, beside other work:
# 0.16 s, and up to 3.5 s with the default. The library reads this once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
