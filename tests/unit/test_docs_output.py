"""Output and code that the documentation quotes, held against the code that prints it or has it."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from titan.layers.blocks import PreNormLayer
from titan.testing.commands.skeleton import skeleton

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/hpc.md", "docs/profile.md", "docs/reliability.md")
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
    folders = ("titan", "plugins", "planner", "inference", "testing")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
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


EXCERPTS = [
    (page.name, file, code)
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for file, code in re.findall(r"From\s`([\w/]+\.py)`:\n\n```python\n(.*?)```", page.read_text(), re.S)
]


@pytest.mark.parametrize(("page", "file", "code"), EXCERPTS, ids=[f"{page} {file}" for page, file, _ in EXCERPTS])
def test_quoted_code_stands_in_its_file(page: str, file: str, code: str) -> None:
    """Its lines in their order; the file may have others between them."""
    lines = iter((ROOT / file).read_text().splitlines())
    absent = [line for line in code.splitlines() if line and line not in lines]
    assert not absent, f"{page}: {file} has no line {absent[0]!r} after those before it"


def test_excerpts_are_found() -> None:
    assert [page for page, *_ in EXCERPTS] == ["plugin_technique.md"]


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_arguments_of_a_layer_are_those_of_the_shared_one() -> None:
    section = _page("plugin_model.md").partition("**Arguments of a layer.**")[2].partition("\n\n**")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == [*inspect.signature(PreNormLayer.forward).parameters][1:]


def test_the_initial_values_that_are_shown_are_those_of_the_example() -> None:
    file = "examples/plugin_package/src/titan_example/shift.py"
    [shown] = re.findall(rf"`{file}`:\n\n```python\n(.*?)```", _page("plugin_model.md"), re.S)
    nodes = [node for code in (shown, (ROOT / file).read_text()) for node in ast.walk(ast.parse(code))]
    here, there = (ast.dump(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "init")
    assert here == there


def test_the_initial_values_that_are_replaced_are_those_of_the_spec(tmp_path: Path) -> None:
    """In a process of its own, as the plugin registers itself."""
    [shown] = re.findall(r"```python\n([^`]*class SmallPrimer.*?)```", _page("plugin_model.md"), re.S)
    held = (
        "plain, small = (plugin(plugin.Config()).spec() for plugin in (Primer, SmallPrimer))\n"
        "changed = [name for name in plain.init if plain.init[name] != small.init[name]]\n"
        "assert changed == ['layers.*.ffn.up.weight'] and plain.init.keys() == small.init.keys()\n"
        "assert small.init_of('layers.0.ffn.up.weight') == normal(0.002)\n"
    )
    file = tmp_path / "primer.py"
    file.write_text("\n".join([skeleton("plugin", "model", "primer"), shown, held]))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
