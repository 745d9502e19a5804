"""Tokenizer files of Hugging Face: ours written as theirs, and theirs read, give the ids of the original."""

import argparse
import json
import random
import statistics
import sys
import textwrap
import typing
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from titan.contracts import Tokenizer
from titan.contracts.plugin import registry
from titan.data.tokens.bytepairs import PATTERN, BytePairs, train_ranks, write_ranks
from titan.errors import DataError, PluginError
from titan.plugins.tokenizers import bpe, byte, hf, tiktoken

tokenizers = pytest.importorskip("tokenizers")

EMOJI = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4} \N{WHITE FROWNING FACE}\ufe0f"
TEXTS = [
    "",
    "a\r\nb\r\n\r\n  c\r\r\n\n\n \n\td",
    "I'm sure they'LL say it's what we'd've, don't you'RE 's' 't'T",
    "1 12 123 1234 12345678 3.14159e-10 1,000,000 \u0664\N{ROMAN NUMERAL TWO}\N{VULGAR FRACTION ONE HALF}",
    "   x  y\t\t\tz    \n     \n" + " " * 100 + "end" + " " * 7,
    f"{EMOJI}{EMOJI} e\u0301 \u00a0\u3000\u200b\ufeff",
    "zqxj zqxj\nzqxj",
    "x" * 300 + "=" * 77 + "the" * 40,
    "\x00\x01\x7f\x85\U0010ffff\ue000",
]


def sources() -> list[str]:
    return [Path(str(module.__file__)).read_text() for module in (argparse, typing, statistics, textwrap)]


def random_texts() -> list[str]:
    """Of all characters there are, and of those in which patterns, contractions and merges meet."""
    dice = random.Random(0)
    everything = [c for c in map(chr, range(0x30000)) if unicodedata.category(c) not in ("Cs", "Cn")]
    crowded = "aabbtthhee  \n\r\t'sdmTlvSR12_.,\u017f\u00e9\u6771"
    return ["".join(dice.choices(letters, k=500)) for letters in (everything, crowded) for _ in range(60)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [*TEXTS, *sources(), *random_texts()]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six hundred ranks, and one that no merge leads to."""
    pytest.importorskip("rustbpe")
    ranks = train_ranks(sources(), 600)
    unreachable = b"zqxj"
    assert not any(unreachable[:at] in ranks and unreachable[at:] in ranks for at in (1, 2, 3))
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    write_ranks(path, {**ranks, unreachable: 600})
    return path


def published(path: Path, pattern: str) -> tiktoken.Tiktoken:
    return tiktoken.Tiktoken(tiktoken.Config(path=str(path), pattern=pattern))  # type: ignore[arg-type]


@pytest.fixture(params=["bpe", "byte", *tiktoken.FAMILIES])
def ours(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bpe":
        return bpe.Bpe(bpe.Config())
    if request.param == "byte":
        return byte.Byte(byte.Config())
    return published(request.getfixturevalue("small"), request.param)


def write(folder: Path, files: Mapping[str, Any] | None) -> Path:
    assert files is not None
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / name).write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return folder


def opened(folder: Path, end: str = "") -> hf.Hf:
    return hf.Hf(hf.Config(path=str(folder), end=end))


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with the built-in ranks."""
    return write(tmp_path / "theirs", bpe.Bpe(bpe.Config()).hf_files())


def change(folder: Path, file: str, **values: Any) -> None:
    """Set keys of a JSON file; None takes one away."""
    path = folder / file
    table = {**(json.loads(path.read_text()) if path.exists() else {}), **values}
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def test_the_files_give_the_same_ids_there_and_back(ours: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    back = opened(write(tmp_path / "out", ours.hf_files()))
    assert (back.vocab_size, back.end) == (ours.vocab_size, ours.end)
    for text in texts:
        ids = ours.encode(text)
        assert back.encode(text) == ids, text[:80]
        assert back.decode([*ids, back.end]) == text


def test_the_library_alone_gives_the_same_ids(ours: Tokenizer, texts: list[str]) -> None:
    files = ours.hf_files()
    assert files is not None
    library = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert library.get_vocab_size() == ours.vocab_size, "ids without gaps"
    assert library.token_to_id(files["tokenizer_config.json"]["eos_token"]) == ours.end
    for text in texts:
        assert library.encode(text).ids == ours.encode(text), text[:80]


def test_transformers_loads_the_files(ours: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path / "out", ours.hf_files())
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    alone = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert (len(loaded), loaded.eos_token_id) == (ours.vocab_size, ours.end)
    for text in texts[:20]:
        ids = ours.encode(text)
        assert loaded(text)["input_ids"] == alone(text)["input_ids"] == ids
        assert loaded.decode(ids) == text


def test_any_ranks_merge_as_they_do_here() -> None:
    dice = random.Random(1)
    for _ in range(20):
        tokens = {"".join(dice.choices("abc", k=dice.randint(2, 6))).encode() for _ in range(40)}
        ranks = {token: rank for rank, token in enumerate([*(bytes([n]) for n in range(256)), *sorted(tokens)])}
        pairs = BytePairs(ranks, pattern=PATTERN, specials={"<|end|>": len(ranks)}, end="<|end|>")
        files = pairs.hf_files()
        assert files is not None
        library = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
        for _ in range(50):
            text = "".join(dice.choices("abc", k=30))
            assert library.encode(text).ids == pairs.encode(text), (tokens, text)


def test_a_special_that_is_a_token_of_text_too_cannot_be_written() -> None:
    ranks = {bytes([number]): number for number in range(256)} | {b"<|end|>": 256}
    assert BytePairs(ranks, pattern=PATTERN, specials={"<|end|>": 257}, end="<|end|>").hf_files() is None


def test_special_words_are_ordinary_text(small: Path, tmp_path: Path) -> None:
    original = published(small, "llama3")
    back = opened(write(tmp_path / "out", original.hf_files()))
    text = "a<|end_of_text|><|begin_of_text|>b"
    assert back.encode(text) == original.encode(text) and max(back.encode(text)) <= 600
    assert back.decode([601, ord("a")]) == "<|begin_of_text|>a"


def test_the_end_never_comes_from_text_whatever_the_file_calls_it(theirs: Path) -> None:
    original = opened(theirs).encode("a<|end|>b")
    added = json.loads((theirs / "tokenizer.json").read_text())["added_tokens"]
    change(theirs, "tokenizer.json", added_tokens=[{**added[0], "special": False}])
    assert opened(theirs).encode("a<|end|>b") == original
    assert 4096 not in original and opened(theirs).end == 4096


def test_what_is_no_text_still_encodes_and_decodes(theirs: Path, tmp_path: Path) -> None:
    for text in ("a\ud800b", "\ufeffa\udc00", "\ud83d\ude00"):
        assert opened(theirs).encode(text) == bpe.Bpe(bpe.Config()).encode(text)
    bytes_ = opened(write(tmp_path / "bytes", byte.Byte(byte.Config()).hf_files()))
    assert bytes_.decode([ord("a"), 0xE6, 0x9D, ord("b"), 256, 300]) == "a\N{REPLACEMENT CHARACTER}b"


def test_nothing_is_added_cut_or_filled(theirs: Path) -> None:
    plain = opened(theirs).encode("import os\n" * 20)
    single = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    change(
        theirs,
        "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding=dict(
            strategy={"Fixed": 99}, direction="Right", pad_to_multiple_of=None, pad_id=1, pad_type_id=0, pad_token="!"
        ),
        post_processor={
            "type": "TemplateProcessing",
            "single": [single, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [4096], "tokens": ["<|end|>"]}},
        },
    )
    assert opened(theirs).encode("import os\n" * 20) == plain


@pytest.mark.parametrize(
    ("option", "about", "generation", "config", "end"),
    [
        ("<|b|>", "<|a|>", 4096, 4096, 4098),
        ("", "<|a|>", 4096, 4096, 4097),
        ("", {"content": "<|b|>", "__type": "AddedToken"}, 4096, 4096, 4098),
        ("", None, [4097, 4098], 4096, 4097),
        ("", None, None, 4098, 4098),
    ],
)
def test_which_token_ends_a_document(
    tmp_path: Path, option: str, about: Any, generation: Any, config: Any, end: int
) -> None:
    pairs, names = bpe.Bpe(bpe.Config())._pairs, {"<|end|>": 4096, "<|a|>": 4097, "<|b|>": 4098}
    files = BytePairs(pairs._ranks, pattern=PATTERN, specials=names, end="<|end|>").hf_files()
    folder = write(tmp_path / "f", files)
    change(folder, "tokenizer_config.json", eos_token=about)
    change(folder, "generation_config.json", eos_token_id=generation)
    change(folder, "config.json", eos_token_id=config)
    tokenizer = opened(folder, option)
    assert (tokenizer.end, tokenizer.vocab_size) == (end, 4099)
    again = opened(write(tmp_path / "again", tokenizer.hf_files()))
    assert (again.end, again.fingerprint) == (end, tokenizer.fingerprint)


def test_files_are_passed_on_as_they_were(theirs: Path, tmp_path: Path) -> None:
    change(theirs, hf.ABOUT, chat_template="{{ messages }}", eos_token=None)
    change(theirs, hf.SPECIALS, eos_token="<|end|>", bos_token="!")
    change(theirs, hf.GENERATION, eos_token_id=[4096, 5], temperature=0.5)
    (theirs / "chat_template.jinja").write_bytes(b"{{ a }}\r\n")
    (theirs / "notes.txt").write_text("of no tokenizer")
    files, passed_on = opened(theirs).files(), opened(theirs).hf_files()
    assert {name: (theirs / name).read_bytes() for name in files} == files and passed_on is not None
    assert sorted(files) == sorted(passed_on) == sorted({file.name for file in theirs.iterdir()} - {"notes.txt"})
    assert {name for name in files if passed_on[name] != files[name]} == {hf.ABOUT}, "names the eos in both"
    assert passed_on[hf.ABOUT] == {**json.loads(files[hf.ABOUT]), "eos_token": "<|end|>"}
    other = opened(theirs, end="b").hf_files()
    assert other is not None and other[hf.ABOUT]["eos_token"] == other[hf.SPECIALS]["eos_token"] == "b"
    assert other[hf.GENERATION] == {"eos_token_id": [4096, 5, ord("b")], "temperature": 0.5}


def test_random_merges_are_switched_off(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(theirs, "tokenizer.json", version="1.0")
    plain = opened(theirs)
    ids, fingerprint = plain.encode("import os, sys"), plain.fingerprint
    model = json.loads((theirs / "tokenizer.json").read_text())["model"]
    change(theirs, "tokenizer.json", model={**model, "dropout": 0.5})
    drawn = opened(theirs)
    assert [drawn.encode("import os, sys") for _ in range(5)] == [ids] * 5
    assert drawn.fingerprint == fingerprint
    assert "dropout = 0.5 draws tokens at random; it is switched off" in capsys.readouterr().err


def words_of(folder: Path, *words: str, unknown: str | None = None, specials: tuple[str, ...] = ("</s>",)) -> hf.Hf:
    """A tokenizer whose tokens are whole words between blanks."""
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown or "")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(list(specials))
    return opened(write(folder, {"tokenizer.json": json.loads(library.to_str()), hf.ABOUT: {"eos_token": "</s>"}}))


def pieces_of(folder: Path, unk_id: int | None) -> hf.Hf:
    """A Unigram model with a piece for the end, as SentencePiece has it."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((c, -3.0) for c in "abcs<>/")]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=unk_id, byte_fallback=False))
    library.add_special_tokens(["<unk>", "</s>"])
    return opened(write(folder, {"tokenizer.json": json.loads(library.to_str()), hf.ABOUT: {"eos_token": "</s>"}}))


def test_text_never_becomes_a_special_token_though_the_vocabulary_holds_it(tmp_path: Path) -> None:
    pieces = pieces_of(tmp_path / "pieces", 0)
    assert pieces.encode("a</s>b") == [3, 7, 9, 6, 8, 4] and pieces.decode([3, 1, 4]) == "a b"
    assert pieces.encode("?") == pieces.encode("<unk>") == [0]
    assert (pieces.vocab_size, pieces.min_vocab_size, pieces.end) == (10, 10, 1)
    words = words_of(tmp_path / "words", "</s>", "a", "<unk>", unknown="<unk>")
    assert words.encode("a </s> b") == [1, 2, 2, 2] and words.decode([1, 0]) == "a"


def test_a_name_that_cannot_be_cut_is_refused_in_text(theirs: Path, tmp_path: Path) -> None:
    lines = opened(theirs, end="!")
    assert lines.encode("a?") and lines.decode([lines.end]) == ""
    with pytest.raises(DataError, match=r"makes the special token '!' of ordinary text; set \[tokenizer\] end"):
        lines.encode("a!")
    with pytest.raises(DataError, match="makes the special token '</s>' of ordinary text"):
        words_of(tmp_path / "words", "</s>", "a", unknown="</s>").encode("a b")


def test_a_model_that_has_no_token_for_a_text_says_so(tmp_path: Path) -> None:
    for tokenizer in (words_of(tmp_path / "words", "</s>", "a"), pieces_of(tmp_path / "pieces", None)):
        assert tokenizer.encode("a")
        with pytest.raises(DataError, match=r"tokenizer\.json cannot encode a text: .*it has no unknown token"):
            tokenizer.encode("zwölf")


def test_ids_that_no_text_has_need_no_rows(theirs: Path) -> None:
    """A pad token that was added behind a published table (CodeLlama), a token that is matched in text, a gap."""
    added = json.loads((theirs / "tokenizer.json").read_text())["added_tokens"]
    pad = {**added[0], "id": 4097, "content": "<pad>"}
    change(theirs, "tokenizer.json", added_tokens=[*added, pad])
    padded = opened(theirs)
    assert (padded.vocab_size, padded.min_vocab_size) == (4098, 4097)
    assert max(padded.encode("<pad>")) < 4096
    change(theirs, "tokenizer.json", added_tokens=[*added, {**pad, "special": False, "content": "<tool>"}])
    assert opened(theirs).min_vocab_size == 4098 and opened(theirs).encode("<tool>") == [4097]


def test_tokens_beside_the_file_are_added(theirs: Path) -> None:
    named = {"4097": {"content": "<|a|>", "special": True}, "4098": {"content": "<tool>", "special": False}}
    change(theirs, hf.ABOUT, added_tokens_decoder=named, eos_token="<|a|>")
    change(theirs, hf.SPECIALS, eos_token="<|end|>")  # which does not count beside added_tokens_decoder
    both = opened(theirs)
    assert (both.end, both.vocab_size, both.encode("<tool>")) == (4097, 4099, [4098])
    change(theirs, hf.ABOUT, added_tokens_decoder=None, eos_token="<|old|>")
    change(theirs, hf.ADDED, **{"<|a|>": 4097})
    legacy = opened(theirs)
    assert (legacy.end, legacy.vocab_size) == (4096, 4098) and legacy.fingerprint != both.fingerprint
    change(theirs, hf.ADDED, **{"<|a|>": 5000})
    with pytest.raises(DataError, match=r"'<\|a\|>' has id 5000, but the next free id of tokenizer.json is 4097"):
        _ = opened(theirs).end


def test_where_the_files_name_a_token_does_not_change_the_fingerprint(theirs: Path) -> None:
    change(theirs, hf.ABOUT, added_tokens_decoder={"4097": {"content": "<|a|>", "special": True}})
    before = opened(theirs).fingerprint
    said = json.loads((theirs / "tokenizer.json").read_text())
    change(theirs, hf.ABOUT, added_tokens_decoder=None)
    added = {**said["added_tokens"][0], "id": 4097, "content": "<|a|>"}
    change(theirs, "tokenizer.json", added_tokens=[*said["added_tokens"], added], post_processor=None)
    assert opened(theirs).fingerprint == before


def test_what_is_only_passed_on_keeps_nobody_from_reading(theirs: Path, tmp_path: Path) -> None:
    (theirs / "tokenizer.model").write_text(POINTER)
    (theirs / "vocab.txt").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("secret")
    assert sorted(opened(theirs).files()) == [hf.TOKENIZER, hf.ABOUT]


def test_what_stands_around_the_texts_of_a_published_model(theirs: Path) -> None:
    assert opened(theirs).delimiters == (4096, (), (), (4096,))
    change(theirs, hf.ABOUT, bos_token="!")
    single = {"SpecialToken": {"id": "!", "type_id": 0}}
    sides = [single, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|end|>", "type_id": 0}}]
    specials = {name: {"id": name, "ids": [n], "tokens": [name]} for name, n in (("!", 0), ("<|end|>", 4096))}
    change(
        theirs,
        "tokenizer.json",
        post_processor={"type": "TemplateProcessing", "single": sides, "pair": [], "special_tokens": specials},
    )
    bos = tokenizers.Tokenizer.from_file(str(theirs / "tokenizer.json")).token_to_id("!")
    change(theirs, hf.MODEL, eos_token_id=2)  # the default of an architecture, another token here
    assert opened(theirs).delimiters == (bos, (0,), (4096,), (4096,))
    change(theirs, hf.MODEL, eos_token_id=[4096, 5])
    assert opened(theirs).delimiters.stops == (4096, 5)
    change(theirs, hf.GENERATION, eos_token_id=[7, 8])
    assert opened(theirs).delimiters.stops == (7, 8)
    assert opened(theirs, end="b").delimiters.stops == (7, 8, opened(theirs, end="b").end)


def test_fingerprint_follows_what_decides_ids(theirs: Path) -> None:
    before = opened(theirs).fingerprint
    path = theirs / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1, sort_keys=True))
    assert opened(theirs).fingerprint == opened(path).fingerprint == before
    assert opened(theirs, end="!").fingerprint != before
    change(theirs, "tokenizer.json", normalizer={"type": "Lowercase"})
    assert opened(theirs).fingerprint != before


def test_only_the_reader_of_these_files_knows_a_folder_with_them(theirs: Path, tmp_path: Path) -> None:
    registry.load_plugins()
    found = {p.name: p.from_hf(theirs) for p in registry.of_kind("tokenizer") if issubclass(p, Tokenizer)}
    assert {name: table for name, table in found.items() if table is not None} == {"hf": {"path": str(theirs)}}
    assert hf.Hf.from_hf(tmp_path) is None


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 9\n"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({hf.TOKENIZER: None}, "", r"tokenizer\.json cannot be read: No such file"),
    ({hf.TOKENIZER: {"model": {"type": "X"}}}, "", r"tokenizer\.json cannot be read by the tokenizers lib"),
    ({hf.TOKENIZER: POINTER}, "", r"tokenizer\.json is a Git LFS pointer"),
    ({}, "<|ende|>", r"\[tokenizer\] end = '<\|ende\|>': the tokenizer has no such token \(nearest: '<\|end\|>'\)"),
    ({hf.ABOUT: {"eos_token": "</s>"}}, "", r"eos_token in .*config\.json = '</s>': the token"),
    ({hf.ABOUT: None}, "", r"does not say which token .* set tokenizer.end \(special tokens: '<\|end\|>'\)"),
    ({hf.ABOUT: None, hf.MODEL: {"eos_token_id": 9999}}, "", r"config\.json = 9999: not an id of "),
    ({hf.ABOUT: None, hf.MODEL: {"eos_token_id": -1}}, "", r"config\.json = -1: not an id of "),
    ({hf.ABOUT: [1]}, "", r"tokenizer_config\.json holds no JSON object"),
    *(({hf.ABOUT: text}, "", r"tokenizer_config\.json is not JSON: ") for text in ("{", "[" * 100_000)),
    *(
        ({hf.ADDED: f'{{"<|a|>": {number}}}'}, "", r"added_tokens\.json has added tokens that are no table")
        for number in ('"x"', "[1]", "1e400")
    ),
    *(
        ({hf.ABOUT: {"added_tokens_decoder": {"4097": token}}}, "", r"_config\.json has added tokens that are no table")
        for token in ({"content": 5}, {"content": "a", "special": "yes"}, {}, 7)
    ),
]


@pytest.mark.parametrize(("files", "end", "words"), WRONG)
def test_what_is_missing_is_named(theirs: Path, files: dict[str, Any], end: str, words: str) -> None:
    for name, value in files.items():
        (theirs / name).unlink(missing_ok=True)
        if value is not None:
            (theirs / name).write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(DataError, match=words):
        _ = opened(theirs, end).end


def test_without_the_library_one_line_says_what_to_install(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    told = r"tokenizer\.json needs the tokenizers package: .* -m pip install -e .*\[hf\]'$"
    with pytest.raises(DataError, match=told):
        opened(theirs).encode("a")


def test_a_class_hook_is_held_against_its_contract() -> None:
    wrong = classmethod(lambda cls, path: None)
    body = {"__doc__": "Wrong.", "name": "wrong", "Config": hf.Config, "from_hf": wrong}
    with pytest.raises(PluginError, match=r"from_hf\(path\): its parameters must be \(folder\)"):
        registry.register(type("Wrong", (hf.Hf.__mro__[1],), body))
