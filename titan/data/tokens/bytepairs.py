"""Byte-pair rank files, encoding with them, and the same as files of Hugging Face. For tokenizer plugins.

A rank file has one line per token: its bytes in base64, a space, its rank (which is its id). Byte-pair encoding
(Sennrich et al. 2016, over bytes as in GPT-2) splits text by a pattern and merges, within each piece, the adjacent
pair of lowest rank first.

Hugging Face's BPE model has a vocabulary in which each byte is one visible character (GPT-2), and an ordered list of
merges, pairs of tokens. Ranks imply the merges: two adjacent tokens may merge if the result has a rank, lowest first.
So each way to split a token into two tokens is a merge, as in the files published for Llama 3.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.data.tokens.files import reading
from titan.errors import DataError
from titan.packages import install
from titan.paths import refuse_lfs_pointer

if TYPE_CHECKING:
    import tiktoken

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How text is cut before bytes are merged: words with one leading mark, up to three digits, punctuation, space."""

PUBLISHED = {128_000: "llama3", 50_256: "gpt2", 100_256: "cl100k", 199_998: "o200k"}
"""Number of ranks -> family of published rank files."""

LONGEST_BLANK = 16_384
"""Blank characters encoded at once: the pattern's engine gives up somewhere below a million of them."""

_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank, as a rank file has them. DataError: no such file, a line that is no token and rank (file and line
    named), a rank given twice or left out, one of the 256 bytes without a rank."""
    refuse_lfs_pointer(path)
    with reading(f"rank file {path}"):
        lines = path.read_bytes().splitlines()
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            code, digits = line.split()
            token, rank = base64.b64decode(code, validate=True), int(digits)
        except ValueError:
            raise DataError(f"{path}:{number}: {line[:40]!r} is not a token in base64, a space and its rank") from None
        if rank in seen or token in ranks:
            again = f"rank {rank}" if rank in seen else f"token {token!r}"
            raise DataError(f"{path}:{number}: {again} appears twice")
        ranks[token] = rank
        seen.add(rank)
    if not ranks:
        raise DataError(f"rank file {path} is empty")
    if max(seen) != len(seen) - 1:
        absent = next(rank for rank in range(len(seen)) if rank not in seen)
        raise DataError(f"rank file {path} is cut short: {len(seen)} ranks up to {max(seen)}, without {absent}")
    if without := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise DataError(f"rank file {path} has no rank for {len(without)} of 256 bytes, the first of them {without[0]}")
    return ranks


def published_family(ranks: Mapping[bytes, int]) -> str | None:
    """The family of published files that ranks are of, which number bytes as GPT-2 did, those that can be seen first;
    None for others, as those that titan trains."""
    return PUBLISHED.get(len(ranks)) if ranks.get(b"!") == 0 else None


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Write a rank file, lowest rank first."""
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in by_rank))


def train_ranks(texts: Iterable[str], size: int) -> dict[bytes, int]:
    """The `size` ranks that byte-pair training finds in some texts: 256 bytes, then merges, most frequent pair first.
    DataError: the `rustbpe` package is missing, or the texts have too few different pairs."""
    try:
        import rustbpe  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise DataError(f"training a tokenizer needs the rustbpe package: {install('tokenizer')}") from None
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), size, pattern=PATTERN)
    ranks = {bytes(token): int(rank) for token, rank in trainer.get_mergeable_ranks()}
    if len(ranks) < size:
        raise DataError(f"the text gives {len(ranks)} ranks, not {size}; train on more text, or reduce --size")
    return ranks


class BytePairs:
    """Ranks, a pattern and special tokens. Text never becomes a special token, whatever it says. specials: name -> id,
    above all ranks, gaps allowed.  end: name of the special that ends a document."""

    def __init__(self, ranks: Mapping[bytes, int], *, pattern: str, specials: Mapping[str, int], end: str) -> None:
        assert min(specials.values()) >= len(ranks)
        self._ranks, self._pattern, self._specials = ranks, pattern, specials
        self.end, self._end_name = specials[end], end
        self.vocab_size = max(specials.values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Of all that decides which ids a text gets."""
        by_rank = sorted(self._ranks.items(), key=lambda item: item[1])
        parts = (by_rank, self._pattern, sorted(self._specials.items()), self.end)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken

        return tiktoken.Encoding(
            "titan", pat_str=self._pattern, mergeable_ranks=dict(self._ranks), special_tokens=dict(self._specials)
        )

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        names = {number: name.encode() for name, number in self._specials.items()}
        return {rank: token for token, rank in self._ranks.items()} | names | {self.end: b""}

    def encode(self, text: str) -> list[int]:
        """Ids of a text; lone surrogates are encoded as the replacement character."""
        if len(text) < LONGEST_BLANK:
            return self._encoding.encode_ordinary(text)
        return [number for piece in _split_blanks(text) for number in self._encoding.encode_ordinary(piece)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids: nothing for the end id, other specials by name, a replacement character for what is no id."""
        return b"".join(self._bytes.get(number, _UNKNOWN) for number in ids).decode("utf-8", errors="replace")

    def hf_files(self) -> Mapping[str, Any] | None:
        """As `Tokenizer.hf_files`; only more than LONGEST_BLANK / 2 blanks in a row, cut here, get other ids there."""
        return hf_tokenizer(self._ranks, pattern=self._pattern, specials=self._specials, end=self._end_name)


def _split_blanks(text: str) -> Iterator[str]:
    """Cut a long text so that no piece has more than LONGEST_BLANK blanks in a row; nearly always the text as it is."""
    half, start = LONGEST_BLANK // 2, 0
    for at in range(0, len(text), half):
        if text[at : at + half].isspace():
            yield from (piece for piece in (text[start:at], text[at : at + half]) if piece)
            start = at + half
    if start < len(text):
        yield text[start:]


_SEEN, _NEXT = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}, iter(range(0x100, 0x200))
_ALPHABET = [chr(byte if byte in _SEEN else next(_NEXT)) for byte in range(256)]
"""The character of each byte: its own Latin-1 one where that can be seen, else the next one from U+0100 on."""


def hf_tokenizer(
    ranks: Mapping[bytes, int], *, pattern: str, specials: Mapping[str, int], end: str
) -> Mapping[str, Any] | None:
    """File name -> JSON value of a Hugging Face tokenizer that gives text the same ids as these ranks.

    pattern: how text is cut before bytes are merged; empty: not at all.  specials: name -> id, above all ranks; an id
    left out between them gets a name, for theirs have no gaps.  end: the special that ends a document. The result is
    None where a special's name is a token of ordinary text too: the library has one id for each name.
    """
    if any(name.encode() in ranks for name in specials):
        return None
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    names = {number: name for name, number in specials.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    # All ids up to the last special: the library counts them itself and looks at no number in the file.
    added = range(len(ranks), max(names) + 1)
    written = {token: "".join(_ALPHABET[byte] for byte in token) for token in sorted(ranks, key=ranks.__getitem__)}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,  # a piece of text that is a token becomes it, even where no merges lead there
        "vocab": {name: ranks[token] for token, name in written.items()},
        "merges": [
            f"{written[token[:at]]} {written[token[at:]]}"
            for token in written
            for at in range(1, len(token))
            if token[:at] in written and token[at:] in written
        ],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": names.get(i, f"<|unused_{i}|>"), **flags} for i in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]} if pattern else level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": about}
