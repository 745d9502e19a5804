"""`titan checkpoint`, as a user calls it."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import mutations
from tests.checkpoints import flip, names_in
from titan.checkpoint import Checkpointer
from titan.checkpoint.disk.folder import step_folder, tidy
from titan.checkpoint.disk.manifest import INDEX, data_file
from titan.errors import CheckpointError
from titan.weights.load import stored_tokenizer

DATA = data_file(0)
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run: three checkpoints, and what a killed save left."""
    mesh = {"dp_shard": 2, "tp": 1, "pp": 4, "schedule": "1f1b"}
    saver = mutations.checkpointer(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        saver.save(step, *mutations.build(), {"config": {"mesh": mesh}})
    (saver.folder / "step-00000040.tmp").mkdir()
    (saver.folder / "notes").mkdir()
    return saver.folder


def test_list(folder: Path, say: Say) -> None:
    first, damaged = step_folder(folder, 10), step_folder(folder, 20)
    with (damaged / "state.json").open("a") as file:
        file.write(" ")
    code, out, err = say("list", folder.parent, "--json")
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
    assert say("list", folder)[2] == told
    assert len(say("list", step_folder(folder, 30))[1].splitlines()) == 2


def test_verify(folder: Path, say: Say) -> None:
    code, out, _ = say("verify", folder.parent)
    assert code == 0 and out.count(": verified") == 3
    damaged = step_folder(folder, 20)
    flip(damaged / DATA)
    (damaged / "rank-00003.safetensors").touch()
    code, out, _ = say("verify", damaged)
    assert code == 1
    assert f"  rank-00003.safetensors is not in its manifest\n  {DATA} has SHA-256 " in out
    (damaged / INDEX).unlink()
    code, out, _ = say("verify", folder.parent, "--json")
    faults = [one["faults"] for one in json.loads(out)["checkpoints"]]
    assert code == 1 and faults == [[], [f"it lacks {INDEX}"], []]
    # A manifest that matches the files is no proof that these fit together.
    mutations.checkpointer(folder).save(50, *mutations.build(), {"more": torch.ones(2)})
    content, path = (step_folder(folder, 50) / DATA).read_bytes(), step_folder(folder, 30)
    differ = f"  the header of {DATA} and {INDEX} differ in more\n"
    for name, fault in ((DATA, differ), (INDEX, f"{INDEX} is not a valid index")):
        (path / name).write_bytes(content)
        mutations.reseal(path)
        code, out, _ = say("verify", path)
        assert code == 1 and fault in out


def test_copies_of_the_tokenizer_are_part_of_a_checkpoint(folder: Path, say: Say) -> None:
    copies, path = {"ranks": b"abc", "two words.json": b"{}"}, step_folder(folder, 50)
    saver = Checkpointer(folder, keep=0, asynchronous=False, rank=0, world_size=1, copies=copies)
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


def test_rm_removes_one(folder: Path, say: Say, held_open: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (step_folder(folder, step) for step in (10, 20, 30))
    assert say("rm", second, "--yes")[:2] == (1, "0 removed, 0.0 MB freed\n")
    held_open()
    tidy(folder)
    second.with_suffix(".tmp").mkdir()
    assert say("rm", second.with_suffix(".tmp"), "--yes")[0] == 0
    assert names_in(folder) == ["notes", first.name, third.name]
    (first / "manifest.json").unlink()
    code, _, err = say("rm", third)
    assert code == 2 and "is the only complete checkpoint in its folder; add --yes" in err
    assert json.loads(say("rm", third, "--yes", "--json")[1])["removed"] == [str(third)]
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    code, _, err = say("rm", first)
    assert code == 0 and "remove 1 checkpoint? [y/N]" in err
    assert names_in(folder) == ["notes"]


@pytest.mark.parametrize(("answer", "removes"), [("y\n", True), ("n\n", False), ("", False)])
def test_rm_asks(folder: Path, say: Say, monkeypatch: pytest.MonkeyPatch, answer: str, removes: bool) -> None:
    first, second, third = (step_folder(folder, step) for step in (10, 20, 30))
    (third / "state.json").write_text("")
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    code, out, err = say("rm", folder.parent, "--keep", "1")
    assert "remove 2 checkpoints? [y/N]" in err and str(first) in err and str(third) in err
    assert (code, out[:10]) == ((0, "2 removed,") if removes else (1, ""))
    left = [second] if removes else [first, second, third]
    assert names_in(folder) == ["notes", *(path.name for path in left), "step-00000040.tmp"]


def test_rm_leaves_alone_what_it_should(folder: Path, say: Say) -> None:
    before = names_in(folder)
    (step_folder(folder, 10) / "README.md").touch()
    refused = {
        ("rm", folder.parent, "--yes"): "is not one checkpoint; to remove all but the newest N",
        ("rm", folder / "absent", "--yes"): "no such folder",
        ("rm", folder.parent, "--keep", "0"): "must be at least 1",
        ("rm", step_folder(folder, 10), "--keep", "1"): "is one checkpoint",
        ("rm", folder.parent, "--keep", "1", "--yes"): "holds README.md, which is no part of a checkpoint",
        ("list", folder / "notes"): "is not a checkpoint and contains none",
    }
    for words, told in refused.items():
        code, _, err = say(*words)
        assert code == 2 and told in err, words
    assert names_in(folder) == before
