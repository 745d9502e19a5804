"""Bytes as tokens.

The id of a token is the value of a UTF-8 byte, and 256 ends a document: 257 ids, nothing to load, and any text can be
encoded.
Cost: about three times the tokens of the built-in byte pairs on code. For tests, and for byte-level models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan.contracts import Tokenizer, register
from titan.data.tokens.bytepairs import hf_tokenizer

END = 256
END_NAME = "<|end|>"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[tokenizer]` with `name = "byte"`: there are none."""


@register
class Byte(Tokenizer):
    """UTF-8 bytes and an end id; nothing to load or train."""

    name = "byte"
    Config = Config

    @property
    def vocab_size(self) -> int:
        """257: the 256 byte values and the end id."""
        return END + 1

    @property
    def end(self) -> int:
        """256, the id that ends a document."""
        return END

    @property
    def fingerprint(self) -> str:
        """A constant: the encoding has no options."""
        return "utf-8 bytes, 256 ends"

    def encode(self, text: str) -> list[int]:
        """One id a byte; lone surrogates are encoded as a question mark."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes back to text; ids above 255 are nothing."""
        return bytes(number for number in ids if number < END).decode("utf-8", errors="replace")

    def hf_files(self) -> Mapping[str, Any] | None:
        """The tokenizer files for transformers: byte-level BPE without merges."""
        ranks = {bytes([number]): number for number in range(END)}
        return hf_tokenizer(ranks, pattern="", specials={END_NAME: END}, end=END_NAME)
