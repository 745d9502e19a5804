"""Tokenizers: text survives, special words are text, broken rank files are named by line."""

import base64
from pathlib import Path

import pytest

from titan.data.tokens.bytepairs import LONGEST_BLANK, PATTERN, BytePairs, read_ranks, train_ranks, write_ranks
from titan.errors import DataError
from titan.plugins.tokenizers import bpe, byte, tiktoken

TEXTS = [
    "def f(x):\n    return x**2  # squared\n\n\n",
    "Größe, 東京, \N{GRINNING FACE}, e\u0301",
    " \t \r\n mixed   blanks \u00a0 ",
    "123456 1,234.5e-10",
    "\x00\x01 control",
    "",
]


def rank_file(path: Path, merges: tuple[bytes, ...] = (b"th", b"the", b" the")) -> Path:
    write_ranks(path, {token: rank for rank, token in enumerate([*(bytes([n]) for n in range(256)), *merges])})
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return rank_file(tmp_path / "small.tiktoken")


def llama(path: Path, pattern: str = "llama3") -> tiktoken.Tiktoken:
    return tiktoken.Tiktoken(tiktoken.Config(path=str(path), pattern=pattern))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trips(small: Path, text: str) -> None:
    for tokenizer in (byte.Byte(byte.Config()), bpe.Bpe(bpe.Config()), *(llama(small, p) for p in tiktoken.FAMILIES)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.decode([*ids, tokenizer.end]) == text
        assert all(0 <= number < tokenizer.vocab_size for number in ids) and tokenizer.end not in ids


def test_sizes() -> None:
    bytes_, built_in = byte.Byte(byte.Config()), bpe.Bpe(bpe.Config())
    assert (bytes_.vocab_size, bytes_.end) == (257, 256)
    assert (built_in.vocab_size, built_in.end) == (4097, 4096)
    assert len(built_in.encode("import os\nfor name in names:\n    print(name)\n")) < 16


def test_lower_ranks_merge_first(small: Path) -> None:
    tokenizer = bpe.Bpe(bpe.Config(path=str(small)))
    assert tokenizer.encode("the the thaw") == [257, 258, 32, 256, ord("a"), ord("w")]
    assert (tokenizer.vocab_size, tokenizer.end) == (260, 259)


@pytest.mark.parametrize(
    ("pattern", "vocab_size", "end"),
    [("llama3", 128_256, 128_001), ("gpt2", 50_257, 50_256), ("cl100k", 100_277, 100_257), ("o200k", 200_019, 199_999)],
)
def test_published_sizes(monkeypatch: pytest.MonkeyPatch, pattern: str, vocab_size: int, end: int) -> None:
    counts = {"llama3": 128_000, "gpt2": 50_256, "cl100k": 100_256, "o200k": 199_998}
    ranks = {number.to_bytes(4, "big"): number for number in range(counts[pattern])}
    monkeypatch.setattr(tiktoken, "read_ranks", lambda path: ranks)
    tokenizer = llama(Path("unread"), pattern)
    assert (tokenizer.vocab_size, tokenizer.end) == (vocab_size, end)


def test_the_ranks_tell_the_family(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"its 259 ranks are of no known family \(llama3 128,000, .*set tokeni"):
        _ = llama(small, "auto").end
    ranks = {b"!": 0, **{number.to_bytes(4, "big"): number for number in range(1, 100_256)}}
    for module in (tiktoken, bpe):
        monkeypatch.setattr(module, "read_ranks", lambda path: ranks)
    assert tiktoken.Tiktoken(tiktoken.Config(path="cl100k_base.tiktoken")).end == 100_257
    with pytest.raises(DataError, match=r"has the ranks of cl100k, but tokenizer.pattern = 'llama3'"):
        _ = llama(Path("cl100k_base.tiktoken")).end
    with pytest.raises(DataError, match=r"has the ranks of cl100k, which have .* set tokenizer.name to a reader of"):
        _ = bpe.Bpe(bpe.Config(path="cl100k_base.tiktoken")).end


def test_llama3_specials() -> None:
    specials = tiktoken.FAMILIES["llama3"].specials
    assert sorted(specials.values()) == list(range(256))
    assert (specials["<|begin_of_text|>"], specials["<|eot_id|>"], specials["<|python_tag|>"]) == (0, 9, 10)
    assert (specials["<|reserved_special_token_0|>"], specials["<|reserved_special_token_246|>"]) == (2, 255)


@pytest.mark.parametrize("word", ["<|end|>", "<|end_of_text|>", "<|begin_of_text|>", "<|endoftext|>", "<|fim_prefix|>"])
def test_special_words_are_ordinary_text(small: Path, word: str) -> None:
    for tokenizer in (bpe.Bpe(bpe.Config()), *(llama(small, pattern) for pattern in tiktoken.FAMILIES)):
        limit = tokenizer.end if tokenizer.name == "bpe" else 259
        ids = tokenizer.encode(f"a{word}b")
        assert max(ids) < limit and tokenizer.decode(ids) == f"a{word}b"


def test_what_is_no_text_still_decodes(small: Path) -> None:
    tokenizer = bpe.Bpe(bpe.Config(path=str(small)))
    assert tokenizer.decode([0xE6, 0x9D]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode([ord("a"), 5000, ord("b"), tokenizer.end]) == "a\N{REPLACEMENT CHARACTER}b"
    assert llama(small).decode([259, ord("a")]) == "<|begin_of_text|>a"
    assert byte.Byte(byte.Config()).decode([ord("a"), 256, 300]) == "a"


def test_lone_surrogates_are_encoded_somehow() -> None:
    assert byte.Byte(byte.Config()).decode(byte.Byte(byte.Config()).encode("a\ud800b")) == "a?b"
    built_in = bpe.Bpe(bpe.Config())
    assert built_in.decode(built_in.encode("a\ud800b")) == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize("blank", [" ", "\t\N{EM SPACE}"])
def test_a_million_blanks_are_no_problem(small: Path, blank: str) -> None:
    text = "x" + blank * (1_000_000 // len(blank)) + "y the"
    for pattern in ("llama3", "gpt2"):
        tokenizer = llama(small, pattern)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_text_is_encoded_as_one_where_blanks_are_short(small: Path) -> None:
    tokenizer = BytePairs(read_ranks(small), pattern=PATTERN, specials={"<|end|>": 259}, end="<|end|>")
    text = ("the  thaw \n\n" * 17 + " " * 5000 + "the\n") * 12
    assert len(text) > 3 * LONGEST_BLANK
    assert tokenizer.encode(text) == tokenizer._encoding.encode_ordinary(text)


def test_fingerprint_follows_what_decides_ids(tmp_path: Path, small: Path) -> None:
    other = rank_file(tmp_path / "other", (b"th", b"the", b"in"))
    copy = rank_file(tmp_path / "copy")
    prints = [bpe.Bpe(bpe.Config(path=str(path))).fingerprint for path in (small, other, copy)]
    prints += [llama(small, pattern).fingerprint for pattern in tiktoken.FAMILIES]
    assert prints[0] == prints[2] and len(set(prints)) == len(prints) - 1


def line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d\n" % rank


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [], r"rank file .*small\.tiktoken is empty"),
        (lambda lines: [*lines[:9], b"QQ==\n", *lines[10:]], r"small\.tiktoken:10: b'QQ==' is not a token in base64"),
        (lambda lines: [*lines[:9], b"Q? 9\n", *lines[10:]], r"small\.tiktoken:10: b'Q\? 9' is not a token"),
        (lambda lines: [*lines, line(b"in", 7)], r"small\.tiktoken:260: rank 7 appears twice"),
        (lambda lines: [*lines, line(b"th", 259)], r"small\.tiktoken:260: token b'th' appears twice"),
        (lambda lines: lines[:100] + lines[101:], r"is cut short: 258 ranks up to 258, without 100"),
        (lambda lines: lines[:200], r"has no rank for 56 of 256 bytes, the first of them 200"),
    ],
)
def test_broken_rank_files_are_named(small: Path, change: object, words: str) -> None:
    assert callable(change)
    small.write_bytes(b"".join(change(small.read_bytes().splitlines(keepends=True))))
    with pytest.raises(DataError, match=words):
        _ = bpe.Bpe(bpe.Config(path=str(small))).vocab_size


def test_missing_rank_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rank file .*nowhere cannot be read: No such file"):
        llama(tmp_path / "nowhere").encode("a")


def test_rank_files_survive_writing(small: Path, tmp_path: Path) -> None:
    write_ranks(tmp_path / "again", read_ranks(small))
    assert (tmp_path / "again").read_bytes() == small.read_bytes()


def test_training_merges_the_most_frequent_pair_first() -> None:
    pytest.importorskip("rustbpe")
    ranks = train_ranks(["abab ab abc " * 50], 258)
    assert ranks[b"ab"] == 256 and sorted(ranks.values()) == list(range(258))
    with pytest.raises(DataError, match=r"gives \d+ ranks, not 9999"):
        train_ranks(["abab " * 50], 9999)
