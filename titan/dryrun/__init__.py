"""A job's step rehearsed: one rank of many, on this CPU, with shapes instead of numbers."""

from titan.dryrun.report import report
from titan.dryrun.result import COMPONENTS, Allocation, CollectiveCount, DryRun, Flops, Peak, Point
from titan.dryrun.run import dry_run

__all__ = ["COMPONENTS", "Allocation", "CollectiveCount", "DryRun", "Flops", "Peak", "Point", "dry_run", "report"]
