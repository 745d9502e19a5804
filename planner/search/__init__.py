"""The search space of layouts of a job, and the search for the best ones."""
