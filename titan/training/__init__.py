"""Building a run from a job, and training it."""
