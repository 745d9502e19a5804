"""The commands of `titan`, a module each: `HELP`, `add_arguments(parser)` and `run(args)`."""
