"""The dry run: builds and steps one rank of a job on meta tensors, without allocating memory."""

from titan.planner.dryrun.report import report
from titan.planner.dryrun.result import COMPONENTS, Allocation, CollectiveCount, DryRun, Flops, Peak, Point
from titan.planner.dryrun.run import dry_run

__all__ = ["COMPONENTS", "Allocation", "CollectiveCount", "DryRun", "Flops", "Peak", "Point", "dry_run", "report"]
