"""What a checkpoint is on disk: folder, manifest, metadata, tensor files; all of it read without trust."""
