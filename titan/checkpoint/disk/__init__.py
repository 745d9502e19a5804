"""The files of a checkpoint: folder, manifest, metadata, tensor files; all are read as untrusted input.

What cannot be read, or is not what a save writes, raises a CheckpointError; an UnreadableError where the machine fails.
"""
