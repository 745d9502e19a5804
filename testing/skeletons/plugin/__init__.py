"""A plugin called example of each kind: what `titan plugins new` copies under another name."""
