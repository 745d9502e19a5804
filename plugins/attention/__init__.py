"""Which kernel computes attention."""
