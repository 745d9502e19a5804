"""`titan checkpoint`, as a user calls it."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import mutations
from tests.checkpoints import flip, names_in
from titan import cli
from titan.checkpoint.disk.manifest import INDEX, data_file
from titan.errors import CheckpointError
from titan.weights.load import stored_tokenizer

DATA = data_file(0)
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints, and what a killed save left."""
    parts, optimizer = mutations.build()
    mesh = {"dp_shard": 2, "tp": 1, "pp": 4, "schedule": "1f1b"}
    saver = mutations.checkpointer(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        saver.save(step, parts, optimizer, {"config": {"mesh": mesh}})
    (tmp_path / "checkpoints" / "step-00000040.tmp").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    return tmp_path


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    def call(*words: object) -> tuple[int, str, str]:
        code = cli.main(["checkpoint", *map(str, words)])
        return (code, *capsys.readouterr())

    return call


def _path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def test_list(run: Path, say: Say) -> None:
    first, damaged = _path(run, 10), _path(run, 20)
    with (damaged / "state.json").open("a") as file:
        file.write(" ")
    code, out, err = say("list", run, "--json")
    shown = json.loads(out)["checkpoints"]
    assert code == 0 and err == ""
    states = [(10, "complete"), (20, "damaged"), (30, "complete"), (40, "unfinished")]
    assert [(one["step"], one["state"]) for one in shown] == states
    assert [one["parent"] for one in shown] == [None, str(first), str(damaged), None]
    about = {"path": str(first), "step": 10, "saved": "", "world_size": 1, "layout": "dp_shard 2 pp 4", "bytes": 0}
    about |= {"state": "complete", "fault": "", "parent": None, "abandoned": False}
    assert shown[0] | {"saved": "", "bytes": 0} == about
    size = (damaged / "state.json").stat().st_size
    told = f"{damaged} is damaged: state.json has {size} bytes, its manifest says {size - 1}\n"
    assert say("list", run / "checkpoints")[2] == told
    assert len(say("list", _path(run, 30))[1].splitlines()) == 2


def test_verify(run: Path, say: Say) -> None:
    code, out, _ = say("verify", run)
    assert code == 0 and out.count(": verified") == 3
    damaged = _path(run, 20)
    flip(damaged / DATA)
    (damaged / "rank-00003.safetensors").touch()
    code, out, _ = say("verify", damaged)
    assert code == 1
    assert f"  rank-00003.safetensors is not in its manifest\n  {DATA} has SHA-256 " in out
    (damaged / INDEX).unlink()
    code, out, _ = say("verify", run, "--json")
    faults = [one["faults"] for one in json.loads(out)["checkpoints"]]
    assert code == 1 and faults == [[], [f"it lacks {INDEX}"], []]


def test_verify_reads_what_the_files_say(run: Path, say: Say) -> None:
    """A manifest that matches the files is no proof that these fit together."""
    mutations.checkpointer(run / "checkpoints").save(50, *mutations.build(), {"more": torch.ones(2)})
    content = (_path(run, 50) / DATA).read_bytes()
    differ = f"  the header of {DATA} and {INDEX} differ in more\n"
    for name, fault in ((DATA, differ), (INDEX, f"{INDEX} is not a valid index")):
        (_path(run, 30) / name).write_bytes(content)
        mutations.reseal(_path(run, 30))
        code, out, _ = say("verify", _path(run, 30))
        assert code == 1 and fault in out


def test_copies_of_the_tokenizer_are_part_of_a_checkpoint(run: Path, say: Say) -> None:
    saver, path = mutations.checkpointer(run / "checkpoints"), _path(run, 50)
    saver._copies = {"ranks": b"abc", "two words.json": b"{}"}
    tokenizer = {"name": "a", "fingerprint": "f", "copies": {"path": "ranks"}}
    saver.save(50, *mutations.build(), {"config": {}, "tokenizer": tokenizer})
    assert (path / "tokenizer" / "ranks").read_bytes() == b"abc" and stored_tokenizer(path) == tokenizer
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert say("verify", path)[0] == 0 and json.loads(say("list", path, "--json")[1])["checkpoints"][0]["bytes"] == size
    state = json.loads((path / "state.json").read_text())
    for name in ("../x", "a/b/c", "a/..", "..", 7):
        state["rest"]["tokenizer"]["copies"]["path"] = name
        (path / "state.json").write_text(json.dumps(state))
        mutations.reseal(path)
        with pytest.raises(CheckpointError, match="gives no valid name, fingerprint and copies of a tokenizer"):
            stored_tokenizer(path)
    flip(path / "tokenizer" / "ranks")
    assert "tokenizer/ranks has SHA-256" in say("verify", path)[1]
    (path / "tokenizer" / "mine").touch()
    assert "tokenizer/mine is not in its manifest" in say("verify", path)[1]
    (path / "tokenizer" / "folder").mkdir()
    assert "holds tokenizer/folder, which is no part" in say("rm", path, "--yes")[2]
    (path / "tokenizer" / "folder").rmdir()
    assert say("rm", path, "--yes")[0] == 0 and not path.exists()


def test_rm_removes_one(run: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (_path(run, step) for step in (10, 20, 30))
    assert json.loads(say("rm", second, "--yes", "--json")[1])["removed"] == [str(second)]
    assert say("rm", _path(run, 40).with_suffix(".tmp"), "--yes")[0] == 0
    assert names_in(run / "checkpoints") == ["notes", first.name, third.name]
    (first / "manifest.json").unlink()
    code, _, err = say("rm", third)
    assert code == 2 and "is the only complete checkpoint in its folder; add --yes" in err
    assert say("rm", third, "--yes")[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    code, _, err = say("rm", first)
    assert code == 0 and "remove 1 checkpoint? [y/N]" in err
    assert names_in(run / "checkpoints") == ["notes"]


@pytest.mark.usefixtures("held_open")
def test_rm_counts_as_freed_what_is_gone(run: Path, say: Say, told: Callable[[], list[str]]) -> None:
    assert say("rm", _path(run, 20), "--yes")[:2] == (1, "0 removed, 0.0 MB freed\n")
    assert len(told()) == 1 and "cannot be removed: Directory not empty" in told()[0]
    assert json.loads(say("list", run, "--json")[1])["checkpoints"][1]["step"] == 30


@pytest.mark.parametrize(("answer", "left"), [("y\n", [20]), ("n\n", [10, 20, 30]), ("", [10, 20, 30])])
def test_rm_asks_and_keeps_the_newest_complete_one(
    run: Path, say: Say, monkeypatch: pytest.MonkeyPatch, answer: str, left: list[int]
) -> None:
    (_path(run, 30) / "state.json").write_text("")
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    code, out, err = say("rm", run, "--keep", "1")
    assert "remove 2 checkpoints? [y/N]" in err and str(_path(run, 10)) in err and str(_path(run, 30)) in err
    assert (code, out[:10]) == ((0, "2 removed,") if answer == "y\n" else (1, ""))
    assert names_in(run / "checkpoints") == ["notes", *(_path(run, step).name for step in left), "step-00000040.tmp"]


def test_rm_leaves_alone_what_it_should(run: Path, say: Say) -> None:
    before = names_in(run / "checkpoints")
    (_path(run, 10) / "README.md").touch()
    refused = {
        ("rm", run, "--yes"): "is not one checkpoint; to remove all but the newest N",
        ("rm", run / "absent", "--yes"): "no such folder",
        ("rm", run / "absent", "--keep", "1"): "no such folder",
        ("rm", run, "--keep", "0"): "must be at least 1",
        ("rm", _path(run, 10), "--keep", "1"): "is one checkpoint",
        ("rm", run, "--keep", "1", "--yes"): "holds README.md, which is no part of a checkpoint",
        ("list", run / "checkpoints" / "notes"): "is not a checkpoint and contains none",
    }
    for words, told in refused.items():
        code, _, err = say(*words)
        assert code == 2 and told in err, words
    assert names_in(run / "checkpoints") == before
