"""Predictions shown: words, pictures, studies, closed forms."""

STUDIES = ("weak-scaling", "strong-scaling", "bubble", "tp", "pp", "recompute", "micro-batch")
"""What `titan plan --study` can vary; see `titan.planner.report.studies`."""
