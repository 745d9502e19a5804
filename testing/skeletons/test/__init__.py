"""The test of each skeleton: what `titan plugins new` writes beside the plugin."""
