"""Published measurements, read as jobs of the planner: rows, frameworks, fabrics, the fit and the report."""
