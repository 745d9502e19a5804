"""Published byte-pair vocabularies, read from their rank files.

Reads the rank file as published - Llama 3's `tokenizer.model`, GPT-2's `r50k_base.tiktoken`,
`cl100k_base.tiktoken`, `o200k_base.tiktoken` - and adds what the file lacks: the split pattern and the special tokens.
Nothing is downloaded; the file must exist.

The number of ranks tells which of them a file is.

    pattern   ranks     specials (id = ranks + offset)                         vocabulary   ends a document
    llama3    128,000   256: begin_of_text, end_of_text, ..., reserved           128,256    <|end_of_text|>, 128001
    gpt2       50,256   <|endoftext|>                                             50,257    <|endoftext|>, 50256
    cl100k    100,256   <|endoftext|>, three fim_*, <|endofprompt|>              100,277    <|endoftext|>, 100257
    o200k     199,998   <|endoftext|>, <|endofprompt|>                           200,019    <|endoftext|>, 199999

Cost: a fifth of a second to load 128,000 ranks; one core encodes several MB per second.
Limit: no begin-of-text id is put before a document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from titan.contracts import REQUIRED, Tokenizer, option, register
from titan.data.tokens.bytepairs import PUBLISHED, BytePairs, published_family, read_ranks
from titan.errors import DataError
from titan.paths import expanded


@dataclass(frozen=True)
class Family:
    """What a vocabulary's makers published beside its ranks. specials: name -> id, counted from the number of ranks."""

    pattern: str
    specials: Mapping[str, int]
    end: str


_LLAMA3_NAMED = {
    0: "begin_of_text",
    1: "end_of_text",
    4: "finetune_right_pad_id",
    5: "step_id",
    6: "start_header_id",
    7: "end_header_id",
    8: "eom_id",
    9: "eot_id",
    10: "python_tag",
}
_LLAMA3_RESERVED = [offset for offset in range(256) if offset not in _LLAMA3_NAMED]
_LLAMA3_SPECIALS = {f"<|{name}|>": offset for offset, name in _LLAMA3_NAMED.items()} | {
    f"<|reserved_special_token_{number}|>": offset for number, offset in enumerate(_LLAMA3_RESERVED)
}
_FIM = {"<|fim_prefix|>": 2, "<|fim_middle|>": 3, "<|fim_suffix|>": 4}
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"

FAMILIES = {
    "llama3": Family(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}",
        _LLAMA3_SPECIALS,
        "<|end_of_text|>",
    ),
    "gpt2": Family(
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        {"<|endoftext|>": 0},
        "<|endoftext|>",
    ),
    "cl100k": Family(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}",
        {"<|endoftext|>": 1, **_FIM, "<|endofprompt|>": 20},
        "<|endoftext|>",
    ),
    "o200k": Family(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}",
        {"<|endoftext|>": 1, "<|endofprompt|>": 20},
        "<|endoftext|>",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `[tokenizer]`: the rank file, and its model family."""

    path: str = option(REQUIRED, "rank file", path=True)
    pattern: Literal["auto", "llama3", "gpt2", "cl100k", "o200k"] = option(
        "auto",
        "model family of the rank file; sets the split pattern and the special tokens; auto: by the number of ranks",
    )


@register
class Tiktoken(Tokenizer):
    """Published rank files: Llama 3, GPT-2, cl100k, o200k; offline."""

    name = "tiktoken"
    Config = Config

    @cached_property
    def _pairs(self) -> BytePairs:
        ranks = read_ranks(expanded(self.config.path, "tokenizer.path"))
        family = FAMILIES[_family(self.config.path, self.config.pattern, ranks)]
        specials = {name: len(ranks) + offset for name, offset in family.specials.items()}
        return BytePairs(ranks, pattern=family.pattern, specials=specials, end=family.end)

    @property
    def vocab_size(self) -> int:
        """Number of ids: ranks, special tokens, and reserved ids in between."""
        return self._pairs.vocab_size

    @property
    def end(self) -> int:
        return self._pairs.end

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the ranks, the split pattern and the special tokens."""
        return self._pairs.fingerprint

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the end id; special tokens in it are ordinary text."""
        return self._pairs.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; broken UTF-8 becomes the replacement character."""
        return self._pairs.decode(ids)

    def hf_files(self) -> Mapping[str, Any] | None:
        """The tokenizer files for transformers, with the ranks written as BPE merges."""
        return self._pairs.hf_files()


def _family(path: str, asked: str, ranks: Mapping[bytes, int]) -> str:
    """The family of a rank file.

    Raises:
        DataError: it is of no known family and none is asked for, or of another one than is asked for.
    """
    family = published_family(ranks)
    if asked == "auto" and family is None:
        known = ", ".join(f"{name} {count:,}" for count, name in PUBLISHED.items())
        raise DataError(f"{path}: its {len(ranks):,} ranks are of no known family ({known}); set tokenizer.pattern")
    if asked not in ("auto", family) and family is not None:
        raise DataError(f"{path} has the ranks of {family}, but tokenizer.pattern = {asked!r}")
    return family or asked
