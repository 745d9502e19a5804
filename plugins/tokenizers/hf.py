"""Tokenizers of the Hugging Face hub, read from their tokenizer.json.

Reads a model's folder as published (nothing is downloaded), and encodes with the `tokenizers` library (the extra "hf").
The token that ends a document is the first of these that is given: the option `end`,
eos_token in tokenizer_config.json, eos_token_id in generation_config.json, eos_token_id in config.json.

Cost: half a second to load 128,000 tokens; one core encodes two to three MB per second, a fifth of what `tiktoken`
does.
Limits: no token is put before or after a text, whatever the file's post-processor says. Added tokens that are not
marked special (runs of blanks, `<tool_call>` in some files) are matched in text, as the file specifies. Changes of its
normalizer, such as Unicode forms or case, are not undone by decoding.
"""

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.contracts import REQUIRED, Tokenizer, option, register
from titan.errors import DataError, by_errno, install

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
ABOUT = "tokenizer_config.json"
SPECIALS = "special_tokens_map.json"
MODEL = ("generation_config.json", "config.json")


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
        path = Path(self.config.path).expanduser()
        return path / TOKENIZER if path.is_dir() else path

    @cached_property
    def _opened(self) -> "tuple[tokenizers.Tokenizer, int]":
        library = _open(self._file)
        end = _end(library, self._file.parent, self.config.end)
        library.add_special_tokens([library.id_to_token(end)])  # not all files call it special
        library.encode_special_tokens = True  # as ordinary text
        return library, end

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return max(self._opened[0].get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end(self) -> int:
        """The id of the token that ends a document."""
        return self._opened[1]

    @cached_property
    def fingerprint(self) -> str:
        """Of what tokenizer.json says, however it is laid out, and the end id."""
        said = json.dumps([_json(self._file), self.end], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; lone surrogates are encoded as the replacement character."""
        whole = text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")
        # The library holds on to the interpreter while it encodes one text, not while it encodes a list of them.
        return self._opened[0].encode_batch_fast([whole], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids: nothing for the end id and for what is no id, other specials by name."""
        library, end = self._opened
        return library.decode([number for number in ids if number != end], skip_special_tokens=False)

    def hf_files(self) -> Mapping[str, Any] | None:
        """The files as they were read, with the end as eos_token."""
        library, end = self._opened
        folder, eos = self._file.parent, {"eos_token": library.id_to_token(end)}
        files = {
            TOKENIZER: _json(self._file),
            ABOUT: {"tokenizer_class": "PreTrainedTokenizerFast", **_json(folder / ABOUT), **eos},
        }
        if (folder / SPECIALS).exists():
            files[SPECIALS] = {**_json(folder / SPECIALS), **eos}
        return files

    @classmethod
    def from_hf(cls, folder: Path) -> Mapping[str, Any] | None:
        """The options for a Hugging Face folder; None if it has no tokenizer.json."""
        return {"path": str(folder)} if (folder / TOKENIZER).exists() else None


def _open(file: Path) -> "tokenizers.Tokenizer":
    try:
        import tokenizers
    except ImportError:
        raise DataError(f"reading {file} needs the tokenizers package: {install('hf')}") from None
    content = _read(file)
    try:
        library = tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise DataError(f"{file} cannot be read by the tokenizers library: {error}") from None
    library.no_truncation()
    library.no_padding()
    return library


def _end(library: "tokenizers.Tokenizer", folder: Path, asked: str) -> int:
    """The id that ends a document: the token asked for, else what the files in the folder call eos."""
    eos = _json(folder / ABOUT).get("eos_token")
    published = eos.get("content") if isinstance(eos, dict) else eos
    for token, source in ((asked, "[tokenizer] end"), (published, f"eos_token in {folder / ABOUT}")):
        if token:
            return _id(library, token, source)
    for file in MODEL:
        said = _json(folder / file).get("eos_token_id")
        number = said[0] if isinstance(said, list) and said else said
        if isinstance(number, int):
            if number < 0 or library.id_to_token(number) is None:
                raise DataError(f"eos_token_id in {folder / file} = {number}: not an id of {folder / TOKENIZER}")
            return number
    raise DataError(
        f"{folder} does not say which token ends a document: no eos_token in {ABOUT}, no eos_token_id in "
        f"{' or '.join(MODEL)}; set [tokenizer] end{_nearest('<|endoftext|>', _added(library))}"
    )


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
    try:
        return file.read_bytes()
    except OSError as error:
        raise by_errno(error, DataError(f"{file} cannot be read: {error.strerror}")) from None


def _json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; an empty one where there is no file."""
    if not file.exists():
        return {}
    try:
        value = json.loads(_read(file))
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} holds no JSON object")
    return value
