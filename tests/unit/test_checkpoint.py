"""Checkpoints of one process: what is saved comes back bit by bit, and whatever does not fit is refused."""

import errno
import json
import os
import random
from collections.abc import Callable, Iterator
from logging import INFO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.mutations import reseal
from tests.jobs import stored
from titan.checkpoint import Checkpointer, Own, rng_state, set_rng_state
from titan.checkpoint.disk import folder as folders
from titan.checkpoint.disk.index import DTYPES
from titan.checkpoint.ranks import Ranks
from titan.checkpoint.state import rejoin, separate
from titan.checkpoint.techniques import without
from titan.contracts import ModelPart
from titan.errors import CheckpointError, ConfigError, FolderError, PluginError, UnreadableError
from titan.log import log

CPU = torch.device("cpu")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Warnings and errors the run has said so far."""
    log.addHandler(caplog.handler)
    yield lambda: list(dict.fromkeys(r.message for r in caplog.records if r.name == log.name and r.levelno > INFO))
    log.removeHandler(caplog.handler)


class _Toy(nn.Module):
    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, hidden)
        self.out = nn.Linear(hidden, 5)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("rope", torch.zeros(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.out(self.embed(tokens))


def _made(hidden: int = 6, **adamw: Any) -> tuple[list[ModelPart], torch.optim.Optimizer]:
    model = _Toy(hidden)
    return [ModelPart(model)], torch.optim.AdamW(model.parameters(), lr=1e-2, **adamw)


def _train(parts: list[ModelPart], optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        parts[0].module(torch.arange(11)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _copied(parts: list[ModelPart], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {name: tensor.clone() for name, tensor in parts[0].module.state_dict().items()}
    for name, parameter in parts[0].parameters():
        state |= {f"{name}.{slot}": value.clone() for slot, value in optimizer.state[parameter].items()}
    return state


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def _checkpointer(folder: Path, keep: int = 0, asynchronous: bool = False) -> Checkpointer:
    return Checkpointer(folder, keep=keep, asynchronous=asynchronous, rank=0, world_size=1)


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


@pytest.mark.parametrize("adamw", [{"fused": True}, {"foreach": True}, {"foreach": False, "amsgrad": True}])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_state_comes_back_and_training_goes_on_the_same(
    tmp_path: Path, adamw: dict[str, bool], asynchronous: bool
) -> None:
    parts, optimizer = _made(**adamw)
    _train(parts, optimizer, 3)
    checkpointer = _checkpointer(tmp_path, asynchronous=asynchronous)
    checkpointer.save(3, parts, optimizer, {})
    checkpointer.wait()
    saved = _copied(parts, optimizer)
    _train(parts, optimizer, 2)

    others, other = _made(**adamw)
    _checkpointer(tmp_path).load(tmp_path / "step-00000003", others, other)
    _assert_same(_copied(others, other), saved)
    _train(others, other, 2)
    _assert_same(_copied(others, other), _copied(parts, optimizer))


def test_sgd_without_state_and_numbers_as_state(tmp_path: Path) -> None:
    model = _Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.out.bias] = {"count": 7, "scale": 0.5, "mode": "warm", "none": None}
    _checkpointer(tmp_path).save(1, [ModelPart(model)], optimizer, {})
    other = _Toy()
    loaded = torch.optim.SGD(other.parameters(), lr=0.1)
    _checkpointer(tmp_path).load(tmp_path / "step-00000001", [ModelPart(other)], loaded)
    assert dict(loaded.state) == {other.out.bias: {"count": 7, "scale": 0.5, "mode": "warm", "none": None}}


def test_tensors_of_every_type_and_stride_come_back(tmp_path: Path) -> None:
    rest = {}
    for name, dtype in DTYPES.items():
        numbers = torch.arange(24).reshape(4, 6).to(torch.float32).to(dtype)
        kinds = {
            "plain": numbers, "transposed": numbers.t(), "strided": numbers[::2, 1::2], "one": numbers[1, 1],
            "empty": numbers[:0], "thin": numbers[None, :, :1], "expanded": numbers[:1, :1].expand(3, 2),
        }  # fmt: skip
        rest |= {f"{name} {kind}": value for kind, value in kinds.items()}
    rest |= {f"{key} alone": value.clone(memory_format=torch.preserve_format) for key, value in rest.items()}
    parts, optimizer = _made()
    _checkpointer(tmp_path).save(1, parts, optimizer, rest)
    loaded = _checkpointer(tmp_path).load(tmp_path / "step-00000001", parts, optimizer)
    for key, value in rest.items():
        assert loaded[key].dtype == value.dtype and loaded[key].shape == value.shape, key
        bits, wanted = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (loaded[key], value))
        assert torch.equal(bits, wanted), key


def test_rest_comes_back(tmp_path: Path) -> None:
    rest = {
        "step": 3, "data": {"samples": 96, "order": [1, 2, {"x": None}], "name": "é", "small": 1e-300},
        "techniques": {"ema": {"shadow": {"out.weight": torch.randn(5, 6)}, "list": [torch.tensor(3)], "empty": {}}},
    }  # fmt: skip
    parts, optimizer = _made()
    _checkpointer(tmp_path).save(3, parts, optimizer, rest)
    loaded = _checkpointer(tmp_path).load(tmp_path / "step-00000003", parts, optimizer)
    shadow = loaded["techniques"]["ema"]["shadow"].pop("out.weight")
    count = loaded["techniques"]["ema"]["list"].pop()
    assert torch.equal(shadow, rest["techniques"]["ema"]["shadow"].pop("out.weight"))
    assert count.dtype == torch.int64 and count.item() == 3
    rest["techniques"]["ema"]["list"].pop()
    assert loaded == rest


def test_only_tensors_go_through_dcp(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    parts, optimizer = _made()
    _train(parts, optimizer)
    _checkpointer(tmp_path).save(1, parts, optimizer, {"a": 1, "b": {"c": torch.ones(1)}, "rng": rng_state(CPU)})
    metadata = FileSystemReader(tmp_path / "step-00000001").read_metadata()
    assert metadata.planner_data is None
    assert stored(tmp_path / "step-00000001").tensors.keys() == metadata.state_dict_metadata.keys()
    names = ["embed.weight", "out.bias", "out.weight"]
    slots = [f"optimizer.{name}.{slot}" for name in names for slot in ("exp_avg", "exp_avg_sq", "step")]
    model = [f"model.{name}" for name in [*names, "seen"]]
    assert sorted(metadata.state_dict_metadata) == sorted([*model, *slots, "rest.b.c", "rest.rng.0.cpu"])


def test_rng_goes_on_where_it_was(tmp_path: Path) -> None:
    parts, optimizer = _made()
    _checkpointer(tmp_path).save(1, parts, optimizer, {"rng": rng_state(CPU)})
    drawn = torch.randn(5)
    torch.randn(random.randrange(1, 9))
    rest = _checkpointer(tmp_path).load(tmp_path / "step-00000001", parts, optimizer)
    set_rng_state(rest["rng"], CPU)
    assert torch.equal(torch.randn(5), drawn)


def test_own_tensors_are_left_alone_on_another_world_size() -> None:
    plain, tensors = separate({"rng": Own(cpu=torch.ones(2))}, rank=3)
    assert json.loads(json.dumps(plain)) == plain
    assert list(tensors) == ["rest.rng.3.cpu"]
    assert rejoin(plain, 3, tensors.__getitem__, "here") == {"rng": {"cpu": tensors["rest.rng.3.cpu"]}}
    assert rejoin(plain, None, tensors.__getitem__, "here") == {"rng": {}}


@pytest.mark.parametrize(
    ("value", "place"), [({"a": [{"b": {1}}]}, "rest.a.0.b is a set"), ({"a": {1: 2}}, "rest.a has the key 1")]
)
def test_state_that_cannot_be_saved_is_named(value: Any, place: str) -> None:
    with pytest.raises(PluginError, match=place):
        separate(value, 0)


def test_two_tensors_at_one_place_are_refused() -> None:
    with pytest.raises(PluginError, match=r"the path rest\.a\.b"):
        separate({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, 0)


def test_background_save_holds_the_values_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Event

    from titan.checkpoint import storage

    changed, write = Event(), storage.write

    def late(*args: Any) -> Any:
        assert changed.wait(10)
        return write(*args)

    monkeypatch.setattr(storage, "write", late)
    parts, optimizer = _made()
    _train(parts, optimizer, 2)
    saved = _copied(parts, optimizer)
    rest = {"list": [1], "tensor": torch.ones(2)}
    checkpointer = _checkpointer(tmp_path, asynchronous=True)
    checkpointer.save(2, parts, optimizer, rest)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["step-00000002.tmp"])
    _train(parts, optimizer, 3)
    rest["list"].append(2)
    rest["tensor"].zero_()
    changed.set()
    checkpointer.wait()
    others, other = _made()
    loaded = checkpointer.load(tmp_path / "step-00000002", others, other)
    _assert_same(_copied(others, other), saved)
    assert loaded["list"] == [1] and loaded["tensor"].tolist() == [1, 1]


def test_background_saves_queue_up_and_the_copy_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", on_gpus.append)
    parts, optimizer = _made()
    checkpointer = _checkpointer(tmp_path, keep=2, asynchronous=True)
    states = {}
    for step in range(1, 5):
        _train(parts, optimizer)
        states[step] = _copied(parts, optimizer)
        checkpointer.save(step, parts, optimizer, {})
    checkpointer.wait()
    assert _steps(tmp_path) == [3, 4] and on_gpus == [3] * 4
    for step in (3, 4):
        others, other = _made()
        checkpointer.load(tmp_path / f"step-0000000{step}", others, other)
        _assert_same(_copied(others, other), states[step])


def test_find(tmp_path: Path, told: Callable[[], list[str]]) -> None:
    folder = tmp_path / "checkpoints"
    checkpointer = _checkpointer(folder)
    assert checkpointer.find("auto") is None
    assert checkpointer.find("never") is None
    with pytest.raises(ConfigError, match='"required": there is no complete checkpoint'):
        checkpointer.find("required")
    parts, optimizer = _made()
    checkpointer.save(1, parts, optimizer, {})
    checkpointer.save(2, parts, optimizer, {})
    (folder / "step-00000003.tmp").mkdir()
    assert checkpointer.find("auto") == checkpointer.find("required") == folder / "step-00000002"
    assert not (folder / "step-00000003.tmp").exists()
    assert told() == []
    assert checkpointer.find("never") is None
    assert checkpointer.find(str(folder / "step-00000001")) == folder / "step-00000001"
    aside = f"ignores {folder / 'step-00000002'}, the newest checkpoint of this run"
    path = str(folder / "step-00000001")
    assert told() == [f"checkpoint.resume = 'never' {aside}", f"checkpoint.resume = {path!r} {aside}"]
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpointer.find(str(tmp_path / "elsewhere"))


def test_a_run_that_another_has_overtaken_does_not_save(tmp_path: Path) -> None:
    """One that was suspended, with its whole machine, while another run has come, saved and gone."""
    suspended, successor, (parts, optimizer) = _checkpointer(tmp_path), _checkpointer(tmp_path, keep=1), _made()
    suspended.find("auto")
    suspended.save(1, parts, optimizer, {})
    successor.find("auto")
    successor.save(2000, parts, optimizer, {})
    with pytest.raises(CheckpointError, match=r"another run has saved to .* in the meantime"):
        suspended.save(2, parts, optimizer, {})
    assert _steps(tmp_path) == [2000]
    folders.remove(tmp_path / "step-00002000")
    successor.save(2001, parts, optimizer, {})


@pytest.mark.parametrize("name", ["manifest.json", "state.json", ".metadata", "titan.index", "__0_0.distcp"])
@pytest.mark.parametrize("call", ["open", "lstat"])
def test_the_newest_is_not_given_up_for_a_read_that_fails(
    name: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that a machine does not give for now may be sound; one of another content is damaged."""
    checkpointer, (parts, optimizer) = _checkpointer(tmp_path), _made()
    for step in (1, 2):
        checkpointer.save(step, parts, optimizer, {})
    doomed, whole, left = tmp_path / "step-00000002" / name, getattr(Path, call), [1]

    def fail(self: Path, *args: Any, **named: Any) -> Any:
        if self == doomed and left:
            left.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return whole(self, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, call, fail)
        with pytest.raises(
            CheckpointError, match=rf"{name} cannot be read: Input/output error; the file may be intact"
        ):
            checkpointer.find("auto")
        left.append(1)
        if name == "state.json" and call == "open":
            with pytest.raises(CheckpointError, match=r"saving step 3 .* cannot be read"):
                checkpointer.save(3, parts, optimizer, {})
    assert checkpointer.find("auto") == tmp_path / "step-00000002"
    doomed.write_bytes(doomed.read_bytes()[::-1])
    assert checkpointer.find("auto") == tmp_path / "step-00000001"


def test_a_run_started_again_keeps_what_it_saves_and_goes_on_from_there(tmp_path: Path) -> None:
    parts, optimizer = _made()
    for step in (900, 1000):
        _checkpointer(tmp_path).save(step, parts, optimizer, {})
    again = _checkpointer(tmp_path, keep=2)
    assert again.find("never") is None
    again.save(10, parts, optimizer, {})
    assert _steps(tmp_path) == [10, 1000]
    assert again.find("auto") == tmp_path / "step-00000010"


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    parts, optimizer = _made()
    _train(parts, optimizer)
    _checkpointer(tmp_path).save(1, parts, optimizer, {"a": torch.ones(2)})
    yield tmp_path / "step-00000001"


def test_absent_and_left_over_names_are_refused(saved: Path) -> None:
    model = _Toy()
    model.out2, model.out = model.out, None
    with pytest.raises(CheckpointError) as refused:
        _checkpointer(saved.parent).load(saved, [ModelPart(model)], torch.optim.AdamW(model.parameters()))
    assert "it lacks out2.bias, out2.weight; the model lacks out.bias, out.weight" in str(refused.value)


def test_names_are_listed_up_to_ten(saved: Path) -> None:
    model = _Toy()
    model.more = nn.ParameterList(torch.zeros(1) for _ in range(13))
    with pytest.raises(CheckpointError, match=r"it lacks more\.0, more\.1, more\.10, .* and 3 more$"):
        _checkpointer(saved.parent).load(saved, [ModelPart(model)], torch.optim.AdamW(model.parameters()))


def test_another_shape_is_refused_and_nothing_is_touched(saved: Path) -> None:
    parts, optimizer = _made(hidden=8)
    before = _copied(parts, optimizer)
    with pytest.raises(CheckpointError, match=r"embed\.weight \(\[11, 6\] there, \[11, 8\] here\), out\.weight"):
        _checkpointer(saved.parent).load(saved, parts, optimizer)
    _assert_same(_copied(parts, optimizer), before)


def test_another_optimizer_is_refused(saved: Path) -> None:
    model = _Toy()
    with pytest.raises(CheckpointError, match="state of AdamW, but this run's optimizer is SGD"):
        _checkpointer(saved.parent).load(saved, [ModelPart(model)], torch.optim.SGD(model.parameters()))


def test_another_format_is_refused(saved: Path) -> None:
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(state | {"format": 99}))
    reseal(saved)
    with pytest.raises(CheckpointError, match="has format 99"):
        _checkpointer(saved.parent).load(saved, *_made())


def test_file_that_is_not_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan.checkpoint import storage

    write = storage.write

    def lose(path: Path, *args: Any) -> Any:
        written = write(path, *args)
        (path / "__0_0.distcp").unlink()
        return written

    monkeypatch.setattr(storage, "write", lose)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        _checkpointer(tmp_path).save(1, *_made(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_dies_while_a_save_is_given_up_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan.checkpoint import storage

    def full(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    def leave(_: Path) -> None:
        monkeypatch.setattr(Ranks, "gather", lose)  # it dies after this, before the outcome is agreed on

    def lose(*_: Any) -> Any:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:5\nmore")

    monkeypatch.setattr(storage, "write", full)
    monkeypatch.setattr(folders, "complete", leave)
    with pytest.raises(CheckpointError) as error:
        _checkpointer(tmp_path).save(1, *_made(), {})
    assert str(error.value) == (
        f"saving step 1 to {tmp_path} failed: rank 0: [Errno 5] Input/output error; then another rank was lost: "
        "Connection closed by peer [127.0.0.1]:5"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_cannot_be_swept_either_says_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan.checkpoint import storage

    def fail(*_: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(storage, "write", fail)
    monkeypatch.setattr(folders, "complete", fail)
    stale = r"rank 0: \[Errno 116\] Stale file handle"
    with pytest.raises(CheckpointError, match=f"^saving step 1 to .* failed: {stale}; then sweeping failed: {stale}$"):
        _checkpointer(tmp_path).save(1, *_made(), {})


@pytest.mark.parametrize("lost_at", [1, 2, 3])
def test_a_folder_that_is_another_runs_now_is_left_as_it_is(tmp_path: Path, lost_at: int) -> None:
    parts, optimizer = _made()
    _checkpointer(tmp_path).save(1, parts, optimizer, {})
    (tmp_path / "step-00000009.tmp").mkdir()  # what the other run is writing, once this one has lost the folder
    asked = []

    def held() -> None:
        asked.append(1)
        if len(asked) >= lost_at:
            (tmp_path / "step-00000009.tmp").mkdir(exist_ok=True)
            raise FolderError("taken over by another run")

    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=False, rank=0, world_size=1, held=held)
    with pytest.raises(CheckpointError, match=r"^saving step 2 to .* failed: rank 0: taken over by another run$"):
        checkpointer.save(2, parts, optimizer, {})
    left = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in left if name != "step-00000002.tmp"] == ["step-00000001", "step-00000009.tmp"]
    assert (tmp_path / "step-00000002.tmp" / "state.json").exists() == (lost_at == 3)
    with pytest.raises(CheckpointError, match="taken over by another run"):
        checkpointer.find("auto")
    assert (tmp_path / "step-00000009.tmp").exists()


def test_a_checkpoint_is_saved_though_an_old_one_cannot_be_read(
    tmp_path: Path, told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise UnreadableError("step-00000001/state.json cannot be read")

    monkeypatch.setattr(folders, "retain", fail)
    _checkpointer(tmp_path).save(1, *_made(), {})
    assert _steps(tmp_path) == [1]
    assert told() == ["an old checkpoint could not be removed: step-00000001/state.json cannot be read"]


def test_an_error_of_the_background_is_raised_once(tmp_path: Path, told: Callable[[], list[str]]) -> None:
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file where a folder should be")
    checkpointer = _checkpointer(blocked, asynchronous=True)
    parts, optimizer = _made()
    checkpointer.save(1, parts, optimizer, {})
    with pytest.raises(CheckpointError, match=r"saving step 1 to .*checkpoints failed: rank 0: .*there is no complete"):
        checkpointer.save(2, parts, optimizer, {})
    checkpointer.wait()
    checkpointer.save(3, parts, optimizer, {})
    checkpointer.close()
    assert [text.split(" to ")[0] for text in told()] == ["saving step 3"]


def test_a_list_keeps_what_is_beside_a_tensor_of_other_ranks() -> None:
    elsewhere = {"$tensor": "rest.techniques.t.elsewhere"}
    table = {"t": {"both": [elsewhere, 3.0], "alone": [elsewhere], "value": 1}}
    assert without(table, {"rest.techniques.t.elsewhere"}) == {"t": {"both": [elsewhere, 3.0], "value": 1}}
