"""Measures the ranks at hand: what their devices compute and move, what the links between them carry, which are odd."""
