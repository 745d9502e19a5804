"""`[validation]` as a table of the job, and how documents are cut into windows."""

import math
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit

from tests.jobs import LLAMA
from titan.config import Job, load_job
from titan.config.schema import schema
from titan.errors import ConfigError
from titan.inference.evaluation import Counted, Window, windows
from titan.inference.trainer_api import evaluation_command
from titan.training.validation import perplexity


def job_of(*words: str) -> Job:
    return load_job(LLAMA, ["--data.path", "x", *words])


def faults_of(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        job_of(*words)
    return [str(fault) for fault in caught.value.faults]


def test_it_is_off_unless_asked_for() -> None:
    job = job_of()
    assert (job.validation.every, job.validation_data) == (0, None)
    assert job.table["validation"] == {"every": 0, "samples": 256}


def test_the_resolved_job_gives_the_same_job(tmp_path: Path) -> None:
    job = job_of("--validation.every", "5", "--validation.name", "text", "--validation.path", '["a","b,c"]')
    data = job.validation_data
    assert data is not None
    assert (data.name, data.config.path, job.validation.every) == ("text", ("a", "b,c"), 5)
    (tmp_path / "config.toml").write_text(tomlkit.dumps(dict(job.table)))
    again = load_job(tmp_path / "config.toml")
    assert again.table == job.table and again.validation_data is not None
    assert again.validation_data.config.path == (str(Path("a").absolute()), str(Path("b,c").absolute()))


def test_all_faults_are_said_at_once() -> None:
    words = "--validation.every -1 --validation.name text --validation.glop x --validation.samples a"
    found = faults_of(*words.split())
    wanted = [
        "every = -1: must be at least 0",
        "samples = a",
        "path: missing",
        "glop: unknown key (did you mean 'glob'",
    ]
    assert len(found) == 4
    for what in wanted:
        assert any(f"[validation] {what}" in fault for fault in found), (what, found)


def test_data_must_be_named() -> None:
    why = "[validation] name: missing, for validation.every = 5; name a dataset (jsonl"
    assert why in faults_of("--validation.every", "5")[0]
    missing, unknown = faults_of("--validation.path", "x", "--validation.evry", "5")
    assert "[validation] name: missing" in missing
    assert "[validation] evry: unknown key (did you mean 'every'?)" in unknown
    [unknown] = faults_of("--validation.name", "txt")
    assert "[validation] name = 'txt': unknown dataset (did you mean 'text'?)" in unknown


def test_what_training_decides_is_not_decided_again() -> None:
    [fault] = faults_of("--validation.name", "text", "--validation.path", "x", "--validation.seq_len", "8")
    assert "[validation] seq_len: unknown key" in fault


def test_the_schema_knows_it() -> None:
    properties = schema()["properties"]["validation"]["properties"]
    assert {"every", "samples", "name", "path"} <= properties.keys()
    assert "mixture" not in properties and "seq_len" not in properties


def test_another_dataset_takes_the_place_of_the_quickstarts() -> None:
    # The keys that the file gave to its dataset are not meant for this one.
    words = ["--data.name", "text", "--data.path", "a", "--validation.name", "text", "--validation.path", "b"]
    job = load_job(None, words)
    assert job.validation_data is not None
    assert (job.sources[0].plugin.config.path, job.validation_data.config.path) == ("a", "b")
    assert "split" not in job.table["data"] and job.table["data"]["seq_len"] == 128
    with pytest.raises(ConfigError, match=r"\[data\] split: unknown key"):
        load_job(None, [*words, "--data.split", "train"])
    with pytest.raises(ConfigError, match=r"\[data\] path: unknown key"):
        load_job(None, ["--data.path", "a"])


def test_the_quickstart_validates_on_what_it_does_not_learn_from() -> None:
    job = load_job(None)
    assert job.validation_data is not None and job.validation.every
    assert not set(job.validation_data.files()) & set(job.sources[0].plugin.files())


@pytest.mark.parametrize(
    ("job", "command"),
    [
        (lambda: load_job(None), "eval --checkpoint {here}/runs/quickstart --data stdlib --data.split validation"),
        (job_of, "eval --checkpoint {here}/runs/llama --data text --data.path x"),
        (
            lambda: job_of("--validation.name", "jsonl", "--validation.path", '["a b","c"]', "--validation.field", "f"),
            """eval --checkpoint {here}/runs/llama --data jsonl --data.path '["a b", "c"]' --data.field f""",
        ),
    ],
)
def test_a_run_ends_with_the_command_that_measures_it(
    job: Callable[[], Job], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(evaluation_command(job()))
    assert words[1:] == shlex.split(command.format(here=tmp_path)) and Path(words[0]).name == "titan"


@pytest.mark.parametrize(
    ("ids", "length", "stride", "expected"),
    [
        ("abcde", 9, 9, [("abcde", 4)]),
        ("abcde", 4, 4, [("abcde", 4)]),
        ("abcdefg", 3, 3, [("abcd", 3), ("defg", 3)]),
        ("abcdefgh", 3, 3, [("abcd", 3), ("defg", 3), ("efgh", 1)]),
        ("abcdefg", 4, 1, [("abcde", 4), ("bcdef", 1), ("cdefg", 1)]),
        ("abcdefgh", 4, 2, [("abcde", 4), ("cdefg", 2), ("defgh", 1)]),
        ("ab", 1, 1, [("ab", 1)]),
        ("a", 4, 4, []),
        ("", 4, 4, []),
    ],
)
def test_windows(ids: str, length: int, stride: int, expected: list[tuple[str, int]]) -> None:
    found = windows([ord(letter) for letter in ids], length, stride)
    assert list(found) == [Window([ord(letter) for letter in text], predicted) for text, predicted in expected]


@pytest.mark.parametrize(
    ("text", "words"),
    [("one two", 2), (" one\t\ttwo\n", 4), ("one two\n", 3), ("\n", 2), ("", 1), ("one\u00a0two\x1cthree", 3)],
)
def test_words_are_counted_as_lm_eval_counts_them(text: str, words: int) -> None:
    """lm-eval 0.4.13, api/task.py, lines 444 and 1808: len(re.split(r"\\s+", doc)); bytes: lines 439 and 1803."""
    counted = Counted()
    counted.add(text)
    assert (counted.words, counted.bytes) == (words, len(text.encode()))


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    assert perplexity(math.log(20)) == pytest.approx(20) and perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))
