"""Malicious checkpoints: titan's own files, titan.index and state.json, with what is said when each is refused."""

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, save

from tests.malicious_checkpoints import HUGE, parted, with_header

NAME = "model.out.weight"
"""A weight of `bench.mutations`, F32 [3, 4]."""

Arrays = dict[str, list[int]]


def index(change: Callable[[list[Any], Arrays], object]) -> Callable[[bytes], bytes]:
    """A change of the entries and the arrays of a titan.index."""

    def changed(content: bytes) -> bytes:
        entries, sound = json.loads(parted(content)[0]["__metadata__"]["tensors"]), load(content)
        arrays = {name: array.tolist() for name, array in sound.items()}
        change(entries, arrays)
        tensors = {name: torch.tensor(arrays[name], dtype=array.dtype) for name, array in sound.items()}
        return bytes(save(tensors, {"tensors": json.dumps(entries)}))

    return changed


def _told(text: str) -> Callable[[bytes], bytes]:
    """A change of the text that names the tensors."""
    return lambda content: save(load(content), {"tensors": text})


def _array(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[bytes], bytes]:
    """A change of an array."""

    def changed(content: bytes) -> bytes:
        arrays = load(content)
        arrays[name] = change(arrays[name])
        return bytes(save(arrays, parted(content)[0]["__metadata__"]))

    return changed


def _number(entries: list[Any]) -> int:
    return next(number for number, entry in enumerate(entries) if entry[0] == NAME)


def _set(**values: Any) -> Callable[[bytes], bytes]:
    """A change of the entry of `NAME`."""
    places = ("name", "dtype", "shape", "counts", "stacked")

    def change(entries: list[Any], arrays: Arrays) -> None:
        for place, value in values.items():
            at = places.index(place)
            entries[_number(entries)][at : at + 1] = [value]

    return index(change)


def _at(array: str, value: int) -> Callable[[bytes], bytes]:
    """A change of what an array says of the only chunk of `NAME`."""
    return index(lambda entries, arrays: arrays[array].__setitem__(_number(entries), value))


def _cut(shape: list[int], *cuts: list[int]) -> Callable[[bytes], bytes]:
    """A change of shape and cuts of `NAME`, all of whose chunks lie in one place."""

    def change(entries: list[Any], arrays: Arrays) -> None:
        number = _number(entries)
        at, chunks = sum(sum(entry[3]) for entry in entries[:number]), math.prod(map(len, cuts))
        arrays["cuts"][at : at + 2] = [offset for dim in cuts for offset in dim]
        entries[number][2:] = [shape, [len(dim) for dim in cuts]]
        for name in ("begins", "ranks"):
            arrays[name][number : number + 1] *= chunks

    return index(change)


NOT_VALID, NO_SIZE = "titan.index is not a valid index of a checkpoint", "has a size that is none"
ARRAYS = "its (cuts|begins|ranks) are no array of integers"
WRONG = f"the entry of {NAME} is wrong"
NOT_WHOLE = f"the chunks of {NAME} do not make it up"
TOO_SMALL = "rank-00000.safetensors is smaller than the chunks that it is to hold"

INDEXES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no names": (lambda content: save(load(content)), NOT_VALID),
    "no arrays": (lambda content: with_header({"__metadata__": parted(content)[0]["__metadata__"]}), ARRAYS),
    "cuts that are fractions": (_array("cuts", torch.Tensor.double), ARRAYS),
    "begins of 32 bits": (_array("begins", torch.Tensor.int), ARRAYS),
    "ranks of 64 bits": (_array("ranks", torch.Tensor.long), ARRAYS),
    "ranks of two dimensions": (_array("ranks", lambda array: array[None]), ARRAYS),
    "cuts cut short": (_array("cuts", lambda array: array[:-1].clone()), "it has 17 cuts and 15 chunks, not the 18"),
    "begins cut short": (_array("begins", lambda array: array[:-1].clone()), "cuts and 15 chunks, not the"),
    "ranks cut short": (_array("ranks", lambda array: array[:-1].clone()), "cuts and 14 chunks, not the"),
    "text that is no JSON": (_told("["), NOT_VALID),
    "a deep list": (_told("[" * 200_000), NOT_VALID),
    "a number of 10,000 digits": (_told(f"[{'1' * 10_000}]"), NOT_VALID),
    "a table": (_told("{}"), "its header names no tensors"),
    "an entry that is a number": (_told("[1]"), NOT_VALID),
    "an entry too short": (_told('[["model.a"]]'), NOT_VALID),
    "a foreign name": (_set(name="elsewhere"), "a tensor's name is none"),
    "a name that is a number": (_set(name=3), "a tensor's name is none"),
    "a name of two lines": (_set(name="model.a\nerror: b"), "a tensor's name is none"),
    "a name that no encoding has": (_set(name="optimizer.out.weight.\ud800"), "a tensor's name is none"),
    "a name without end": (_set(name="model." + "a" * 100_000), "a tensor's name is none"),
    "a name twice": (_set(name="model.out.bias"), "the entry of model.out.bias is wrong"),
    "an unknown type": (_set(dtype="Q8"), WRONG),
    "a type that is a list": (_set(dtype=[]), NOT_VALID),
    "a size that is text": (_set(shape=["3", 4]), NO_SIZE),
    "a size that is true": (_set(shape=[True, 4]), NO_SIZE),
    "a size that is no number": (_set(shape=[float("nan"), 4]), NO_SIZE),
    "a negative size": (_set(shape=[-3, 4]), NO_SIZE),
    "a size that overflows": (_set(shape=[1 << 70, 4]), NO_SIZE),
    "counts whose product takes minutes": (_set(shape=[1] * 1000, counts=[10**4000] * 1000), NO_SIZE),
    "more dimensions": (_set(shape=[3, 4, 1]), WRONG),
    "100 dimensions": (_cut([1] * 100, *[[0]] * 100), NO_SIZE),
    "no chunks": (_cut([3, 4], [], [0]), NO_SIZE),
    "chunks without end, and then none": (_cut([HUGE, HUGE, 1], [*range(HUGE)], [*range(HUGE)], []), NO_SIZE),
    "chunks without end": (_set(counts=[1 << 40, 1 << 40]), "chunks, not the"),
    "10^12 entries": (_set(shape=[HUGE, HUGE]), TOO_SMALL),
    "10^12 times nothing": (_set(shape=[HUGE, 0]), "titan.index differ in out.weight"),
    "a tensor beyond memory": (_set(shape=[1 << 40, 1 << 40]), "beyond all memory"),
    "nothing beyond memory": (_set(shape=[0, 1 << 59]), "beyond all memory"),
    "another type": (_set(dtype="I32"), "titan.index differ in out.weight"),
    "a cut behind the end": (_cut([3, 4], [0, 3], [0]), NOT_WHOLE),
    "cuts that descend": (_cut([3, 4], [0, 2, 1], [0]), NOT_WHOLE),
    "cuts that leave the first row out": (_cut([3, 4], [1], [0]), NOT_WHOLE),
    "cuts that overflow": (_cut([1 << 40], [0, 3 << 61, (3 << 62) + (1 << 40) - (1 << 64)]), NOT_WHOLE),
    "chunks of one name in one file": (_cut([3, 4], [0, 1], [0]), "titan.index differ in out.weight"),
    "a negative rank": (_at("ranks", -1), "it names rank--0001.safetensors, which its manifest does not list"),
    "a rank without end": (_at("ranks", (1 << 31) - 1), "rank-2147483647.safetensors, which its manifest does not"),
    "an absent rank": (_at("ranks", 1), "it names rank-00001.safetensors, which its manifest does not list"),
    "a negative place": (_at("begins", -1), TOO_SMALL),
    "a place behind the end": (_at("begins", 1 << 20), TOO_SMALL),
    "a place that overflows": (_at("begins", (1 << 63) - 1), TOO_SMALL),
    "another tensor's place": (_at("begins", 0), "titan.index differ in out.weight"),
    "stacked, but in one chunk": (_set(stacked=True), f"{NAME} is stacked, but not by rank"),
    "stacked by a number": (_set(stacked=2), WRONG),
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
    "own keys of two lines": (_rest(a={"$own": "rest.a", "keys": ["b\nc"]}), r"names rest\.a\.0\.b"),
    "a key of two lines": (_rest(**{"a\nb": {"$c": 1}}), r"has the key '\$c' at rest\.a"),
    "a number's name of two lines": (lambda state: state["values"].update({"a\nb": {}}), "has no valid a"),
    "a hint at a class": (_rest(a={"$class": "os.system"}), r"the key '\$class'"),
    "nested deep": (_rest(a=_nested(100)), "nested more than 64 deep"),
    "a step that is text": (_rest(step="2"), "has no valid rest.step"),
    "a step that is true": (_rest(step=True), "has no valid rest.step"),
    "tokens below zero": (_rest(tokens=-1), "has no valid rest.tokens"),
    "tokens without end": (_rest(tokens=10**30), "has no valid rest.tokens"),
    "tokens that are none": (_rest(tokens=float("nan")), "has no valid rest.tokens"),
    "samples that are a list": (_rest(data={"samples": []}), "has no valid samples"),
    "data that is a list": (_rest(data=[]), "has no valid data"),
    "techniques that are a list": (_rest(techniques=[]), "has no valid techniques"),
    "a config that is text": (_rest(config="x"), "has no valid config"),
    "a serial that is a list": (lambda state: state.update(serial=[]), "has no valid serial"),
    "a table as a number": (lambda state: state["values"].update({"out.weight.step": {}}), "out.weight.step"),
    "an optimizer of two lines": (lambda state: state.update(optimizer="a\nb"), r"optimizer state of a\\nb, but"),
    "an optimizer that is a list": (lambda state: state.update(optimizer=["SGD"]), "has no valid optimizer"),
    "no rest": (lambda state: state.pop("rest"), "has no valid rest"),
    "a format that is text": (lambda state: state.update(format="2"), "has format 2, but this version"),
    "a format of two lines": (lambda state: state.update(format="2\nerror: "), r"has format 2\\nerror: , but"),
    "a format that is true": (lambda state: state.update(format=True), "has format True, but this version"),
    "another format": (lambda state: state.update(format=99), "has format 99, but this version"),
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
