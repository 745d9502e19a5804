"""The pages of docs/parallelism: what they say that a command prints, it prints.

A block of commands is followed by a block of lines that they print, shortened to the left part of a line. Runs print
losses and gradient norms with four significant decimals, which another processor may round otherwise by one.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.commands import run_titan
from titan.cli import main

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "parallelism"
_BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
_ROW = re.compile(r"(step \d+/\d+)  loss ([\d.]+)  grad norm ([\d.]+)")


def blocks(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """(commands, lines that they print) of a page; no lines where it shows none."""
    found = _BLOCKS.findall(page.read_text())
    for number, (language, text) in enumerate(found):
        if language == "sh":
            printed = found[number + 1][1] if number + 1 < len(found) and not found[number + 1][0] else ""
            yield text.splitlines(), printed.splitlines()


def of_kind(word: str) -> list[tuple[str, list[str], list[str]]]:
    """(page, commands, lines) of the blocks whose commands have this word."""
    pages = sorted(PAGES.glob("*.md"))
    return [(page.name, *block) for page in pages for block in blocks(page) if all(word in line for line in block[0])]


def test_every_command_is_one_that_is_run() -> None:
    """Here, or in tests/unit/test_layout_picture.py where it draws."""
    kinds = [of_kind(word) for word in (" --dry-run", "titan train ", " --draw ")]
    run = {line for kind in kinds for _, lines, _ in kind for line in lines}
    shown = {line for page in PAGES.glob("*.md") for lines, _ in blocks(page) for line in lines}
    assert shown == run and all(len(kind) >= 7 for kind in kinds)


@pytest.mark.parametrize(("page", "lines", "printed"), of_kind(" --dry-run"), ids=lambda value: str(value)[:12])
def test_a_dry_run_prints_the_bytes_of_the_page(
    page: str, lines: list[str], printed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (line,) = lines
    assert main(shlex.split(line)[1:]) == 0
    said = capsys.readouterr().out.splitlines()
    assert printed and [one for one in printed if one not in said] == [], page


@cache
def _rows(command: str, folder: Path) -> dict[str, tuple[float, float]]:
    """Step -> loss and gradient norm that a run prints; each command runs once."""
    variables, _, words = command.partition("titan ")
    environment = dict(one.split("=") for one in variables.split()) | {"TITAN_PYTHON": sys.executable}
    done = run_titan([*shlex.split(words), "--run.dir", str(folder)], ROOT, environment)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    rows = map(_ROW.match, (done.stdout + done.stderr).splitlines())
    return {row[1]: (float(row[2]), float(row[3])) for row in rows if row}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.sweep
@pytest.mark.parametrize(("page", "lines", "printed"), of_kind("titan train "), ids=lambda value: str(value)[:12])
def test_a_run_prints_the_losses_of_the_page(page: str, lines: list[str], printed: list[str], folder: Path) -> None:
    wanted = [row for row in map(_ROW.fullmatch, printed) if row]
    assert len(wanted) == len(printed) >= 2, page
    for line in lines:
        rows = _rows(line, folder)
        for row in wanted:
            loss, norm = rows[row[1]]
            assert loss == pytest.approx(float(row[2]), abs=1.1e-4) and norm == pytest.approx(float(row[3]), abs=1.1e-3)


def test_links_lead_to_pages() -> None:
    for page in PAGES.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("https://") or (PAGES / link).exists(), f"{page.name} links {link}"
