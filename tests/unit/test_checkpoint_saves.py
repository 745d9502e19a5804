"""Saves of one process: which one a run resumes from, what is left and said when one fails, what is on disk when."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import mutations
from tests.checkpoints import checkpointer_of, made, names_in, raising, steps_in
from titan.checkpoint import Checkpointer, storage
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk import manifest, tensor_file
from titan.checkpoint.disk.manifest import INDEX, MANIFEST, STATE, TECHNIQUES, data_file
from titan.checkpoint.ranks import RankFailure, Ranks
from titan.checkpoint.restore import Saved
from titan.checkpoint.state import Aside, Snapshot
from titan.contracts import ModelPart
from titan.errors import EXIT_FAILED, EXIT_WRONG_INPUT, CheckpointError, ConfigError, FolderError, UnreadableError


def save(folder: Path, *steps: int) -> None:
    checkpointer, (parts, optimizer) = checkpointer_of(folder), made()
    for step in steps:
        checkpointer.save(step, parts, optimizer, {})


def test_find(tmp_path: Path, told: Callable[[], list[str]]) -> None:
    folder = tmp_path / "checkpoints"
    checkpointer = checkpointer_of(folder)
    assert checkpointer.find("auto") is None
    assert checkpointer.find("never") is None
    with pytest.raises(ConfigError, match='"required": there is no complete checkpoint'):
        checkpointer.find("required")
    save(folder, 1, 2)
    (folder / "step-00000003.tmp").mkdir()
    assert checkpointer.find("auto") == checkpointer.find("required") == folder / "step-00000002"
    assert not (folder / "step-00000003.tmp").exists()
    assert told() == []
    assert checkpointer.find("never") is None
    assert checkpointer.find(str(folder / "step-00000001")) == folder / "step-00000001"
    assert [text.partition(" in ")[0] for text in told()] == [
        "abandoned: step-00000001, step-00000002",
        "abandoned: step-00000002",
    ]
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpointer.find(str(tmp_path / "elsewhere"))


def test_a_run_that_another_has_overtaken_does_not_save(tmp_path: Path) -> None:
    """One that was suspended, with its whole machine, while another run has come, saved and gone."""
    suspended, successor, (parts, optimizer) = checkpointer_of(tmp_path), checkpointer_of(tmp_path, keep=1), made()
    suspended.find("auto")
    suspended.save(1, parts, optimizer, {})
    successor.find("auto")
    successor.save(2000, parts, optimizer, {})
    with pytest.raises(CheckpointError, match=r"another run has saved to .* in the meantime"):
        suspended.save(2, parts, optimizer, {})
    assert steps_in(tmp_path) == [2000]
    folders.remove(tmp_path / "step-00002000")
    successor.save(2001, parts, optimizer, {})


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "titan.index", "rank-00000.safetensors"])
@pytest.mark.parametrize("call", ["open", "lstat"])
def test_the_newest_is_not_given_up_for_a_read_that_fails(
    name: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that a machine does not give for now may be sound; one of another content is damaged."""
    save(tmp_path, 1, 2)
    checkpointer = checkpointer_of(tmp_path)
    doomed, whole, left = tmp_path / "step-00000002" / name, getattr(Path, call), [1]

    def fail(self: Path, *args: Any, **named: Any) -> Any:
        if self == doomed and left:
            left.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return whole(self, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, call, fail)
        intact = f"{name} cannot be read: Input/output error; the file may be intact"
        with pytest.raises(CheckpointError, match=intact):
            checkpointer.find("auto")
        left.append(1)
        if name == "state.json" and call == "open":
            with pytest.raises(CheckpointError, match=r"saving step 3 .* cannot be read"):
                checkpointer.save(3, *made(), {})
    assert checkpointer.find("auto") == tmp_path / "step-00000002"
    doomed.write_bytes(doomed.read_bytes()[::-1])
    assert checkpointer.find("auto") == tmp_path / "step-00000001"


def test_a_run_started_again_keeps_what_it_saves_and_goes_on_from_there(tmp_path: Path) -> None:
    save(tmp_path, 900, 1000)
    again = checkpointer_of(tmp_path, keep=2)
    assert again.find("never") is None
    again.save(10, *made(), {})
    assert steps_in(tmp_path) == [10, 900, 1000]
    assert again.find("auto") == tmp_path / "step-00000010"
    again.save(20, *made(), {})
    again.wait()
    assert steps_in(tmp_path) == [10, 20]


def test_file_that_is_not_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = storage.write

    def lose(path: Path, *args: Any) -> Any:
        written = write(path, *args)
        (path / "rank-00000.safetensors").unlink()
        return written

    monkeypatch.setattr(storage, "write", lose)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is missing"):
        checkpointer_of(tmp_path).save(1, *made(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_dies_while_a_save_is_given_up_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(_: Path) -> None:  # it dies after this, before the outcome is agreed on
        lost = RuntimeError("Connection closed by peer [127.0.0.1]:5\nmore")
        monkeypatch.setattr(Ranks, "gather", raising(lost))

    monkeypatch.setattr(storage, "write", raising(OSError(errno.EIO, "Input/output error")))
    monkeypatch.setattr(folders, "complete", leave)
    with pytest.raises(CheckpointError) as error:
        checkpointer_of(tmp_path).save(1, *made(), {})
    assert str(error.value) == (
        f"saving step 1 to {tmp_path} failed: rank 0: [Errno 5] Input/output error; then another rank was lost: "
        "Connection closed by peer [127.0.0.1]:5"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_cannot_be_swept_either_says_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((storage, "write"), (folders, "complete")):
        monkeypatch.setattr(owner, name, raising(OSError(errno.ESTALE, "Stale file handle")))
    stale = r"rank 0: \[Errno 116\] Stale file handle"
    with pytest.raises(CheckpointError, match=f"^saving step 1 to .* failed: {stale}; then sweeping failed: {stale}$"):
        checkpointer_of(tmp_path).save(1, *made(), {})


@pytest.mark.parametrize(("number", "code"), [(errno.ESTALE, EXIT_FAILED), (errno.EACCES, EXIT_WRONG_INPUT)])
def test_data_that_cannot_be_read_are_no_damaged_data(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors calls a file that may not be read absent."""
    save(tmp_path, 1)
    checkpointer = checkpointer_of(tmp_path)
    path = checkpointer.find("auto")

    monkeypatch.setattr(Path, "open", raising(OSError(number, os.strerror(number))))
    with pytest.raises(CheckpointError, match=rf"safetensors cannot be read: {os.strerror(number)}") as failed:
        checkpointer.load(path, *made(), {}, ())
    assert failed.value.exit_code == code


@pytest.mark.parametrize("code", [EXIT_FAILED, EXIT_WRONG_INPUT])
def test_where_no_checkpoint_can_be_opened_what_may_pass_is_tried_again(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    checkpointer, codes = checkpointer_of(tmp_path), [code, EXIT_WRONG_INPUT]

    def fail(*_: Any, **__: Any) -> None:
        raise RankFailure("as said", False, False, codes.pop(0))

    monkeypatch.setattr(Saved, "open", fail)
    with pytest.raises(CheckpointError, match=r"no sound checkpoint is left in .*: as said; as said; ") as failed:
        checkpointer.find("auto")
    assert failed.value.exit_code == code


@pytest.mark.parametrize("lost_at", [1, 2, 3])
def test_a_folder_that_is_another_runs_now_is_left_as_it_is(tmp_path: Path, lost_at: int) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00000009.tmp").mkdir()  # what the other run is writing, once this one has lost the folder
    asked = []

    def held() -> None:
        asked.append(1)
        if len(asked) >= lost_at:
            (tmp_path / "step-00000009.tmp").mkdir(exist_ok=True)
            raise FolderError("taken over by another run")

    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=False, rank=0, world_size=1, held=held)
    with pytest.raises(CheckpointError, match=r"^saving step 2 to .* failed: taken over by another run$") as failed:
        checkpointer.save(2, *made(), {})
    assert failed.value.exit_code == EXIT_WRONG_INPUT
    assert {*names_in(tmp_path)} - {"step-00000002.tmp"} == {"step-00000001", "step-00000009.tmp"}
    assert (tmp_path / "step-00000002.tmp" / "state.json").exists() == (lost_at == 3)
    with pytest.raises(CheckpointError, match="taken over by another run"):
        checkpointer.find("auto")
    assert (tmp_path / "step-00000009.tmp").exists()


def test_a_checkpoint_is_saved_though_an_old_one_cannot_be_read(
    tmp_path: Path, told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "retain", raising(UnreadableError("step-00000001/state.json cannot be read")))
    save(tmp_path, 1)
    assert steps_in(tmp_path) == [1]
    assert told() == ["an old checkpoint could not be removed: step-00000001/state.json cannot be read"]


def test_an_error_of_the_background_is_raised_once(tmp_path: Path, told: Callable[[], list[str]]) -> None:
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file where a folder should be")
    checkpointer = checkpointer_of(blocked, asynchronous=True)
    parts, optimizer = made()
    checkpointer.save(1, parts, optimizer, {})
    with pytest.raises(CheckpointError, match=r"saving step 1 to .*checkpoints failed: rank 0: .*there is no complete"):
        checkpointer.save(2, parts, optimizer, {})
    checkpointer.wait()
    checkpointer.save(3, parts, optimizer, {})
    checkpointer.close()
    assert [text.split(" to ")[0] for text in told()] == ["saving step 3"]


class _Gpu:
    """In place of `torch.cuda`, on tensors of the CPU; `trains` runs before the stream that copies begins."""

    def __init__(self, free: int, trains: Callable[[], object]) -> None:
        self.free, self.cached, self._trains = free, 0, trains
        self.asked: list[str] = []

    def Stream(self, device: torch.device) -> "_Gpu":
        return self

    def current_stream(self, device: torch.device) -> str:
        return "computing"

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 10**9

    def memory_reserved(self, device: torch.device) -> int:
        return 500 + self.cached

    def memory_allocated(self, device: torch.device) -> int:
        return 500

    def wait_stream(self, other: str) -> None:
        self.asked.append(f"wait for {other}")

    @contextmanager
    def stream(self, stream: "_Gpu") -> Iterator[None]:
        self.asked.append("copy")
        self._trains()
        yield

    def synchronize(self) -> None:
        self.asked.append("synchronize")


@pytest.mark.parametrize(("free", "clones"), [(1000, True), (900, False)])
def test_a_gpu_with_room_goes_on_while_a_clone_of_its_state_is_copied(free: int, clones: bool) -> None:
    state = [torch.full((100,), 1.0), torch.full((50,), 2.0, dtype=torch.float64)]  # 800 bytes
    host = [torch.zeros_like(tensor) for tensor in state]
    gpu = _Gpu(free, lambda: [tensor.mul_(3) for tensor in state if clones])
    finish = Aside(torch.device("cpu"), gpu).copy(list(zip(host, state, strict=True)))
    assert gpu.asked == ["wait for computing", "copy"] + ["synchronize"] * (not clones)
    finish()
    assert gpu.asked[-1] == "synchronize" and [tensor[0].item() for tensor in host] == [1.0, 2.0]


def test_the_next_clone_takes_the_memory_of_the_last_one() -> None:
    gpu = _Gpu(600, lambda: None)
    aside = Aside(torch.device("cpu"), gpu)
    pairs = [(torch.zeros(100), torch.ones(100))]  # 400 bytes
    aside.copy(pairs)()
    gpu.free, gpu.cached, gpu.asked = 200, 400, []  # freed, but PyTorch keeps it
    aside.copy(pairs)
    assert "synchronize" not in gpu.asked
    gpu.cached = 0  # something else has taken it
    aside.copy(pairs)
    assert "synchronize" in gpu.asked


def test_the_thread_that_writes_waits_for_the_copy_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []
    checkpointer = checkpointer_of(tmp_path, asynchronous=True)
    copy = checkpointer._staging.copy

    def late(snapshot: Snapshot) -> tuple[Snapshot, Callable[[], None]]:
        copied, _ = copy(snapshot)
        weight = copied.local["model.weight"]
        weight.zero_()
        return copied, lambda: weight.fill_(7.0)

    monkeypatch.setattr(checkpointer._staging, "copy", late)
    monkeypatch.setattr(
        checkpointer, "write", lambda step, snapshot, began: found.append(snapshot.local["model.weight"][0, 0].item())
    )
    module = torch.nn.Linear(2, 2, bias=False)
    checkpointer.save(1, [ModelPart(module)], torch.optim.SGD(module.parameters()), {})
    checkpointer.wait()
    assert found == [7.0]


def test_what_is_synced_before_and_after_a_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    before: dict[str, bool] = {}
    fsync, rename = os.fsync, Path.rename

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def look(path: Path, target: Path) -> Path:
        if target.suffix == "" and path.is_dir():
            inside = {str(file.relative_to(path)): file for file in path.rglob("*")}
            before.update({name: file.stat().st_ino in synced for name, file in {**inside, "": path}.items()})
            synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", look)
    saved = mutations.save(tmp_path)
    names = {INDEX, STATE, MANIFEST, TECHNIQUES, data_file(0), data_file(0, of_technique=True)}
    assert before == dict.fromkeys({"", *names}, True) and names == {*names_in(saved), data_file(0, of_technique=True)}
    assert tmp_path.stat().st_ino in synced


def test_a_data_file_has_the_hash_of_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "WRITTEN_OUT", 1 << 10)
    values = {str(count): torch.arange(count) for count in (1, 1 << 16, 3)}
    planned = {name: tensor_file.Chunk(value.dtype, tuple(value.shape)) for name, value in values.items()}
    path = tmp_path / "data"
    assert tensor_file.write(path, planned, values.__getitem__) == manifest.entry_of(path)
