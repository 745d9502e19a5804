"""Text to token shards: files read, tokenized once, kept in a shared cache."""

import sys

from titan.data.tokens import bytepairs, exchange, files, shards

# Datasets and tokenizers written for titan 0.1 import these modules by names without `tokens`.
for _module in (bytepairs, exchange, files, shards):
    sys.modules.setdefault(f"titan.data.{_module.__name__.rpartition('.')[2]}", _module)
