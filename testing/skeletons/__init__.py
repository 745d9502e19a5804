"""A working plugin of each kind with its test, which `titan plugins new` copies under a name of the user's."""
