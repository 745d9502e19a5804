"""Measurements and checks for one CUDA device; `python -m bench.gpu --help`."""
