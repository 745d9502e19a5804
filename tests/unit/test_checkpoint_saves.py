"""Saves of one process: what is left and said when one fails, what is on disk when."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from bench import mutations
from tests.checkpoints import assert_same, checkpointer_of, copied, made, names_in, raising, steps_in
from titan.checkpoint import Checkpointer, storage
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk import manifest
from titan.checkpoint.disk.manifest import TECHNIQUES, FileEntry, data_file
from titan.checkpoint.ranks import RankFailure, Ranks
from titan.checkpoint.restore import Saved
from titan.checkpoint.state import Aside, Snapshot, Staging
from titan.errors import EXIT_FAILED, EXIT_WRONG_INPUT, CheckpointError, FolderError, UnreadableError


def save(folder: Path, *steps: int) -> None:
    checkpointer, (parts, optimizer) = checkpointer_of(folder), made()
    for step in steps:
        checkpointer.save(step, parts, optimizer, {})


def test_a_run_that_another_has_overtaken_does_not_save(tmp_path: Path) -> None:
    """One that was suspended, with its whole machine, while another run has come, saved and gone."""
    suspended, successor = checkpointer_of(tmp_path), checkpointer_of(tmp_path, keep=1)
    for checkpointer, step in ((suspended, 1), (successor, 2000)):
        checkpointer.find("auto")
        checkpointer.save(step, *made(), {})
    with pytest.raises(CheckpointError, match=r"another run has saved to .* in the meantime"):
        suspended.save(2, *made(), {})
    assert steps_in(tmp_path) == [2000]
    folders.remove(tmp_path / "step-00002000")
    successor.save(2001, *made(), {})


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "titan.index", "rank-00000.safetensors"])
@pytest.mark.parametrize(
    ("call", "number", "code"),
    [("open", errno.EIO, EXIT_FAILED), ("lstat", errno.EIO, EXIT_FAILED), ("open", errno.EACCES, EXIT_WRONG_INPUT)],
)
def test_a_read_that_fails_is_no_damage(
    name: str, call: str, number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    checkpointer, whole = checkpointer_of(tmp_path), getattr(Path, call)

    def fail(self: Path, *args: Any, **named: Any) -> Any:
        if self == tmp_path / "step-00000002" / name:
            raise OSError(number, os.strerror(number))
        return whole(self, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, call, fail)
        told = f"{name} cannot be read: {os.strerror(number)}; the file may be intact"
        with pytest.raises(CheckpointError, match=told) as failed:
            checkpointer.find("auto")
        assert failed.value.exit_code == code
        if name == "state.json" and call == "open":
            with pytest.raises(CheckpointError, match=r"saving step 3 .* cannot be read"):
                checkpointer.save(3, *made(), {})
    assert checkpointer.find("auto") == tmp_path / "step-00000002"


def test_a_slow_removal_delays_no_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed, saver = Event(), checkpointer_of(tmp_path, keep=1)
    monkeypatch.setattr(folders, "sweep", lambda path: removed.wait(60) and shutil.rmtree(path))
    for step in (1, 2):
        saver.save(step, *made(), {})
    saver.wait()
    assert len(list(tmp_path.iterdir())) == 2
    removed.set()
    saver.close()
    assert steps_in(tmp_path) == [2]


def test_file_that_is_not_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = storage.write
    monkeypatch.setattr(storage, "write", lambda path, *args: write(path, *args) | {data_file(1): FileEntry(1, "")})
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is missing"):
        checkpointer_of(tmp_path).save(1, *made(), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("owner", "name", "error", "then"),
    [
        (folders, "survey", OSError(errno.ESTALE, "Stale file"), "sweeping failed: rank 0: [Errno 116] Stale file"),
        (Ranks, "first", RuntimeError("Connection closed\nmore"), "another rank was lost: Connection closed"),
    ],
    ids=["the disk", "a peer"],
)
def test_what_fails_while_a_save_is_given_up(
    owner: Any, name: str, error: Exception, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        monkeypatch.setattr(owner, name, raising(error))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage, "write", fail)
    with pytest.raises(CheckpointError) as failed:
        checkpointer_of(tmp_path).save(1, *made(), {})
    assert str(failed.value).endswith(f" failed: rank 0: [Errno 5] Input/output error; then {then}")


def test_data_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    checkpointer = checkpointer_of(tmp_path)
    path = checkpointer.find("auto")
    monkeypatch.setattr(Path, "open", raising(OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(CheckpointError, match="safetensors cannot be read: Stale file handle") as failed:
        checkpointer.load(path, *made(), {}, ())
    assert failed.value.exit_code == EXIT_FAILED


@pytest.mark.parametrize("code", [EXIT_FAILED, EXIT_WRONG_INPUT])
def test_where_all_fail_what_may_pass_decides(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2)
    failures = iter([RankFailure("one", False, False, code), RankFailure("other", False, False, EXIT_WRONG_INPUT)])
    checkpointer = checkpointer_of(tmp_path)
    monkeypatch.setattr(Saved, "open", lambda *_: raising(next(failures))())
    with pytest.raises(CheckpointError, match=r"no sound checkpoint is left in .*: one; other; ") as failed:
        checkpointer.find("auto")
    assert failed.value.exit_code == code


@pytest.mark.parametrize("lost_at", [1, 2, 3])
def test_a_folder_that_is_another_runs_now_is_left_as_it_is(tmp_path: Path, lost_at: int) -> None:
    save(tmp_path, 1)
    others = tmp_path / "step-00000009.tmp"  # what the other run is writing
    asked = iter(range(1, lost_at))

    def held() -> None:
        if next(asked, None) is None:
            others.mkdir(exist_ok=True)
            raise FolderError("taken over by another run")

    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=False, rank=0, world_size=1, held=held)
    with pytest.raises(CheckpointError, match=r"^saving step 2 to .* failed: taken over by another run$") as failed:
        checkpointer.save(2, *made(), {})
    assert failed.value.exit_code == EXIT_WRONG_INPUT
    assert {*names_in(tmp_path)} - {"step-00000002.tmp"} == {"step-00000001", others.name}
    assert (tmp_path / "step-00000002.tmp" / "state.json").exists() == (lost_at == 3)
    with pytest.raises(CheckpointError, match="taken over by another run"):
        checkpointer.find("auto")
    assert others.exists()


def test_a_save_beside_an_old_one_that_cannot_be_read(tmp_path: Path, told: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(folders, "retain", raising(UnreadableError("step-00000001/state.json cannot be read")))
    save(tmp_path, 1)
    assert steps_in(tmp_path) == [1]
    assert told() == ["an old checkpoint could not be removed: step-00000001/state.json cannot be read"]


def test_an_error_of_the_background_is_raised_once(tmp_path: Path, told: Callable[[], list[str]]) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    checkpointer, (parts, optimizer) = checkpointer_of(tmp_path / "checkpoints", asynchronous=True), made()
    checkpointer.save(1, parts, optimizer, {})
    with pytest.raises(CheckpointError, match=r"saving step 1 to .*checkpoints failed: rank 0: .*there is no complete"):
        checkpointer.save(2, parts, optimizer, {})
    checkpointer.wait()
    checkpointer.save(3, parts, optimizer, {})
    checkpointer.close()
    assert [text.split(" to ")[0] for text in told()] == ["saving step 3"]


def _gpu(free: int) -> Mock:
    """In place of `torch.cuda`, on tensors of the CPU."""
    gpu = MagicMock()
    gpu.mem_get_info.return_value = free, 10**9
    gpu.memory_reserved.return_value = gpu.memory_allocated.return_value = 500
    return gpu


@pytest.mark.parametrize(("free", "clones"), [(1000, True), (900, False)])
def test_a_gpu_with_room_goes_on_while_a_clone_of_its_state_is_copied(free: int, clones: bool) -> None:
    state = [torch.full((100,), 1.0), torch.full((50,), 2.0, dtype=torch.float64)]  # 800 bytes
    host = [torch.zeros_like(tensor) for tensor in state]
    gpu = _gpu(free)
    gpu.stream.return_value.__enter__.side_effect = lambda: [tensor.mul_(3) for tensor in state if clones]
    finish = Aside(torch.device("cpu"), gpu).copy(list(zip(host, state, strict=True)))
    stream, calls = gpu.Stream.return_value, [name for name, *_ in gpu.mock_calls]
    assert calls.index("Stream().wait_stream") < calls.index("stream().__enter__")
    assert stream.synchronize.called == (not clones)
    finish()
    assert stream.synchronize.called and [tensor[0].item() for tensor in host] == [1.0, 2.0]


def test_the_next_clone_takes_the_memory_of_the_last_one() -> None:
    gpu, pairs = _gpu(600), [(torch.zeros(100), torch.ones(100))]  # 400 bytes
    aside = Aside(torch.device("cpu"), gpu)
    aside.copy(pairs)
    for cached, waits in ((400, False), (0, True)):  # PyTorch keeps it; something else has taken it
        gpu.mem_get_info.return_value, gpu.memory_reserved.return_value = (200, 10**9), 500 + cached
        aside.copy(pairs)
        assert gpu.Stream.return_value.synchronize.called == waits


def test_the_thread_that_writes_waits_for_the_copy_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, (parts, optimizer) = checkpointer_of(tmp_path, asynchronous=True), made()
    before, copy = copied(parts, optimizer), Staging.copy

    def late(self: Staging, snapshot: Snapshot) -> tuple[Snapshot, Callable[[], None]]:
        staged, _ = copy(self, snapshot)
        weight = staged.local["model.out.weight"]
        whole = weight.clone()
        weight.zero_()
        return staged, lambda: weight.copy_(whole)

    monkeypatch.setattr(Staging, "copy", late)
    checkpointer.save(1, parts, optimizer, {})
    checkpointer.load(tmp_path / "step-00000001", parts, optimizer)
    assert_same(copied(parts, optimizer), before)


def test_what_is_synced_before_and_after_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    before: dict[Path, bool] = {}
    fsync, rename = os.fsync, Path.rename

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def look(path: Path, target: Path) -> Path:
        if target.suffix == "" and path.is_dir():
            inside = [path, *path.rglob("*")]
            before.update({file.relative_to(path): file.stat().st_ino in synced for file in inside})
            synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", look)
    saved = mutations.save(tmp_path)
    assert data_file(0, of_technique=True) in manifest.names_in(saved)
    assert before == dict.fromkeys(map(Path, [".", TECHNIQUES, *manifest.names_in(saved)]), True)
    assert tmp_path.stat().st_ino in synced
