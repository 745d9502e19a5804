"""Text to tokens to samples to batches: token shards, one global order of samples, and the loader that reads it."""
