"""Prose and names by the rules of CONTRIBUTING.md, as far as a program can hold them.

    python -m bench.prose                what breaks a rule, and the count of short public docstrings
    python -m bench.prose --root DIR     of another checkout
    python -m bench.prose --list         and each short docstring

tests/unit/test_prose.py holds these rules:

- No sentence of README.md, CONTRIBUTING.md and docs/**/*.md has more than 30 words. Code blocks, tables and headings
  are not counted; a span of inline code is one word.
- No name in titan/ and plugins/, no help text and no error message uses a word of the house metaphor.
- The subject of a commit is `area: imperative object`, of at most 72 characters.

Public docstrings of six words or fewer are counted, not forbidden.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 30
"""The longest sentence of the documentation, in words."""

FEW_WORDS = 6
"""A public docstring of so many words or fewer rarely gives shapes, units and errors."""

METAPHOR = re.compile(r"(guest|house|room|floor|door|stranger|attic|lodger)s?", re.IGNORECASE)
SUBJECT = re.compile(r"[a-z0-9][\w ,/.-]*: (?P<verb>[a-z][\w-]*) \S.*[^.]")
NO_IMPERATIVES = re.compile(r"(?!bring|string|need|feed|seed|embed|speed|shed)\w+(ed|ing)")

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def long_sentences(root: Path) -> Iterator[str]:
    """`file: number of words: sentence` for each sentence of the documentation with more than `MOST_WORDS` words."""
    for file in (root / "README.md", root / "CONTRIBUTING.md", *sorted(root.glob("docs/**/*.md"))):
        for sentence in sentences(file.read_text()):
            if (words := count(sentence)) > MOST_WORDS:
                yield f"{file.relative_to(root)}: {words} words: {sentence}"


def sentences(markdown: str) -> Iterator[str]:
    """The sentences of a page without code blocks, tables, headings and comments; a list item ends a sentence."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2[ ]*$", "\n", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[^>\n]*>", "", text, flags=re.DOTALL)
    text = re.sub(r"(?<=\n\n)(?:(?: {4}|\t).*\n?)+", "\n", text)
    text = re.sub(r"^\s*(?:\||#).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*(?:[-*+]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        yield from filter(None, re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_`]*(?:[A-Z0-9`]|titan))", flat))


def count(sentence: str) -> int:
    """Words of a sentence; a span of inline code is one."""
    return sum(any(c.isalnum() for c in word) for word in re.sub(r"`[^`]*`", "code", sentence).split())


def metaphors(root: Path) -> Iterator[str]:
    """`file:line: word` for each word of the house metaphor in a name, a help text or an error message."""
    for file, tree in _sources(root):
        for line, told in [(1, Path(file).stem), *_names(tree), *_messages(tree)]:
            for word in re.findall(r"[A-Z]?[a-z]+", told):
                if METAPHOR.fullmatch(word):
                    yield f"{file}:{line}: {word!r} in {told!r}"


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def _messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings in what is raised, in `option(...)`, and in an argument parser's help."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "option"):
            parts: list[ast.AST] = [node]
        elif isinstance(node, ast.Call):
            parts = [word.value for word in node.keywords if word.arg in ("help", "description", "epilog")]
        else:
            continue
        for part in (inner for outer in parts for inner in ast.walk(outer)):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value


def short_docstrings(root: Path) -> Iterator[str]:
    """`file:line: docstring` for each public docstring of at most `FEW_WORDS` words in titan/ and plugins/."""
    for file, tree in _sources(root):
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, *DEFINITIONS)) and not getattr(node, "name", "").startswith("_"):
                told = ast.get_docstring(node)
                if told is not None and len(told.split()) <= FEW_WORDS:
                    yield f"{file}:{getattr(node, 'lineno', 1)}: {told}"


def _sources(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for top in ("titan", "plugins"):
        for path in sorted((root / top).rglob("*.py")):
            yield str(path.relative_to(root)), ast.parse(path.read_text())


def bad_subjects(subjects: list[str]) -> Iterator[str]:
    """A sentence for each commit subject that is not `area: imperative object` of at most 72 characters."""
    for subject in subjects:
        found = SUBJECT.fullmatch(subject)
        if len(subject) > 72:
            yield f"{subject!r}: {len(subject)} characters; at most 72"
        elif found is None or NO_IMPERATIVES.fullmatch(found["verb"]):
            yield f"{subject!r}: must read `area: imperative object`, as in `planner: refit A100 constants`"


def main() -> int:
    """Print what breaks a rule; 1 where something does."""
    parser = argparse.ArgumentParser(prog="python -m bench.prose", description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout to read")
    parser.add_argument("--list", action="store_true", help="also print each short docstring")
    args = parser.parse_args()
    broken = [*long_sentences(args.root), *metaphors(args.root)]
    short = list(short_docstrings(args.root))
    print("\n".join(broken + short if args.list else broken))
    print(f"{len(broken)} rules broken; {len(short)} public docstrings of at most {FEW_WORDS} words")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
