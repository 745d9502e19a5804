"""TOML to Job: strict, with all faults reported at once."""

from titan.config.check import without_effect
from titan.config.job import Job, Source
from titan.config.load import load_job, load_table, said_of
from titan.config.tables import split_arguments
from titan.contracts.sections import (
    CheckpointSection,
    CommSection,
    DataSection,
    MetricsSection,
    RunSection,
    TrainSection,
    ValidationSection,
)

__all__ = [
    "CheckpointSection",
    "CommSection",
    "DataSection",
    "Job",
    "MetricsSection",
    "RunSection",
    "Source",
    "TrainSection",
    "ValidationSection",
    "load_job",
    "load_table",
    "said_of",
    "split_arguments",
    "without_effect",
]
