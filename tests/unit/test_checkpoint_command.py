"""`titan checkpoint`, as a user calls it."""

import errno
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import mutations
from tests.checkpoints import flip, names_in
from titan import cli
from titan.checkpoint.disk import folder as folders
from titan.errors import CheckpointError
from titan.weights.load import stored_tokenizer

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
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def _path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def test_list(run: Path, say: Say) -> None:
    with (_path(run, 20) / "state.json").open("a") as file:
        file.write(" ")
    code, out, err = say("list", run, "--json")
    shown = json.loads(out)["checkpoints"]
    assert code == 0 and err == ""
    states = dict(zip((10, 20, 30, 40), ("complete", "damaged", "complete", "unfinished"), strict=True))
    assert {one["step"]: one["state"] for one in shown} == states
    assert shown[0] | {"saved": ""} == {
        "path": str(_path(run, 10)),
        "step": 10,
        "saved": "",
        "world_size": 1,
        "layout": "dp_shard 2 pp 4",
        "bytes": sum(file.stat().st_size for file in _path(run, 10).iterdir()),
        "state": "complete",
        "fault": "",
        "parent": None,
        "abandoned": False,
    }
    assert [one["parent"] for one in shown[1:]] == [str(_path(run, 10)), str(_path(run, 20)), None]
    code, _, err = say("list", run / "checkpoints")
    size = (_path(run, 20) / "state.json").stat().st_size
    assert err == f"{_path(run, 20)} is damaged: state.json has {size} bytes, its manifest says {size - 1}\n"
    assert len(say("list", _path(run, 30))[1].splitlines()) == 2


def test_verify(run: Path, say: Say) -> None:
    code, out, _ = say("verify", run)
    assert code == 0 and out.count(": verified") == 3
    flip(_path(run, 20) / "rank-00000.safetensors")
    (_path(run, 20) / "rank-00003.safetensors").touch()
    (_path(run, 20) / "titan.index").unlink()
    (_path(run, 30) / "titan.index").write_bytes(b"")
    assert say("verify", _path(run, 10))[0] == 0
    code, out, _ = say("verify", run, "--json")
    faults = {Path(one["path"]).name: one["faults"] for one in json.loads(out)["checkpoints"]}
    assert code == 1
    assert faults["step-00000010"] == [] and faults["step-00000020"] == ["it lacks titan.index"]
    assert faults["step-00000030"][0].startswith("titan.index has 0 bytes, its manifest says ")
    (_path(run, 20) / "titan.index").write_bytes((_path(run, 10) / "titan.index").read_bytes())
    code, out, _ = say("verify", _path(run, 20))
    assert code == 1
    assert "  rank-00003.safetensors is not in its manifest\n  rank-00000.safetensors has SHA-256 " in out


def test_verify_reads_what_the_files_say(run: Path, say: Say) -> None:
    """A manifest that matches the files is no proof that these fit together."""
    mutations.checkpointer(run / "checkpoints").save(50, *mutations.build(), {"more": torch.ones(2)})
    content = (_path(run, 50) / "rank-00000.safetensors").read_bytes()
    differ = "  the header of rank-00000.safetensors and titan.index differ in more\n"
    for name, fault in (("rank-00000.safetensors", differ), ("titan.index", "titan.index is not a valid index")):
        (_path(run, 30) / name).write_bytes(content)
        mutations.reseal(_path(run, 30))
        code, out, _ = say("verify", _path(run, 30))
        assert code == 1 and fault in out


def test_copies_of_the_tokenizer_are_part_of_a_checkpoint(run: Path, say: Say) -> None:
    saver = mutations.checkpointer(run / "checkpoints")
    saver._copies = {"ranks": b"abc", "two words.json": b"{}"}
    tokenizer = {"name": "a", "fingerprint": "f", "copies": {"path": "ranks"}}
    saver.save(50, *mutations.build(), {"config": {}, "tokenizer": tokenizer})
    path = _path(run, 50)
    assert (path / "tokenizer" / "ranks").read_bytes() == b"abc"
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert say("verify", path)[0] == 0 and json.loads(say("list", path, "--json")[1])["checkpoints"][0]["bytes"] == size
    assert stored_tokenizer(path) == tokenizer
    for name in ("../x", "a/b/c", "a/..", "..", 7):
        state = json.loads((path / "state.json").read_text())
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


def test_rm_removes_one(run: Path, say: Say) -> None:
    code, out, _ = say("rm", _path(run, 20), "--yes", "--json")
    assert code == 0 and json.loads(out)["removed"] == [str(_path(run, 20))]
    assert names_in(run / "checkpoints") == ["notes", "step-00000010", "step-00000030", "step-00000040.tmp"]
    assert say("rm", _path(run, 40).with_suffix(".tmp"), "--yes")[0] == 0
    assert names_in(run / "checkpoints") == ["notes", "step-00000010", "step-00000030"]


def test_rm_counts_as_freed_what_is_gone(run: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(folders.shutil, "rmtree", refuse)
    monkeypatch.setattr(folders.log, "warning", (said := []).append)
    assert say("rm", _path(run, 20), "--yes")[:2] == (1, "0 removed, 0.0 MB freed\n")
    assert len(said) == 1 and "cannot be removed: Device or resource busy" in said[0]
    assert json.loads(say("list", run, "--json")[1])["checkpoints"][1]["step"] == 30


def test_rm_keeps_the_newest(run: Path, say: Say) -> None:
    (_path(run, 30) / "state.json").write_text("")
    code, out, _ = say("rm", run, "--keep", "1", "--yes")
    assert code == 0 and out.startswith("2 removed, ")
    assert names_in(run / "checkpoints") == ["notes", "step-00000020", "step-00000040.tmp"]


@pytest.mark.parametrize(("answer", "left"), [("y\n", 3), ("n\n", 4), ("", 4)])
def test_rm_asks(run: Path, say: Say, monkeypatch: pytest.MonkeyPatch, answer: str, left: int) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    code, _, err = say("rm", run, "--keep", "2")
    assert "remove 1 checkpoint? [y/N]" in err and str(_path(run, 10)) in err
    assert code == (left == 4) and len(names_in(run / "checkpoints")) == left + 1


def test_rm_leaves_alone_what_it_should(run: Path, say: Say) -> None:
    before = names_in(run / "checkpoints")
    refused = {
        ("rm", run, "--yes"): "is not one checkpoint; to remove all but the newest N",
        ("rm", run / "checkpoints" / "notes", "--yes"): "is not one checkpoint; to remove all but the newest N",
        ("rm", run / "absent", "--yes"): "no such folder",
        ("rm", run / "absent", "--keep", "1"): "no such folder",
        ("rm", run, "--keep", "0"): "must be at least 1",
        ("rm", _path(run, 10), "--keep", "1"): "is one checkpoint",
        ("list", run / "checkpoints" / "notes"): "is not a checkpoint and contains none",
    }
    (_path(run, 10) / "README.md").touch()
    refused["rm", run, "--keep", "1", "--yes"] = "holds README.md, which is no part of a checkpoint"
    for words, told in refused.items():
        code, _, err = say(*words)
        assert code == 2 and told in err, words
    assert names_in(run / "checkpoints") == before


def test_rm_of_the_only_complete_one_needs_yes(run: Path, say: Say) -> None:
    for step in (10, 20):
        (_path(run, step) / "manifest.json").unlink()
    code, _, err = say("rm", _path(run, 30))
    assert code == 2 and "is the only complete checkpoint in its folder; add --yes" in err
    assert say("rm", _path(run, 30), "--yes")[0] == 0
    assert say("rm", _path(run, 20), "--yes")[0] == 0
    assert names_in(run / "checkpoints") == ["notes", "step-00000010", "step-00000040.tmp"]
