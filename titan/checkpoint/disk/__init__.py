"""The files of a checkpoint, all read as untrusted input."""
