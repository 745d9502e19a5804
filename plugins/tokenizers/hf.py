"""Tokenizers of the Hugging Face hub, read from their tokenizer.json.

Reads a model's folder as published (nothing is downloaded), and encodes with the `tokenizers` library (the extra "hf").
The files beside tokenizer.json count as transformers reads them: special_tokens_map.json overrides
tokenizer_config.json unless that has `added_tokens_decoder`, and tokens that tokenizer.json lacks are added.

The token that ends a document is the first of these that is given: the option `end`, eos_token, eos_token_id in
generation_config.json, eos_token_id in config.json. Evaluation of a published model predicts the first id from
bos_token. Its documents and prompts have the tokens around them that the post-processor states, and eos_token_id of
generation_config.json ends its texts.

Cost: half a second to load 128,000 tokens; one core encodes two to three MB per second, a fifth of what `tiktoken`
does.
Limits: no token is put before or after a document. Text never becomes a special token: where the vocabulary would let
it, the text is cut after the first character of the token's name. A name of one character cannot be cut, so its text is
refused. Random merges (BPE dropout, Unigram sampling), truncation and padding are switched off. Added tokens that are
not marked special (runs of blanks, `<tool_call>` in some files) are matched in text, as the file specifies. Changes of
its normalizer, such as Unicode forms or case, are not undone by decoding; `data.max_lost` limits what they lose.
"""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.contracts import REQUIRED, Delimiters, Tokenizer, option, register
from titan.data.tokens.files import leads_outside
from titan.errors import DataError, MissingPackageError, by_errno
from titan.packages import install
from titan.paths import expanded, refuse_lfs_pointer
from titan.terminal import warn_once

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
ABOUT = "tokenizer_config.json"
SPECIALS = "special_tokens_map.json"
ADDED = "added_tokens.json"
GENERATION, MODEL = "generation_config.json", "config.json"
READ = (ABOUT, SPECIALS, ADDED, GENERATION, MODEL)
PASSED_ON = (
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
"""What stands beside tokenizer.json, and other programs read."""
TEMPLATES = "additional_chat_templates/*.jinja"
MOST_BYTES = 50 << 20
"""Of a file that is only passed on."""
FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
NO_ENCODING = ("version", "truncation", "padding", "post_processor", "decoder")
"""Keys of tokenizer.json that do not change which ids a text gets here."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which files, and which token ends a document."""

    path: str = option(REQUIRED, "folder of a model with tokenizer.json, or that file", path=True)
    end: str = option("", "token that ends a document; empty: the eos token of the files beside tokenizer.json")


@register
class Hf(Tokenizer):
    """A tokenizer.json of the Hugging Face hub; offline."""

    name = "hf"
    Config = Config

    @cached_property
    def _file(self) -> Path:
        path = expanded(self.config.path, "tokenizer.path")
        return path / TOKENIZER if path.is_dir() else path

    @cached_property
    def _content(self) -> bytes:
        return _read(self._file)

    @cached_property
    def _published(self) -> "_Published":
        return _Published(self._file.parent)

    @cached_property
    def _opened(self) -> "tuple[tokenizers.Tokenizer, int]":
        library = _open(self._file, self._content, self._published.added)
        self._as_opened = library.to_str()
        self._published.note_prefix_space(self._as_opened)
        end = self._published.end(library, self.config.end)
        library.add_special_tokens([library.id_to_token(end)])  # not all files call it special
        library.encode_special_tokens = True  # as ordinary text
        _cut_names(library, self._specials(library, end))
        return library, end

    def _specials(self, library: "tokenizers.Tokenizer", end: int) -> dict[int, str]:
        """Id -> name of the special tokens that no text may become; unknown characters may become the unknown token."""
        added = library.get_added_tokens_decoder()
        unknown = self._unknown(library)
        return {n: token.content for n, token in added.items() if n == end or (token.special and n != unknown)}

    def _unknown(self, library: "tokenizers.Tokenizer") -> int | None:
        """The id that stands for what the vocabulary lacks."""
        if (name := getattr(library.model, "unk_token", None)) is not None:
            return library.token_to_id(name)
        number = _parsed(self._file, self._content).get("model", {}).get("unk_id")
        return number if isinstance(number, int) else None

    @cached_property
    def _forbidden(self) -> frozenset[int]:
        return frozenset(self._specials(*self._opened))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return max(self._opened[0].get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def min_vocab_size(self) -> int:
        """One more than the highest id of text and of the end: published tables often lack rows of other specials."""
        library, end = self._opened
        ids = {*library.get_vocab(with_added_tokens=True).values()} - self._forbidden | {end}
        return max(ids) + 1

    @property
    def end(self) -> int:
        return self._opened[1]

    @cached_property
    def delimiters(self) -> Delimiters:
        """Evaluation starts from bos, as in lm-eval; what surrounds texts and stops them is that of transformers."""
        library, end = self._opened
        bos = self._published.token("bos_token")
        number = library.token_to_id(bos) if bos else None
        stops = self._published.stops(end) or [end]
        if self.config.end and end not in stops:
            stops = [*stops, end]
        return Delimiters(end if number is None else number, *_around(library), tuple(stops))

    @cached_property
    def fingerprint(self) -> str:
        """Of what decides ids, however the files are laid out and whichever of them adds a token, and of the end."""
        end = self.end
        said = {key: value for key, value in json.loads(self._as_opened).items() if key not in NO_ENCODING}
        return hashlib.sha256(json.dumps([said, end], sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; lone surrogates are encoded as the replacement character."""
        whole = text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")
        library, _ = self._opened
        try:
            # The library holds on to the interpreter while it encodes one text, not while it encodes a list of them.
            ids: list[int] = library.encode_batch_fast([whole], add_special_tokens=False)[0].ids
        except Exception as error:  # the library raises no narrower type
            why = "the text has characters that the tokenizer lacks, and it has no unknown token"
            raise DataError(f"{self._file} cannot encode a text: {error}; {why}") from None
        if not self._forbidden.isdisjoint(ids):
            name = library.id_to_token(next(number for number in ids if number in self._forbidden))
            raise DataError(f"{self._file} makes the special token {name!r} of ordinary text; set [tokenizer] end")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids: nothing for the end id and for what is no id, other specials by name."""
        library, end = self._opened
        return library.decode([number for number in ids if number != end], skip_special_tokens=False)

    def files(self) -> Mapping[str, bytes]:
        """tokenizer.json as it was read, and what stands beside it.

        Of what is only passed on, no link out of the folder is followed: nobody has looked at an untrusted one.
        """
        folder, name = self._file.parent, self._file.name
        read = {each: _read(folder / each) for each in READ if each != name and os.path.lexists(folder / each)}
        others = [*(folder / each for each in PASSED_ON), *sorted(folder.glob(TEMPLATES))]
        passed_on = {f.relative_to(folder).as_posix(): _read(f) for f in others if _can_be_passed_on(f, folder)}
        return {name: self._content, **read, **passed_on}

    def hf_files(self) -> Mapping[str, bytes | Mapping[str, Any]] | None:
        """The files as they were read, with the option `end` as their eos_token.

        In tokenizer_config.json, which other programs read alone, also where special_tokens_map.json names the eos.
        """
        files: dict[str, bytes | Mapping[str, Any]] = {**self.files()}
        files[TOKENIZER] = files.pop(self._file.name)
        library, end = self._opened
        folder, name, stops = self._file.parent, library.id_to_token(end), [*self.delimiters.stops]
        eos, published = {"eos_token": name}, self._published.token("eos_token")
        if (self.config.end or published) and _name(_json(folder / ABOUT).get("eos_token")) != name:
            files[ABOUT] = {"tokenizer_class": "PreTrainedTokenizerFast", **_json(folder / ABOUT), **eos}
        if SPECIALS in files and published != name:
            files[SPECIALS] = {**_json(folder / SPECIALS), **eos}
        if GENERATION in files and end not in _ids(_json(folder / GENERATION).get("eos_token_id")) and end in stops:
            files[GENERATION] = {**_json(folder / GENERATION), "eos_token_id": stops}
        return files

    @classmethod
    def from_hf(cls, folder: Path) -> Mapping[str, Any] | None:
        return {"path": str(folder)} if os.path.lexists(folder / TOKENIZER) else None


class _Published:
    """What the files beside tokenizer.json say, read as transformers 5 reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._about = _json(folder / ABOUT)
        self._map = {} if "added_tokens_decoder" in self._about else _json(folder / SPECIALS)

    def note_prefix_space(self, opened: str) -> None:
        """Warn where classes of transformers put a blank before a text, and tokenizer.json does not."""
        if self._about.get("add_prefix_space") is True and '"add_prefix_space":false' in opened:
            what = f"{self.folder / ABOUT} sets add_prefix_space, {TOKENIZER} does not"
            warn_once(f"{what}; no blank is put before a text, unlike by some classes of transformers")

    def token(self, key: str) -> str | None:
        """The name of a special token, by its key (`eos_token`)."""
        return _name({**self._about, **self._map}.get(key))

    @cached_property
    def added(self) -> dict[int, dict[str, Any]]:
        """Id -> content and flags of the tokens that the files add to those of tokenizer.json."""
        source, stated = ABOUT, self._about.get("added_tokens_decoder")
        pairs = list(stated.items()) if isinstance(stated, dict) else [] if stated is None else [(None, None)]
        if stated is None:
            named = {self.token(key) for key in {**self._about, **self._map} if key.endswith("_token")}
            source, legacy = ADDED, _json(self.folder / ADDED).items()
            for name, number in legacy:
                flags = {"content": name, "special": name in named, "normalized": name not in named}
                pairs.append((str(number) if type(number) is int else None, flags))
        if not all(_is_added_token(number, token) for number, token in pairs):
            raise DataError(f"{self.folder / source} has added tokens that are no table of ids, names and flags")
        keys = ("content", *FLAGS)
        return {int(number): {key: token[key] for key in keys if key in token} for number, token in pairs}

    def stops(self, end: int) -> list[int]:
        """The ids at which transformers stops generating.

        Where generation_config.json names none, those of config.json. They are often the default of the architecture,
        another token of this vocabulary; the eos token of the tokenizer is not among them then, and they do not count.
        """
        ids = _ids(_json(self.folder / GENERATION).get("eos_token_id"))
        others = _ids(_json(self.folder / MODEL).get("eos_token_id"))
        return ids or (others if end in others else [])

    def end(self, library: "tokenizers.Tokenizer", asked: str) -> int:
        """The id that ends a document: the token asked for, else what the files in the folder call eos."""
        if asked:
            return _id(library, asked, "[tokenizer] end")
        if eos := self.token("eos_token"):
            return _id(library, eos, f"eos_token in {self.folder / (SPECIALS if 'eos_token' in self._map else ABOUT)}")
        for file in (GENERATION, MODEL):
            for number in _ids(_json(self.folder / file).get("eos_token_id"))[:1]:
                if number < 0 or library.id_to_token(number) is None:
                    what = f"not an id of {self.folder / TOKENIZER}"
                    raise DataError(f"eos_token_id in {self.folder / file} = {number}: {what}")
                return number
        known = ", ".join(map(repr, _added(library)[:8])) or "none"
        raise DataError(
            f"{self.folder} does not say which token ends a document: no eos_token in {ABOUT} or {SPECIALS}, no "
            f"eos_token_id in {GENERATION} or {MODEL}; set tokenizer.end (special tokens: {known})"
        )


def _open(file: Path, content: bytes, added: Mapping[int, Mapping[str, Any]]) -> "tokenizers.Tokenizer":
    """The library's tokenizer, with all tokens of the folder and without what is random or cuts."""
    try:
        import tokenizers
    except ImportError:
        raise MissingPackageError(f"reading {file} needs the tokenizers package: {install('hf')}") from None
    try:
        library = tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise DataError(f"{file} cannot be read by the tokenizers library: {error}") from None
    library.no_truncation()
    library.no_padding()
    _make_certain(library, file)
    for number, flags in sorted(added.items()):
        token = tokenizers.AddedToken(**flags)
        if library.token_to_id(token.content) is None:
            (library.add_special_tokens if token.special else library.add_tokens)([token])
            given = library.token_to_id(token.content)
            if given != number:
                what = f"{token.content!r} has id {number}, but the next free id of {file.name} is {given}"
                raise DataError(f"{file.parent}: {what}; the files are of different tokenizers")
    return library


def _make_certain(library: "tokenizers.Tokenizer", file: Path) -> None:
    """Switch off what draws at random: the tokens of a corpus are made once, and evaluation must repeat."""
    model = library.model
    for key in ("dropout", "alpha", "nbest_size"):
        if value := getattr(model, key, None):
            warn_once(f"{file}: {key} = {value:g} draws tokens at random; it is switched off")
            setattr(model, key, None)


def _cut_names(library: "tokenizers.Tokenizer", specials: Mapping[int, str]) -> None:
    """Cut the names of special tokens in text, where the model alone would make the token of its name."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence as Steps
    from tokenizers.pre_tokenizers import Split

    names = [name for name in specials.values() if len(name) > 1]
    if made := [name for name in names if {*_encoded(library, name)[0]} & specials.keys()]:
        pattern = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in made)
        steps = [Split(Regex(pattern), "isolated"), library.pre_tokenizer]
        library.pre_tokenizer = Steps([step for step in steps if step is not None])


def _around(library: "tokenizers.Tokenizer") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before a text, and those after it."""
    for text in ("a", "0", " ", library.decode([0])):
        ids, is_special = _encoded(library, text)
        if 0 in is_special:
            behind = len(ids) - is_special[::-1].index(0)
            return tuple(ids[: is_special.index(0)]), tuple(ids[behind:])
    return (), ()


def _encoded(library: "tokenizers.Tokenizer", text: str) -> tuple[list[int], list[int]]:
    """Ids of a text between the tokens of the post-processor, and 1 for each id that is one of these."""
    try:
        encoding = library.encode(text)
    except Exception:  # of no narrower type: the model lacks a character, so it makes no token of this text
        return [], []
    return encoding.ids, encoding.special_tokens_mask


def _name(value: Any) -> str | None:
    """The name of a token, which stands alone or in a table."""
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) and name else None


def _is_added_token(number: Any, token: Any) -> bool:
    """Whether an entry of a file is an id, a name and flags."""
    named = isinstance(token, dict) and _name(token) is not None
    return named and str(number).isdecimal() and all(isinstance(token.get(flag, True), bool) for flag in FLAGS)


def _can_be_passed_on(file: Path, folder: Path) -> bool:
    try:
        refuse_lfs_pointer(file)
    except DataError:
        return False
    good = file.is_file() and os.access(file, os.R_OK) and not leads_outside(folder, file)
    return good and file.stat().st_size <= MOST_BYTES


def _ids(value: Any) -> list[int]:
    """An id, or a list of them, as a list."""
    return [number for number in (value if isinstance(value, list) else [value]) if type(number) is int]


def _id(library: "tokenizers.Tokenizer", token: str, source: str) -> int:
    number = library.token_to_id(token)
    if number is None:
        raise DataError(f"{source} = {token!r}: the tokenizer has no such token{_nearest(token, _added(library))}")
    return number


def _added(library: "tokenizers.Tokenizer") -> list[str]:
    return [token.content for token in library.get_added_tokens_decoder().values()]


def _nearest(token: str, tokens: Iterable[str]) -> str:
    near = difflib.get_close_matches(token, list(tokens), n=1, cutoff=0)
    return f" (nearest: {near[0]!r})" if near else ""


def _read(file: Path) -> bytes:
    refuse_lfs_pointer(file)
    try:
        return file.read_bytes()
    except OSError as error:
        raise by_errno(error, DataError(f"{file} cannot be read: {error.strerror}")) from None


def _json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; an empty one where there is no file."""
    return _parsed(file, _read(file)) if os.path.lexists(file) else {}


def _parsed(file: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content.decode("utf-8"))  # as transformers: neither a byte-order mark nor UTF-16
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} holds no JSON object")
    return value
