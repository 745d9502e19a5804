"""Files of benchmark results: the newest of each kind, what earlier ones said, and the page written from both."""

import json
from pathlib import Path

import pytest

from bench import results, tables
from bench.headlines import KINDS, comm_rows, headline

OVERHEAD = {
    "fp32": {"tokens": 512, "bare_s": [2.0, 1.0, 3.0], "titan_s": [1.0, 1.0, 1.0]},
    "bf16": {"tokens": 512, "bare_s": [1.0], "titan_s": [2.0]},
}


def test_the_pages_are_what_the_command_writes() -> None:
    assert tables.main(["--check"]) == 0, "out of date; run python -m bench.tables"


def test_a_page_that_was_edited_by_hand_is_found_and_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    page, text = tmp_path / "page.md", tables.PAGES[0].read_text(encoding="utf-8")
    edited = text.replace("| one rank | 1 |", "| one rank | 9 |")
    assert edited != text
    page.write_text(edited, encoding="utf-8")
    assert tables.main(["--check"], [page]) == 1 and page.read_text(encoding="utf-8") == edited
    assert "out of date; run python -m bench.tables" in capsys.readouterr().err
    assert tables.main([], [page]) == 0 and page.read_text(encoding="utf-8") == text


def test_prose_between_tables_stays() -> None:
    text = tables.PAGES[0].read_text(encoding="utf-8")
    before, after = tables.written(text), tables.written(text.replace("shared, busy", "quiet"))
    assert before.replace("shared, busy", "quiet") == after != before


def test_each_file_is_the_newest_of_a_known_kind() -> None:
    newest = dict(results.newest())
    assert set(newest) == set(KINDS)
    for kind, found in newest.items():
        assert headline(kind, found)
        for one in results.earlier():
            assert one["kind"] != kind or one["date"] < found["date"]
    assert {path.suffix for path in results.FOLDER.iterdir()} == {".json", ".jsonl"}


def test_a_result_replaces_the_last_one_and_keeps_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    path = results.write("overhead", OVERHEAD)
    assert path.name == "overhead.json" and results.earlier() == []
    first = json.loads(path.read_text(encoding="utf-8"))
    assert first.items() >= OVERHEAD.items() and first["torch"]
    faster = {**OVERHEAD, "bf16": {"tokens": 512, "bare_s": [3.0], "titan_s": [2.0]}, "start_s": [4.0]}
    assert results.write("overhead", faster) == path
    [one] = results.earlier()
    assert one == {
        "kind": "overhead",
        "date": first["date"],
        "commit": first["commit"],
        "said": "speed of titan relative to the bare loop: fp32 2.00, bf16 0.50",
    }
    assert [kind for kind, _ in results.newest()] == ["overhead"]
    newest = dict(results.newest())["overhead"]
    assert "bf16 1.50; first step ends 4.0 s after the start" in headline("overhead", newest)


def test_methods_are_measured_by_the_all_reduce_of_as_many_ranks() -> None:
    base = {"ranks": 4, "baseline": "all-reduce", "loss": [9.0, 3.0], "bytes_sent": [100, 100], "step_s": [1.0, 2.0]}
    wide = {**base, "ranks": 8, "baseline": "wide", "bytes_sent": [200, 200]}
    lazy = {**wide, "loss": [9.0, 4.0], "bytes_sent": [0, 100], "step_s": [1.0, 5.0]}
    runs = {"all-reduce": base, "wide": wide, "lazy": lazy}
    for name, value in (("all-reduce", 3.5), ("wide", 3.25), ("lazy", 3.75)):
        runs[name] = {**runs[name], "validation": [[1, 9.0], [2, value]]}
    assert comm_rows({"steps": 2, "runs": runs})["lazy"] == dict(
        ranks=8, bytes=50, share=0.25, loss=4.0, validation=3.75, further=0.5, time=2.0
    )


def test_a_file_has_a_line_per_row() -> None:
    table, rows = {"x": {"y": 1}, "z": {}}, [{"a": [1, 2]}, {"a": []}]
    found = {"commit": "c", "rows": rows, "table": table, "samples": [0.5, 1.5]}
    text = results.as_text(found)
    assert json.loads(text) == found
    assert text.startswith('{\n "commit": "c",\n "rows": [\n  {"a": [1, 2]},\n  {"a": []}\n ],\n "table": {\n')


def test_the_commit_is_read_before_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git would call the commit dirty for what the command itself has written."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.write("overhead", OVERHEAD)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    about = results.about

    def unchanged() -> dict[str, object]:
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        return about()

    monkeypatch.setattr(results, "about", unchanged)
    results.write("overhead", OVERHEAD)
    assert results.earlier()
