"""Checkpoints of one process: what is saved comes back bit by bit, and whatever does not fit is refused."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from tests.checkpoints import Toy, assert_same, assert_same_rest, checkpointer_of, copied, made, names_in, train
from titan.checkpoint import storage
from titan.checkpoint.disk import tensor_file
from titan.checkpoint.disk.tensor_file import DTYPES, WAITING
from titan.checkpoint.state import Stacked
from titan.checkpoint.storage import box_of
from titan.contracts import ModelPart
from titan.errors import CheckpointError, PluginError

CPU = torch.device("cpu")


@pytest.mark.parametrize("adamw", [{"fused": True}, {"foreach": True}, {"foreach": False, "amsgrad": True}])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_with_all_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adamw: dict[str, bool], asynchronous: bool
) -> None:
    """In files with tensors so large that none waits to be hashed with others, and small ones."""
    monkeypatch.setattr(tensor_file, "WRITTEN_OUT", 1 << 10)
    parts, optimizer = made(hidden=80, **adamw)
    assert parts[0].module.embed.weight.nbytes > WAITING > parts[0].module.up.weight.nbytes
    train(parts, optimizer, 3)
    checkpointer = checkpointer_of(tmp_path, asynchronous=asynchronous)
    checkpointer.save(3, parts, optimizer, {})
    checkpointer.wait()
    saved = copied(parts, optimizer)
    train(parts, optimizer, 2)

    others, other = made(hidden=80, **adamw)
    checkpointer_of(tmp_path).load(tmp_path / "step-00000003", others, other)
    assert_same(copied(others, other), saved)
    train(others, other, 2)
    assert_same(copied(others, other), copied(parts, optimizer))


def test_sgd_without_state_and_numbers_as_state(tmp_path: Path) -> None:
    model, other = Toy(), Toy()
    optimizer, loaded = (torch.optim.SGD(each.parameters()) for each in (model, other))
    optimizer.state[model.up.bias] = {"count": 7, "scale": 0.5, "mode": "warm", "none": None}
    checkpointer_of(tmp_path).save(1, [ModelPart(model)], optimizer, {})
    checkpointer_of(tmp_path).load(tmp_path / "step-00000001", [ModelPart(other)], loaded)
    assert dict(loaded.state) == {other.up.bias: optimizer.state[model.up.bias]}


def there_and_back(folder: Path, rest: dict[str, Any]) -> dict[str, Any]:
    parts, optimizer = made()
    checkpointer_of(folder).save(1, parts, optimizer, rest)
    return checkpointer_of(folder).load(folder / "step-00000001", parts, optimizer)


def test_tensors_of_every_type_and_stride_come_back(tmp_path: Path) -> None:
    rest = {}
    for name, dtype in DTYPES.items():
        numbers = torch.arange(24).reshape(4, 6).to(torch.float32).to(dtype)
        kinds = {"plain": numbers, "transposed": numbers.t(), "strided": numbers[::2, 1::2], "one": numbers[1, 1]}
        kinds |= {"empty": numbers[:0], "thin": numbers[None, :, :1], "expanded": numbers[:1, :1].expand(3, 2)}
        rest |= {f"{name} {kind}": value for kind, value in kinds.items()}
    rest |= {f"{key} alone": value.clone(memory_format=torch.preserve_format) for key, value in rest.items()}
    loaded = there_and_back(tmp_path, rest)
    for key, value in rest.items():
        assert loaded[key].dtype == value.dtype and loaded[key].shape == value.shape, key
        bits, wanted = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (loaded[key], value))
        assert torch.equal(bits, wanted), key


def test_rest_comes_back(tmp_path: Path) -> None:
    rest = {
        "step": 3,
        "data": {"samples": 96, "order": [1, 2, {"x": None}], "name": "é", "small": 1e-300},
        "techniques": {"ema": {"shadow": {"out.weight": torch.randn(5, 6)}, "list": [torch.tensor(3)], "empty": {}}},
    }
    assert_same_rest(there_and_back(tmp_path, rest), rest)


def test_another_pytorch_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "titan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.13.0+cpu")
        there_and_back(tmp_path, {})
        assert "PyTorch" not in caplog.text
        patch.setattr(torch, "__version__", "2.15.0")
        checkpointer_of(tmp_path).load(tmp_path / "step-00000001", *made())
    assert "saved on PyTorch 2.13.0+cpu; this run has 2.15.0, so numbers may differ" in caplog.text


def test_names_that_are_one_in_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rest\.seen and model\.seen would both be called seen"):
        there_and_back(tmp_path, {"seen": torch.ones(3)})
    own = {"techniques": {"out": {"weight": torch.ones(2)}}}
    assert_same_rest(there_and_back(tmp_path, own), own)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [{"b": {1}}]}, "rest.a.0.b is a set"),
        ({"a": {1: 2}}, "rest.a has the key 1"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, r"the path rest\.a\.b"),
    ],
)
def test_state_that_cannot_be_saved_is_named(value: Any, place: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=place):
        there_and_back(tmp_path, value)


def test_training_goes_on_while_saves_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", on_gpus.append)
    trained, write = Event(), storage.write
    monkeypatch.setattr(storage, "write", lambda *args: trained.wait(30) and write(*args))
    parts, optimizer = made()
    checkpointer = checkpointer_of(tmp_path, asynchronous=True)
    states: dict[int, Any] = {}
    rest: dict[str, Any] = {"list": [], "tensor": torch.zeros(2)}
    for step in range(1, 5):
        states[step] = copied(parts, optimizer), deepcopy(rest)
        checkpointer.save(step, parts, optimizer, rest)
        train(parts, optimizer)
        rest["list"].append(step)
        rest["tensor"] += 1
        assert step > 1 or names_in(tmp_path) in ([], ["step-00000001.tmp"])
        trained.set()
    checkpointer.wait()
    assert on_gpus == [3] * 4
    for step, (state, wanted) in states.items():
        others, other = made()
        assert_same_rest(checkpointer.load(tmp_path / f"step-0000000{step}", others, other), wanted)
        assert_same(copied(others, other), state)


def renamed() -> Toy:
    model = Toy()
    model.out2, model.out = model.out, None
    return model


@pytest.mark.parametrize(
    ("build", "kind", "said"),
    [
        (renamed, torch.optim.AdamW, "it lacks out2.weight; the model lacks out.weight"),
        (partial(Toy, 8), torch.optim.AdamW, r"down\.bias \(\[6\] there, \[8\] here\), down\.weight"),
        (Toy, torch.optim.SGD, "state of AdamW, but this run's optimizer is SGD"),
    ],
    ids=["names", "shapes", "optimizer"],
)
def test_what_does_not_fit_is_refused_and_nothing_is_touched(build: Any, kind: Any, said: str, tmp_path: Path) -> None:
    parts, optimizer = made()
    train(parts, optimizer)
    checkpointer_of(tmp_path).save(1, parts, optimizer, {})
    others, other = [ModelPart(model := build())], kind(model.parameters())
    before = copied(others, other)
    with pytest.raises(CheckpointError, match=said):
        checkpointer_of(tmp_path).load(tmp_path / "step-00000001", others, other)
    assert_same(copied(others, other), before)


def test_a_tensor_of_its_own_has_a_box_among_those_of_other_ranks() -> None:
    assert box_of(Stacked(torch.zeros(3, 5), 2, 4)) == ((2, 0, 0), (1, 3, 5))
    assert box_of(Stacked(torch.zeros(0, 5), 2, 4)) == ((0, 0, 0), (4, 0, 5))
