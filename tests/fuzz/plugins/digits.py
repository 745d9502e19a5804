"""A tokenizer of few ids: ten digits and an end. It lets models have vocabularies smaller than 257."""

from collections.abc import Sequence
from dataclasses import dataclass

from titan.contracts import Tokenizer, register

END = 10


@dataclass(frozen=True, kw_only=True)
class Config:
    """No options."""


@register
class Digits(Tokenizer):
    """Decimal digits; everything else is left out."""

    name = "digits"
    Config = Config

    @property
    def vocab_size(self) -> int:
        return END + 1

    @property
    def end(self) -> int:
        return END

    @property
    def fingerprint(self) -> str:
        return "ten digits, 10 ends"

    def encode(self, text: str) -> list[int]:
        return [int(letter) for letter in text if letter in "0123456789"]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(str(number) for number in ids if number < END)
