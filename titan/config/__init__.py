"""TOML to Job: strict, with every fault said at once."""

from titan.config.job import Job, Source
from titan.config.load import load_job, split_arguments
from titan.config.sections import (
    CheckpointSection,
    CommSection,
    DataSection,
    MetricsSection,
    RunSection,
    TrainSection,
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
    "load_job",
    "split_arguments",
]
