"""Commands of the planner, one module per command; `titan` finds them by the entry points `titan.commands`."""
