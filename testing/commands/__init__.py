"""Commands for authors of plugins, one module per command; `titan` finds them by the entry points `titan.commands`."""
