"""Tokenizer files of Hugging Face, written from byte-pair ranks. For tokenizer plugins.

Their BPE model has a vocabulary in which each byte is one visible character (GPT-2), and an ordered list of merges,
pairs of tokens. Ranks imply the merges: two adjacent tokens may merge if the result has a rank, lowest first. So each
way to split a token into two tokens is a merge, as in the files published for Llama 3.
"""

from collections.abc import Mapping
from typing import Any


def _alphabet() -> list[str]:
    """The character of each byte: its own Latin-1 one where that can be seen, else the next one from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(unseen)) for byte in range(256)]


_ALPHABET = _alphabet()


def hf_tokenizer(
    ranks: Mapping[bytes, int], *, pattern: str, specials: Mapping[str, int], end: str
) -> Mapping[str, Any] | None:
    """File name -> JSON value of a Hugging Face tokenizer that gives text the same ids as these ranks.

    pattern: how text is cut before bytes are merged; empty: not at all.  specials: name -> id, above all ranks; an id
    left out between them gets a name, for theirs have no gaps.  end: the special that ends a document.

    The result is None where a special's name is a token of ordinary text too: the library has one id for each name.
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
