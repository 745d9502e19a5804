"""Measures devices and links of all ranks, finds outliers, and writes a cluster file."""
