"""Half bytes as tokens: each byte of the UTF-8 text is two ids below 16, and 16 ends a document.

Cost: twice the tokens of bytes. Needs no file and no training.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from titan.contracts import Tokenizer, register

END = 16


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[tokenizer]` with `name = "example"`: there are none."""


@register
class Example(Tokenizer):
    """Half bytes: 17 ids."""

    name = "example"
    Config = Config

    @property
    def vocab_size(self) -> int:
        """The 16 values of half a byte, and the end."""
        return END + 1

    @property
    def end(self) -> int:
        """The id that ends a document."""
        return END

    @property
    def fingerprint(self) -> str:
        """Change it when the encoding changes: cached tokens are then made anew."""
        return "half bytes, the upper one first"

    def encode(self, text: str) -> list[int]:
        """Two ids per byte, the upper half first."""
        return [half for byte in text.encode("utf-8", errors="replace") for half in divmod(byte, 16)]

    def decode(self, ids: Sequence[int]) -> str:
        """Pairs of ids back to bytes. An end and a half without its other half are nothing."""
        halves = [number for number in ids if number < END]
        pairs = zip(halves[::2], halves[1::2], strict=False)
        return bytes(16 * upper + lower for upper, lower in pairs).decode("utf-8", errors="replace")
