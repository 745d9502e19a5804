"""Sets keys in the text of a TOML, and keeps its comments, its order, its other keys and its line endings."""

import io
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

VALUE = re.compile(r"""(?:"{3}(?:\\.|[^\\])*?"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\])*"|'[^']*'|[^"'#])*""")
"""The part of a line before its comment: strings of TOML's four kinds, which may contain #, and other characters."""
HEADER = re.compile(r"^\s*\[")
MARK = "\ufeff"
"""The byte-order mark, with which editors of Windows begin a file."""


def set_values(text: str, values: Mapping[str, Any]) -> str:
    """The text with these keys set. values: dotted key, its table first -> value.

    A key that the text has gets the value, and keeps the comment beside it. Another key is added at the end of its
    table, and a missing table at the end of the text.

    Raises:
        ValueError: the text is no TOML, or has a key in a form that is not edited: in an inline table, as a dotted key,
            or with a value of several lines.
    """
    if text.startswith(MARK):
        return MARK + set_values(text.removeprefix(MARK), values)
    wanted = tomllib.loads(text)
    lines, ending = _lines(text)
    for key, value in values.items():
        *tables, name = key.split(".")
        here = wanted
        for table in tables:
            here = here.setdefault(table, {})
        here[name] = value
        _set(lines, ".".join(tables), name, tomli_w.dumps({name: value}).rstrip(), ending)
    edited = "".join(lines)
    if _parsed(edited) != wanted:
        raise ValueError("keys of the layout are in inline tables, dotted keys, or values of several lines")
    return edited


def _lines(text: str) -> tuple[list[str], str]:
    """Lines with their endings, and the ending of the first one, which new lines get too.

    A TOML has no other endings than these two. `str.splitlines` would also break a comment at U+2028 or U+0085.
    """
    lines = io.StringIO(text, newline="\n").readlines()
    ending = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += ending
    return lines, ending


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _set(lines: list[str], table: str, name: str, entry: str, ending: str) -> None:
    """Put `name = value` into a table's lines, in place of a line with that name."""
    header = re.compile(rf"^\s*\[\s*{re.escape(table)}\s*\]\s*(#.*)?$")
    begin = next((number for number, line in enumerate(lines) if header.match(line)), None)
    if begin is None:
        lines += [line + ending for line in ("", f"[{table}]", entry)]
        return
    last = begin
    for number in range(begin + 1, len(lines)):
        line = lines[number]
        if HEADER.match(line):
            break
        if re.match(rf"^\s*{re.escape(name)}\s*=", line):
            lines[number] = entry + _after_value(line)
            return
        if line.strip() and not line.lstrip().startswith("#"):
            last = number
    lines.insert(last + 1, entry + ending)


def _after_value(line: str) -> str:
    """The end of a `name = value` line: its comment with the blanks before it, if it has one, and its line ending."""
    found = VALUE.match(line)
    before = line[: found.end()] if found else ""
    return line[len(before.rstrip()) :]
