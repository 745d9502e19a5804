"""Malicious checkpoints: data files that are none, or say something else, with what is said when each is refused."""

import io
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.mutations import reseal
from titan.checkpoint.disk.manifest import data_file
from titan.checkpoint.disk.tensor_file import SHARDING

DATA = data_file(0)
NAME = "out.weight"
"""A weight of `bench.mutations`, F32 [3, 4]."""
HUGE = 10**6
"""Rows, and columns, of a tensor of 10^12 entries."""


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ('touch "$PLANTED"',)


EVIL = pickle.dumps(_Evil())
"""A pickle that makes the file $PLANTED when it is read."""


def with_header(header: object, data: bytes = b"") -> bytes:
    """A safetensors file. header: its text, or what is written as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def parted(content: bytes) -> tuple[Any, bytes]:
    """The header and the data of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", EVIL)
    return file.getvalue()


FILES: dict[str, bytes] = {
    "nothing": b"",
    "a header longer than the file": (1000).to_bytes(8, "little") + b"{}",
    "a header without end": b"\xff" * 8 + b"{}",
    "a header of garbage": with_header(b"garbage"),
    "a header that is not UTF-8": with_header(b'{"\xff": 1}'),
    "a deep header": with_header(b"[" * 200_000),
    "metadata that are no texts": with_header({"__metadata__": {"tensors": []}}),
    "a pickle": EVIL,
    "a zip with a pickle": _zip(),
}
"""Name -> what stands in place of a safetensors file."""


def _entry(**values: Any) -> Callable[[bytes], bytes]:
    """A change of what the header says of `NAME`."""

    def changed(content: bytes) -> bytes:
        header, data = parted(content)
        header[NAME] |= values
        return with_header(header, data)

    return changed


def _twice(content: bytes) -> bytes:
    header, data = parted(content)
    text = json.dumps(header)
    return with_header(f'{{"{NAME}": {json.dumps(header[NAME])}, {text[1:]}'.encode(), data)


def _renamed(name: str) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        header, data = parted(content)
        header[name] = header.pop(NAME)
        return with_header(header, data)

    return changed


def _told(text: str) -> Callable[[bytes], bytes]:
    """A change of all that the header says of offsets."""

    def changed(content: bytes) -> bytes:
        header, data = parted(content)
        header["__metadata__"][SHARDING] = text
        return with_header(header, data)

    return changed


def _offsets(said: str) -> Callable[[bytes], bytes]:
    """A change of what the header says of the offsets of `NAME`, in JSON."""

    def changed(content: bytes) -> bytes:
        told = json.loads(parted(content)[0]["__metadata__"][SHARDING]) | {NAME: "HERE"}
        return _told(json.dumps(told).replace('"HERE"', said))(content)

    return changed


def _untold(content: bytes) -> bytes:
    header, data = parted(content)
    del header["__metadata__"]
    return with_header(header, data)


NOT_VALID = "is not a valid safetensors file"
UNLIKE = f"and titan.index differ in {NAME}"
NO_ENTRY, NO_OFFSETS = f"{NAME} has no valid dtype, shape and data_offsets", f"{NAME} has no valid saved_offsets"
NOT_AS_LONG = f"{NAME} is not as long as its type and shape say"

HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "data cut short": (lambda content: content[:-1], "its tensors have 5,588 bytes, and 5,587 follow the header"),
    "more data": (lambda content: content + bytes(8), "its tensors have 5,588 bytes, and 5,596 follow the header"),
    "data that overlap": (_entry(data_offsets=[0, 48]), "leave a gap, or overlap, at byte 0 of the data"),
    "a gap": (_entry(data_offsets=[120, 168]), "leave a gap, or overlap, at byte 112 of the data"),
    "an end before the start": (_entry(data_offsets=[160, 112]), NOT_AS_LONG),
    "a place too much": (_entry(data_offsets=[112, 160, 160]), NOT_AS_LONG),
    "a negative place": (_entry(data_offsets=[-48, 0]), NO_ENTRY),
    "a negative size": (_entry(shape=[-3, -4]), NO_ENTRY),
    "a size that is true": (_entry(shape=[True, 12]), NO_ENTRY),
    "a size that is a fraction": (_entry(shape=[3.0, 4]), NO_ENTRY),
    "a size that overflows": (_entry(shape=[1 << 64, 4]), NO_ENTRY),
    "sizes whose product takes minutes": (lambda it: _entry(shape=[1 << 62] * 300_000)(_untold(it)), NO_ENTRY),
    "10^12 entries": (_entry(shape=[HUGE, HUGE]), NOT_AS_LONG),
    "10^12 entries in 48 bytes": (
        _entry(shape=[HUGE, HUGE], data_offsets=[112, 112 + 4 * HUGE**2]),
        "leave a gap, or overlap, at byte",
    ),
    "another shape": (_entry(shape=[4, 3]), UNLIKE),
    "another type": (_entry(dtype="I32"), UNLIKE),
    "an unknown type": (_entry(dtype="Q8"), NO_ENTRY),
    "a type that is a list": (_entry(dtype=[]), NO_ENTRY),
    "a name twice": (_twice, f"the key '{NAME}' appears twice"),
    "another name": (_renamed("other"), "titan.index differ in other"),
    "a name of two lines": (_renamed("A\nerror: \x1b[2J" + "a" * 10_000), r"titan.index differ in A\\nerror: \\x1b"),
    "no offsets": (_untold, "titan.index differ in embed.weight"),
    "offsets that are no JSON": (_told("["), NOT_VALID),
    "offsets that are a list": (_told("[]"), "DCP_SHARDING_INFO is no table"),
    "offsets nested deep": (_told("[" * 200_000), "nested too deep"),
    "offsets with a number of 10,000 digits": (_told("1" * 10_000), NOT_VALID),
    "offsets of a tensor twice": (_told(f'{{"{NAME}": 1, "{NAME}": 1}}'), f"the key '{NAME}' appears twice"),
    "an offset that is no table": (_offsets("[0, 0]"), NO_OFFSETS),
    "an offset that is no list": (_offsets('{"saved_offsets": 0}'), NO_OFFSETS),
    "an offset that is text": (_offsets('{"saved_offsets": ["0", 0]}'), NO_OFFSETS),
    "an offset that is false": (_offsets('{"saved_offsets": [false, 0]}'), NO_OFFSETS),
    "an offset that is no number": (_offsets('{"saved_offsets": [NaN, 0]}'), NO_OFFSETS),
    "a negative offset": (_offsets('{"saved_offsets": [-1, 0]}'), NO_OFFSETS),
    "an offset too few": (_offsets('{"saved_offsets": [0]}'), NO_OFFSETS),
    "an offset without end": (_offsets(f'{{"saved_offsets": [{10**4000}, 0]}}'), NO_OFFSETS),
    "another place": (_offsets('{"saved_offsets": [1, 0]}'), UNLIKE),
}
"""Name -> (change of a data file, what is said)."""


def main(path: Path) -> None:
    """Write a pickle that runs a command over the header of a checkpoint's data, and make its manifest anew."""
    (path / DATA).write_bytes(EVIL + (path / DATA).read_bytes()[len(EVIL) :])
    reseal(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
