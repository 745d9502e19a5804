"""Predictions as text, tables, plots and studies, and the closed-form formulas."""

STUDIES = ("weak-scaling", "strong-scaling", "bubble", "tp", "pp", "cp", "recompute", "micro-batch", "fabric")
"""Names of the studies of `titan plan --study`; see `titan.planner.report.studies`, and `fabric` for the last."""
