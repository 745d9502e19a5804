"""Token shards to batches: one global order of samples, packing, mixing, loading."""
