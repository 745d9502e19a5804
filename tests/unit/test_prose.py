"""The rules of CONTRIBUTING.md for prose, names and commits, as far as a program can hold them (bench/prose.py)."""

import subprocess
from pathlib import Path

import pytest

from bench.prose import bad_subjects, count, long_sentences, metaphors, sentences, short_docstrings

ROOT = Path(__file__).parents[2]


def test_no_sentence_of_the_documentation_is_too_long() -> None:
    assert list(long_sentences(ROOT)) == []


def test_names_and_messages_use_the_terms_of_the_field() -> None:
    assert list(metaphors(ROOT)) == []


def test_commit_subjects_since_the_rule() -> None:
    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()

    rule = git("log", "--diff-filter=A", "--format=%H", "--", "tests/unit/test_prose.py")
    if not rule:
        pytest.skip("not in a clone, or the rule has no commit yet")
    assert list(bad_subjects(git("log", "--no-merges", "--format=%s", f"{rule[-1]}..HEAD"))) == []


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("planner: refit A100 constants", None),
        ("ranks: bring up gloo lazily", None),
        ("Refit A100 constants", "must read"),
        ("planner: refitted A100 constants", "must read"),
        ("planner: refitting A100 constants", "must read"),
        ("planner: refit A100 constants.", "must read"),
        ("planner: refit", "must read"),
        ("planner: refit " + "x" * 58, "73 characters; at most 72"),
    ],
)
def test_a_subject(subject: str, said: str | None) -> None:
    found = list(bad_subjects([subject]))
    assert len(found) == (said is not None) and (said is None or said in found[0])


PAGE = """# A heading of words

One sentence. Another with `inline code of five words` and [a link](https://example.org/a b).
Its line goes on: still the same?  Yes.

```sh
no sentence. At all.
```

    no sentence either

| a | table |
|---|---|

- an item
- two. Sentences
"""


def test_sentences_of_a_page() -> None:
    assert [(sentence, count(sentence)) for sentence in sentences(PAGE)] == [
        ("One sentence.", 2),
        ("Another with `inline code of five words` and a link.", 6),
        ("Its line goes on: still the same?", 7),
        ("Yes.", 1),
        ("an item", 2),
        ("two.", 1),
        ("Sentences", 1),
    ]


def _checkout(root: Path, page: str, code: str) -> Path:
    for folder in ("docs", "titan", "plugins"):
        (root / folder).mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "docs/a.md"):
        (root / name).write_text(page if name == "docs/a.md" else "")
    (root / "titan" / "a.py").write_text(code)
    return root


def test_a_long_sentence_is_found(tmp_path: Path) -> None:
    long = "Word" + " word" * 30 + "."
    root = _checkout(tmp_path, f"Short. {long}", "")
    (root / "docs" / "inner").mkdir()
    (root / "docs" / "inner" / "b.md").write_text(long)
    assert list(long_sentences(root)) == [f"docs/{page}.md: 31 words: {long}" for page in ("a", "inner/b")]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("class GuestList: pass", "titan/a.py:1: 'Guest' in 'GuestList'"),
        ("open_doors = 1", "titan/a.py:1: 'doors' in 'open_doors'"),
        ("def f(room): pass", "titan/a.py:1: 'room' in 'room'"),
        ("raise ValueError(f'{1} from a stranger')", "titan/a.py:1: 'stranger' in ' from a stranger'"),
        ("x = option(1, 'for guests')", "titan/a.py:1: 'guests' in 'for guests'"),
        ("parser.add_argument('--x', help='which floor')", "titan/a.py:1: 'floor' in 'which floor'"),
    ],
)
def test_a_metaphor_is_found(code: str, found: str, tmp_path: Path) -> None:
    assert list(metaphors(_checkout(tmp_path, "", code))) == [found]


def test_short_docstrings_are_counted(tmp_path: Path) -> None:
    code = '''def f():
    """Six words are too few here."""
def g():
    """Seven words are not too few here."""
def _h():
    """Private."""
'''
    found = list(short_docstrings(_checkout(tmp_path, "", f'"""Long enough a docstring for a module."""\n{code}')))
    assert found == ["titan/a.py:2: Six words are too few here."]
