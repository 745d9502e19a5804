"""Sets keys in the text of a TOML, and keeps its comments, its order and its other keys."""

import re
import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

COMMENT = re.compile(r"""^[^=]*=\s*(?:"[^"]*"|'[^']*'|[^#"']*?)(?P<comment>\s*#.*)$""")
HEADER = re.compile(r"^\s*\[")


def set_values(text: str, values: Mapping[str, Any]) -> str:
    """The text with these keys set. values: dotted key, its table first -> value.

    A key that the text has gets the value, and keeps the comment beside it. Another key is added at the end of its
    table, and a missing table at the end of the text.

    Raises:
        ValueError: the text is no TOML, or has a key in a form that is not edited: in an inline table, as a dotted key,
            or with a value of several lines.
    """
    wanted = tomllib.loads(text)
    lines = text.splitlines()
    for key, value in values.items():
        *tables, name = key.split(".")
        here = wanted
        for table in tables:
            here = here.setdefault(table, {})
        here[name] = value
        _set(lines, ".".join(tables), name, tomli_w.dumps({name: value}).rstrip())
    edited = "\n".join(lines) + "\n"
    if _parsed(edited) != wanted:
        raise ValueError("keys of the layout are in inline tables, dotted keys, or values of several lines")
    return edited


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _set(lines: list[str], table: str, name: str, entry: str) -> None:
    """Put `name = value` into a table's lines, in place of a line with that name."""
    header = re.compile(rf"^\s*\[\s*{re.escape(table)}\s*\]\s*(#.*)?$")
    begin = next((number for number, line in enumerate(lines) if header.match(line)), None)
    if begin is None:
        lines += ["", f"[{table}]", entry]
        return
    last = begin
    for number in range(begin + 1, len(lines)):
        line = lines[number]
        if HEADER.match(line):
            break
        if re.match(rf"^\s*{re.escape(name)}\s*=", line):
            beside = COMMENT.match(line)
            lines[number] = entry + (beside["comment"] if beside else "")
            return
        if line.strip() and not line.lstrip().startswith("#"):
            last = number
    lines.insert(last + 1, entry)
