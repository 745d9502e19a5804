"""Malicious checkpoints: data files that are none, or say something else, with what is said when each is refused."""

import json
import os
import pickle
import sys
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


FILES: dict[str, bytes] = {
    "nothing": b"",
    "a header that is not UTF-8": with_header(b'{"\xff": 1}'),
    "a deep header": with_header(b"[" * 200_000),
    "metadata that are no texts": with_header({"__metadata__": {"tensors": []}}),
    "a pickle": EVIL,
}
"""Name -> what stands in place of a safetensors file."""


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        header, data = parted(content)
        change(header)
        return with_header(header, data)

    return changed


def _entry(**values: Any) -> Callable[[bytes], bytes]:
    return _header(lambda header: header[NAME].update(values))


def _sharding(text: str) -> Callable[[bytes], bytes]:
    """A change of all that the header says of offsets."""
    return _header(lambda header: header["__metadata__"].update({SHARDING: text}))


def _offsets(value: Any) -> Callable[[bytes], bytes]:
    """A change of what the header says of the offsets of `NAME`."""

    def changed(content: bytes) -> bytes:
        sound = json.loads(parted(content)[0]["__metadata__"][SHARDING])
        return _sharding(json.dumps(sound | {NAME: value}))(content)

    return changed


_untold = _header(lambda header: header.pop("__metadata__"))
LONG = "A\nerror: \x1b[2J" + "a" * 10_000
NO_ENTRY, NO_OFFSETS = f"{NAME} has no valid dtype, shape and data_offsets", f"{NAME} has no valid saved_offsets"
NOT_AS_LONG = f"{NAME} is not as long as its type and shape say"

HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "data cut short": (lambda content: content[:-1], "its tensors have 5,588 bytes, and 5,587 follow the header"),
    "data that overlap": (_entry(data_offsets=[0, 48]), "leave a gap, or overlap, at byte 0 of the data"),
    "a place too much": (_entry(data_offsets=[112, 160, 160]), NOT_AS_LONG),
    "a negative size": (_entry(shape=[-3, -4]), NO_ENTRY),
    "10^12 entries": (_entry(shape=[HUGE, HUGE]), NOT_AS_LONG),
    "10^12 entries in 48 bytes": (_entry(shape=[HUGE, HUGE], data_offsets=[112, 112 + 4 * HUGE**2]), "leave a gap, or"),
    "an unknown type": (_entry(dtype="Q8"), NO_ENTRY),
    "a name of two lines": (_header(lambda it: it.update({LONG: it.pop(NAME)})), r"differ in A\\nerror: \\x1b"),
    "no offsets": (_untold, "titan.index differ in embed.weight"),
    "offsets that are a list": (_sharding("[]"), "DCP_SHARDING_INFO is no table"),
    "offsets nested deep": (_sharding("[" * 200_000), "nested too deep"),
    "an offset that is no table": (_offsets([0, 0]), NO_OFFSETS),
    "an offset that is no list": (_offsets({"saved_offsets": 0}), NO_OFFSETS),
    "a negative offset": (_offsets({"saved_offsets": [-1, 0]}), NO_OFFSETS),
    "an offset too few": (_offsets({"saved_offsets": [0]}), NO_OFFSETS),
    "another place": (_offsets({"saved_offsets": [1, 0]}), f"and titan.index differ in {NAME}"),
}
"""Name -> (change of a data file, what is said)."""


def main(path: Path) -> None:
    """Write a pickle that runs a command over the header of a checkpoint's data, and make its manifest anew."""
    (path / DATA).write_bytes(EVIL + (path / DATA).read_bytes()[len(EVIL) :])
    reseal(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
