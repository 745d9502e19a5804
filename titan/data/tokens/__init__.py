"""Text to token shards: files read, tokenised once, kept in a shared cache."""
