"""Layers that models share: attention, its key-value cache, and their costs."""
