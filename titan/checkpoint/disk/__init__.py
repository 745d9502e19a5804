"""The files of a checkpoint: folder, manifest, metadata, tensor files; all are read as untrusted input."""
