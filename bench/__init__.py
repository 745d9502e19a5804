"""Benchmarks and studies, a command each: `python -m bench.NAME --help`."""

import titan  # noqa: F401  how threads wait is set before a benchmark imports torch
