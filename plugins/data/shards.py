"""Token shards that were written earlier.

`path` names shards, folders of them or globs: the files that `titan data prepare` writes and `titan data inspect`
shows. Their tokens are used as they are; an id outside the model's vocabulary stops the run when it is read.

Cost: nothing is copied; shards are memory-mapped.
Limit: a shard does not record its tokenizer, so a wrong one is detected only by ids outside the vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

from titan.contracts import REQUIRED, Dataset, option, register
from titan.data.tokens.files import as_list, find


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[data]`: which token shards are read."""

    path: str | tuple[str, ...] = option(REQUIRED, "token shards, folders (*.bin) or globs", path=True)


@register
class Shards(Dataset):
    """Token shards written earlier; memory-mapped, nothing is tokenized."""

    name = "shards"
    Config = Config

    def files(self) -> list[Path]:
        return find(as_list(self.config.path), ["*.bin"])

    def shards(self) -> list[Path] | None:
        """The files themselves: they hold tokens already, and are not tokenized."""
        return self.files()
