"""Writes fitted constants to the files of devices and fabrics."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import describe
from .fit import CONSTANTS, Constant

NARROW = ("bfloat16", "float16")
"""Dtypes of two bytes, whose matrix products have the same efficiency."""


def kept(constants: Iterable[Mapping[str, Any]]) -> dict[Constant, float]:
    """Values by constant, from the constants of fit.json."""
    found = {(tuple(of["devices"]), of["where"]): float(of["value"]) for of in constants}
    return {c: found[c.devices, c.where] for c in CONSTANTS if (c.devices, c.where) in found}


def write(values: Mapping[Constant, float]) -> None:
    """Write values to the files, in the order of the constants; the rest of the files stays as it is.

    Raises:
        ValueError: a file lacks the key of a constant.
    """
    texts: dict[Path, str] = {}
    for constant, value in values.items():
        for path, begins, number, key in _places(constant):
            text = texts.get(path) or path.read_text(encoding="utf-8")
            texts[path] = replaced(text, begins, number, key, f"{value:.4g}", str(path))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    describe.reread()


def _places(constant: Constant) -> Iterator[tuple[Path, str, int, str]]:
    """(file, first line of the table, index among tables with that line, key) of each place of a constant."""
    kind, *path = constant.where.split(".")
    if kind == "fabric":
        yield describe.FOLDER / "fabrics.toml", f'[[fabric]]\nname = "{path[0]}"\n', 0, path[1]
    for name in (*constant.devices, *constant.lent):
        file = describe.file_of(name)
        if kind == "products":
            said = describe.all_devices()[name].products
            dtypes = said if len(path) == 1 else NARROW if path[0] in NARROW else [path[0]]
            for dtype in dtypes:
                yield file, f"[kernels.matmul.{dtype}]\n", 0, path[-1]
        elif kind == "kernels":
            yield file, "[kernels]\n", 0, path[0]
        else:
            yield file, "[[links]]\n", int(kind == "fabric"), path[-1]


def replaced(text: str, begins: str, number: int, key: str, value: str, file: str) -> str:
    """A TOML text with the value of `key` replaced in the `number`-th table that begins with `begins`."""
    tables = re.split(r"(?m)^(?=\[)", text)
    found = [i for i, table in enumerate(tables) if table.startswith(begins)]
    if len(found) > number:
        tables[found[number]], changed = re.subn(
            rf"(?m)^({re.escape(key)} = )[^\s#]+", rf"\g<1>{value}", tables[found[number]]
        )
        if changed == 1:
            return "".join(tables)
    raise ValueError(f"{file}: {begins.splitlines()[0]} {number} has no {key}")
