"""Commands on what runs have left, one module per command; `titan` finds them by the entry points `titan.commands`."""
