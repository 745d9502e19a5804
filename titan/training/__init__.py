"""A job wired to a run, and the run trained."""
