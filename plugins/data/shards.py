"""Token shards that somebody has already made.

`path` names shards, folders of them or globs: the files that `titan data prepare` writes and `titan data inspect`
shows. Their tokens are taken as they are; an id beyond the model's vocabulary stops the run when it is read.

Cost: nothing is copied; shards are memory-mapped.
Limit: nobody can tell which tokenizer made them.
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
    """Token shards made before; memory-mapped, nothing is tokenized."""

    name = "shards"
    Config = Config

    def files(self) -> list[Path]:
        """The shards `path` means, those of a folder sorted."""
        return find(as_list(self.config.path), ["*.bin"])

    def shards(self) -> list[Path] | None:
        """The files themselves: they hold tokens already, and are not tokenized."""
        return self.files()
