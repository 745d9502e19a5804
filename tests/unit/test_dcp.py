"""`titan convert` to and from PyTorch's default checkpoint format."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoints import names_in
from tests.huggingface import SMALL, Drawn, convert, converting, plugin, write
from titan import cli
from titan.checkpoint.disk.folder import FORMAT
from titan.contracts import Model
from titan.inference import conversion
from titan.weights.huggingface import shapes_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def model() -> Model:
    return plugin("llama")


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """The words that name the model's job, whose byte tokenizer `converting` sets."""
    sizes = "\n".join(f"{key} = {value}" for key, value in SMALL.items())
    about = f'[model]\nname = "llama"\n{sizes}\n[train]\nsteps = 1\nglobal_batch_size = 1\n'
    (tmp_path / "job.toml").write_text(f"{about}[data]\nname = \"text\"\npath = 'job.toml'\nseq_len = 64\n")
    return ["--config", str(tmp_path / "job.toml")]


def assert_holds(folder: Path, drawn: Drawn, model: Model) -> None:
    saved = conversion.open_weights(folder, model)
    for name, tensor in drawn.tensors.items():
        assert saved.dtype(name) is tensor.dtype and torch.equal(saved.read(name), tensor), name


def test_pytorch_reads_what_is_written(tmp_path: Path, model: Model) -> None:
    drawn = write(tmp_path / "hf", model, torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "dcp", "dcp")
    state = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes_of(model).items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    for name, tensor in drawn.tensors.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("prefix", ["", "model."])
def test_what_pytorch_writes_is_read(tmp_path: Path, model: Model, job: list[str], prefix: str) -> None:
    """Beside an optimizer's state, and from a process that saves the model as DCP's examples do."""
    drawn = Drawn(model, torch.float32)
    state = {f"{prefix}{name}": tensor for name, tensor in drawn.tensors.items()}
    dcp.save({**state, "optimizer.state.embed.weight.exp_avg": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "kept", "titan", *job, "--trust-pickle")
    assert_holds(tmp_path / "kept" / "step-00000000", drawn, model)
    convert(tmp_path / "dcp", tmp_path / "hf", "hf", *job, "--trust-pickle")
    assert_holds(tmp_path / "hf", drawn, model)


def test_refusals(tmp_path: Path, model: Model, job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    drawn = Drawn(model, torch.float32)
    lacking = {name: tensor for name, tensor in drawn.tensors.items() if name != "norm.weight"}
    states: dict[str, dict[str, Any]] = {
        "sound": drawn.tensors,
        "lacking": lacking,
        "more": {f"model.{name}": tensor for name, tensor in {**drawn.tensors, "bias": torch.ones(1)}.items()},
        "flat": {**drawn.tensors, "bias": torch.ones(1)},
        "unlike": {**lacking, "norm.weight": torch.ones(3)},
        "packed": {**lacking, "norm.weight": torch.ones(16, dtype=torch.int8)},
        "holed": drawn.tensors,
        "cut": drawn.tensors,
        "mixed": drawn.tensors,
    }
    for name, state in states.items():
        dcp.save(state, checkpoint_id=tmp_path / name)
    (tmp_path / "cut" / "__0_0.distcp").write_bytes(b"")
    holed = pickle.loads((tmp_path / "holed" / ".metadata").read_bytes())
    holed.state_dict_metadata["norm.weight"].chunks[0].sizes = torch.Size([7])
    (tmp_path / "holed" / ".metadata").write_bytes(pickle.dumps(holed))
    (tmp_path / "mixed" / ".metadata").write_bytes(pickle.dumps(["something else"]))
    trusted = [*job, "--trust-pickle"]
    cases: list[tuple[str, list[str], str]] = [
        ("sound", job, "reading its .metadata can execute code; add --trust-pickle if you trust whoever wrote it"),
        ("sound", ["--trust-pickle"], "which does not say of which model: name its job with --config"),
        ("sound", [*trusted, "--weights", "ema"], "is no checkpoint of titan's, so it has no weights of 'ema'"),
        ("lacking", trusted, "does not fit the model: it lacks norm.weight"),
        ("more", trusted, "does not fit the model: the model lacks model.bias"),
        ("flat", trusted, "does not fit the model: the model lacks bias"),
        ("unlike", trusted, "shapes differ in norm.weight ([3] there, [16] here)"),
        ("packed", trusted, "no plain floating-point numbers in norm.weight (torch.int8)"),
        ("holed", trusted, "chunks do not make up norm.weight"),
        ("cut", trusted, ": EOFError"),
        ("mixed", trusted, "; if a newer one wrote it, convert it there"),
    ]
    for name, words, said in cases:
        assert cli.main([*converting(tmp_path / name, tmp_path / "new", "titan"), *words]) == 2, name
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1, told
    assert names_in(tmp_path) == sorted([*states, "job.toml"])


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch planted",)


def test_a_pickle_runs_only_where_it_is_trusted(
    tmp_path: Path, job: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(_Evil()))
    evil, before = str(tmp_path / "evil"), names_in(tmp_path)
    commands = (
        [*converting(tmp_path / "evil", "new", "titan"), *job],
        ["generate", "--prompt", "x", "--checkpoint", evil],
        ["eval", "--data", "text", "--path", "job.toml", "--checkpoint", evil],
        ["checkpoint", "verify", evil],
    )
    for words in commands:
        assert cli.main(words) == 2
    assert names_in(tmp_path) == before
    assert cli.main([*commands[0], "--trust-pickle"]) == 2
    assert names_in(tmp_path) == sorted([*before, "planted"])


def test_a_checkpoint_of_the_former_format(
    tmp_path: Path, model: Model, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named, not used; its weights can be converted, and it can be removed."""
    drawn, former = Drawn(model, torch.float32), tmp_path / "checkpoints" / "step-00000004"
    dcp.save({f"model.{name}": tensor for name, tensor in drawn.tensors.items()}, checkpoint_id=former)
    (former / "state.json").write_text(json.dumps({"format": 1}))
    entry = {"size": 1, "sha256": "0" * 64}
    (former / "manifest.json").write_text(json.dumps({"files": dict.fromkeys((".metadata", "__0_0.distcp"), entry)}))
    (former / "titan.index").touch()
    said = f"{former} has format 1, but this version of titan reads format {FORMAT}; `titan convert --from {former} "
    for words in (["checkpoint", "list"], ["checkpoint", "verify"], ["generate", "--prompt", "x", "--checkpoint"]):
        assert cli.main([*words, str(former)]) == {"list": 0, "verify": 1}.get(words[1], 2)
        printed = capsys.readouterr()
        assert f"{said}--trust-pickle` reads its weights" in printed.out + printed.err, words
    convert(former, tmp_path / "kept", "titan", *job, "--trust-pickle")
    assert_holds(tmp_path / "kept" / "step-00000000", drawn, model)
    assert cli.main(["checkpoint", "rm", str(former), "--yes"]) == 0
    assert names_in(former.parent) == []
