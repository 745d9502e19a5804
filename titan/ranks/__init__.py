"""Launching, joining, monitoring and ending the ranks of a run."""
