"""What a run needs and how fast it will be, from its TOML and a description of the cluster."""

STUDIES = ("weak-scaling", "strong-scaling", "bubble", "tp", "pp", "recompute", "micro-batch")
"""What `titan plan --study` can vary; see `titan.planner.report.studies`."""
