"""Tests of the dataset example: the suite of the contract, its documents, and a run over them."""

from pathlib import Path

import pytest

from titan.errors import DataError
from titan.testing import Check, checks, make_plugin, train_job

PLUGINS = ("--plugins.path", str(Path(__file__).with_name("example.py")))


@pytest.mark.parametrize("check", checks("example", *PLUGINS, kind="dataset"), ids=str)
def test_contract(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


def test_documents(tmp_path: Path) -> None:
    dataset = make_plugin("example", *PLUGINS, kind="dataset", path=str(tmp_path))
    with pytest.raises(DataError, match=r"no file matches \*\.txt"):
        dataset.files()
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"one of {name}\n\n\n\ntwo of {name}\n")
    assert dataset.files() == [tmp_path / "a.txt", tmp_path / "b.txt"]
    documents = list(dataset.documents(tmp_path / "a.txt"))
    assert [document.text for document in documents] == ["one of a.txt", "two of a.txt"]
    assert documents[1].place == f"{tmp_path}/a.txt, paragraph 3"


def test_a_run_reads_them(tmp_path: Path) -> None:
    outcome = train_job(tmp_path, 1, *PLUGINS, "--data.name", "example", "--train.steps", "3")
    assert [row["tokens"] for row in outcome.rows.values()] == [128, 256, 384]
