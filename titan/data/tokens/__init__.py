"""Text to token shards: files read, tokenized once, kept in a shared cache."""
