"""Byte-pair encoding over bytes, with ranks from a file.

Text is cut into words, digits and punctuation, and within each piece the adjacent pair of lowest rank is merged first
(Sennrich et al. 2016; over bytes as in GPT-2). A file of 4,096 ranks, trained on the Python standard library's source,
is built in; `titan data train-tokenizer` trains others. The id after the last rank ends a document, so the vocabulary
has one id more than there are ranks: 4,097 with the built-in file.

Cost: about 3 bytes of Python source per token with the built-in ranks; one core encodes several MB per second.
Limit: the split pattern is fixed; ranks that were trained with another pattern need another tokenizer plugin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titan.contracts import Tokenizer, option, register
from titan.data.tokens.bytepairs import PATTERN, BytePairs, published_family, read_ranks
from titan.errors import DataError
from titan.paths import expanded

BUILT_IN = Path(__file__).with_name("bpe4096.tiktoken")
END = "<|end|>"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[tokenizer]`: which rank file is used."""

    path: str = option(
        "", "rank file, one line per token: its bytes in base64, a space, its rank; empty: the built-in one", path=True
    )


@register
class Bpe(Tokenizer):
    """Byte-pair encoding; 4,096 ranks are built in, `path` sets another rank file."""

    name = "bpe"
    Config = Config
    default = True

    @cached_property
    def _pairs(self) -> BytePairs:
        ranks = read_ranks(expanded(self.config.path, "tokenizer.path") if self.config.path else BUILT_IN)
        if family := published_family(ranks):
            what = f"has the ranks of {family}, which have a split pattern and an end of their own"
            raise DataError(f"{self.config.path} {what}; set tokenizer.name to a reader of published rank files")
        return BytePairs(ranks, pattern=PATTERN, specials={END: len(ranks)}, end=END)

    @property
    def vocab_size(self) -> int:
        """Number of ids: one per rank, and the end id."""
        return self._pairs.vocab_size

    @property
    def end(self) -> int:
        """The end-of-document id: the one after the last rank."""
        return self._pairs.end

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the ranks, the split pattern and the special tokens."""
        return self._pairs.fingerprint

    def encode(self, text: str) -> list[int]:
        return self._pairs.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; broken UTF-8 becomes the replacement character."""
        return self._pairs.decode(ids)

    def hf_files(self) -> Mapping[str, Any] | None:
        """The tokenizer files for transformers, with the ranks written as BPE merges."""
        return self._pairs.hf_files()
