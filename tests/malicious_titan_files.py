"""Malicious checkpoints: titan's own files, titan.index and state.json, with what is said when each is refused."""

import json
import math
import pickle
import struct
from collections.abc import Callable
from typing import Any

from tests.malicious_checkpoints import DATA, EVIL, NAME


def _index(change: Callable[[dict[str, Any], list[int]], object]) -> Callable[[bytes], bytes]:
    """A change of the header and the numbers of a titan.index."""

    def changed(content: bytes) -> bytes:
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        numbers = list(struct.unpack(f"<{(len(content) - end) // 8}q", content[end:]))
        change(header, numbers)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + struct.pack(f"<{len(numbers)}q", *numbers)

    return changed


def _entry(header: dict[str, Any]) -> list[Any]:
    return next(entry for entry in header["tensors"] if entry[0] == NAME)


def moved(start: int, length: int) -> Callable[[bytes], bytes]:
    """A change of the first byte and the length of the only chunk of `NAME`."""

    def change(header: dict[str, Any], numbers: list[int]) -> None:
        counts = {entry[0]: math.prod(entry[3]) for entry in header["tensors"]}
        chunks, number = sum(counts.values()), [*counts].index(NAME)
        assert set(counts.values()) == {1}
        numbers[number - 2 * chunks], numbers[number - chunks] = start, length

    return _index(change)


def _all(numbers: list[int], part: int, value: int) -> None:
    """Of every chunk: its file (0), first byte (1) or length (2). A model of one process has a chunk per tensor."""
    chunks = len(numbers) // 4  # of each a cut too, or nearly: the last three columns end the file
    columns = len(numbers) - 3 * chunks
    numbers[columns + part * chunks : columns + (part + 1) * chunks] = [value] * chunks


def _cut_beyond(header: dict[str, Any], numbers: list[int]) -> None:
    """A vector of 2^40 whose steps, taken modulo 2^64, are small."""
    whole, first = 1 << 40, (1 << 62) + (1 << 61)
    entry, cuts = _entry(header), [0, first, 2 * first + whole - (1 << 64)]
    former = header["tensors"][: header["tensors"].index(entry)]
    at = sum(sum(one[3]) for one in former)
    chunks = sum(math.prod(one[3]) for one in header["tensors"])
    numbers[at : at + sum(entry[3])] = cuts
    entry[2:] = [[whole], [len(cuts)]]
    behind = len(numbers) - 3 * chunks + sum(math.prod(one[3]) for one in former) + 1
    for part in (2, 1, 0):
        numbers[behind + part * chunks : behind + part * chunks] = [0 if part == 0 else 1] * 2


INDEXES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda content: b"", "not a valid index"),
    "no header": (lambda content: content[:4], "not a valid index"),
    "a header without end": (lambda content: b"\xff" * 8 + content[8:], "not a valid index"),
    "a pickle": (lambda content: pickle.dumps(EVIL), "not a valid index"),
    "numbers cut short": (lambda content: content[:-8], "numbers, not the"),
    "half a number": (lambda content: content[:-3], "not a valid index"),
    "more numbers": (lambda content: content + bytes(8), "numbers, not the"),
    "a list as header": (lambda content: (2).to_bytes(8, "little") + b"[]", "not a valid index"),
    "a deep header": (lambda content: (200_000).to_bytes(8, "little") + b"[" * 200_000, "not a valid index"),
    "a foreign name": (_index(lambda h, n: _entry(h).__setitem__(0, "elsewhere")), "a tensor's name is none"),
    "a name twice": (_index(lambda h, n: h["tensors"].append(_entry(h))), "entry is wrong"),
    "an unknown dtype": (_index(lambda h, n: _entry(h).__setitem__(1, "torch.qint8")), "qint8"),
    "a size that is text": (_index(lambda h, n: _entry(h).__setitem__(2, ["3", 4])), "is no number"),
    "a negative size": (_index(lambda h, n: _entry(h).__setitem__(2, [-3, 4])), "is no number"),
    "more dimensions": (_index(lambda h, n: _entry(h).__setitem__(2, [3, 4, 1])), "entry is wrong"),
    "chunks without end": (_index(lambda h, n: _entry(h).__setitem__(3, [1 << 40, 1 << 40])), "numbers, not the"),
    "a tensor of terabytes": (_index(lambda h, n: _entry(h).__setitem__(2, [1 << 20, 1 << 20])), "larger than its"),
    "a tensor beyond memory": (_index(lambda h, n: _entry(h).__setitem__(2, [1 << 40, 1 << 40])), "beyond all memory"),
    "a cut behind the end": (_index(lambda h, n: n.__setitem__(0, 5)), "do not make it up"),
    "cuts that overflow": (_index(_cut_beyond), "do not make it up"),
    "a file above": (_index(lambda h, n: h["files"].__setitem__(0, f"../{DATA}")), "which its manifest does not"),
    "state.json as data": (_index(lambda h, n: h["files"].__setitem__(0, "state.json")), "which its manifest does not"),
    "a file that is no text": (_index(lambda h, n: h["files"].__setitem__(0, 3)), "names no files"),
    "no such file": (_index(lambda h, n: _all(n, 0, 7)), "in no file"),
    "a file before the first": (_index(lambda h, n: _all(n, 0, -1)), "in no file"),
    "a negative place": (_index(lambda h, n: _all(n, 1, -1)), "ends behind the end"),
    "an end behind the end": (_index(lambda h, n: _all(n, 2, (1 << 63) - 1)), "ends behind the end"),
    "bytes for all tensors": (_index(lambda h, n: _all(n, 1, 0)), "two chunks overlap"),
}
"""Name -> (change of the bytes of titan.index, what is said)."""


def _rest(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["rest"].update(values)


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


STATES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a tensor of the model": (_rest(a={"$tensor": NAME}), r"has the key '\$tensor' at rest\.a,"),
    "a tensor elsewhere": (_rest(a={"$tensor": "rest.b"}), r"has the key '\$tensor' at rest\.a,"),
    "a tensor that is not there": (_rest(a={"$tensor": "rest.a"}), "names rest.a, which is not in the checkpoint"),
    "a tensor and more": (_rest(a={"$tensor": "rest.a", "b": 1}), r"has the key '\$tensor' at rest\.a,"),
    "own keys that are numbers": (_rest(a={"$own": "rest.a", "keys": [1]}), r"has the key '\$own' at rest\.a,"),
    "own keys elsewhere": (_rest(a={"$own": "model.out", "keys": ["weight"]}), r"has the key '\$own' at rest\.a,"),
    "own keys that are not there": (_rest(a={"$own": "rest.a", "keys": ["b"]}), r"names rest\.a\.0\.b"),
    "a hint at a class": (_rest(a={"$class": "os.system"}), r"the key '\$class'"),
    "nested deep": (_rest(a=_nested(100)), "nested more than 64 deep"),
    "a step that is text": (_rest(step="2"), "has no valid step"),
    "tokens below zero": (_rest(tokens=-1), "has no valid tokens"),
    "tokens without end": (_rest(tokens=10**30), "has no valid tokens"),
    "tokens that are none": (_rest(tokens=float("nan")), "has no valid tokens"),
    "samples that are a list": (_rest(data={"samples": []}), "has no valid samples"),
    "data that is a list": (_rest(data=[]), "has no valid data"),
    "techniques that are a list": (_rest(techniques=[]), "has no valid techniques"),
    "a config that is text": (_rest(config="x"), "has no valid config"),
    "a serial that is a list": (lambda state: state.update(serial=[]), "has no valid serial"),
    "a table as a number": (lambda state: state["values"].update({"out.weight.step": {}}), "out.weight.step"),
    "an optimizer that is a list": (lambda state: state.update(optimizer=["SGD"]), "has no valid optimizer"),
    "no rest": (lambda state: state.pop("rest"), "has no valid rest"),
    "a format that is text": (lambda state: state.update(format="1"), "has format 1; this version"),
    "another format": (lambda state: state.update(format=99), "has format 99; this version"),
}
"""Name -> (change of state.json, what is said)."""

STATE_TEXTS: dict[str, tuple[str, str]] = {
    "deeper than Python goes": ("[" * 200_000, "nested too deep"),
    "a list": ("[]", "not a JSON object"),
    "a number without end": ('{"step": 1' + "0" * 5000 + "}", "cannot be read"),
    "a key twice": ('{"step": 1, "step": 2}', "the key 'step' appears twice"),
    "half a table": ('{"step": ', "cannot be read"),
    "no text": ("\udcff", "cannot be read"),
}
