"""Commands on trained weights, one module per command; `titan` finds them by the entry points `titan.commands`."""
