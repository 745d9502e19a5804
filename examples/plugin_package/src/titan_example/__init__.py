"""Plugins of titan in a package of their own: one module each, which an entry point names."""
