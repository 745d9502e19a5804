"""Output that the documentation quotes, held against the strings of the code that prints it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/hpc.md", "docs/reliability.md")
VALUES = ("exported", "nan", "File")  # plain words too: a folder, a number, the start of a line of a stack
HOLE = "\0"


def quoted() -> list[str]:
    """Lines of all ``` blocks without a language: what a command prints."""
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", "".join((ROOT / page).read_text() for page in PAGES))
    return [line for language, block in blocks if not language for line in block.splitlines() if line]


def phrases(line: str) -> list[str]:
    """Runs of plain words; names, numbers, paths and punctuation, which may be values, separate them."""
    apart = re.sub(r"[,;:.?!)\"'`]+(?=\s|$)|(?<!\S)[(\"'`]+|\s{2,}", f" {HOLE} ", line)
    plain = re.compile(r"[A-Z]?[a-z]+(?:['-][a-z]+)*")
    words = [word if plain.fullmatch(word) and word not in VALUES else HOLE for word in apart.split()]
    return [phrase.strip() for phrase in " ".join(words).split(HOLE) if phrase.strip()]


def _strings(tree: ast.AST) -> Iterator[str]:
    """Strings but docstrings, with holes for the values of f-strings."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)


@cache
def printed() -> str:
    """All strings of titan/, plugins/ and the shell scripts of a launch."""
    files = [file for folder in ("titan", "plugins") for file in sorted((ROOT / folder).rglob("*.py"))]
    strings = [text for file in files for text in _strings(ast.parse(file.read_text()))]
    strings += [text for file in (ROOT / "scripts").glob("*.sh") for text in re.findall(r'"(.*?)"', file.read_text())]
    return HOLE.join(strings).replace("\n", " ")


@pytest.mark.parametrize("line", dict.fromkeys(quoted()))
def test_quoted_output_is_what_the_code_prints(line: str) -> None:
    unknown = [phrase for phrase in phrases(line) if not re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", printed())]
    assert not unknown, f"no string of the code has {unknown}"


def test_changed_words_are_found() -> None:
    assert "exit code 1" in quoted()
    line = "error: saving step 2 to runs/a took longer than 0.1 s ([comm] timeout_s); the stacks of rank 0 follow"
    assert phrases(line) == ["error", "saving step", "to", "took longer than", "s", "the stacks of rank", "follow"]
