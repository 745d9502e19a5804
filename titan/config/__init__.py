"""TOML to Job: strict, with all faults reported at once."""

from titan.config.check import without_effect
from titan.config.job import Job
from titan.config.load import load_job, load_table
from titan.config.tables import said_of, split_arguments

__all__ = ["Job", "load_job", "load_table", "said_of", "split_arguments", "without_effect"]
