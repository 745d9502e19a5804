"""`titan checkpoint show`, as a user calls it: tensors that two ranks wrote, of each kind, cut and stacked."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import mutations
from titan.checkpoint import storage
from titan.checkpoint.disk import index, plan
from titan.checkpoint.state import Stacked
from titan.inference import stored_tensors

Say = Callable[..., tuple[int, str, str]]

TENSORS = {
    "model.layers.10.w": torch.tensor([[torch.nan, 3e38, -torch.inf], [1.0, -2.0, 0.1]]).bfloat16(),
    "model.layers.2.w": torch.linspace(-3, 2, 28).reshape(7, 4),
    "model.norm": torch.tensor([[1.0, 2.0, -3.0], [5.0, 6.0, 7.0]]),
    "optimizer.layers.2.w.exp_avg": torch.linspace(-1, 5, 22).reshape(2, 11),
    "rest.techniques.layers.2.w": torch.full((2,), torch.inf),
    "rest.rng.0.cpu": torch.arange(5, dtype=torch.uint8),
}
CUT = ("norm", "avg", "10.w")
SHOWN = """\
name                          dtype     shape            bytes  chunks  files
layers.2.w                    float32   [7, 4]             112  1       rank-00000
layers.10.w                   bfloat16  [2, 3]              12  2 x 1   rank-00000..00001
norm                          float32   [2, 3] stacked      24  2 x 1   rank-00000..00001
optimizer.layers.2.w.exp_avg  float32   [2, 11] stacked     88  2 x 1   rank-00000..00001
layers.2.w                    float32   [2]                  8  1       techniques/rank-00001
rng.0.cpu                     uint8     [5]                  5  1       rank-00001
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The newest of two checkpoints of a run: layers.10.w is cut into rows, norm and exp_avg are stacked."""
    state = json.loads((mutations.save(tmp_path / "checkpoints") / "state.json").read_text())
    path = tmp_path / "checkpoints" / "step-00000005"
    path.mkdir()
    ranks = [{n: Stacked(t[rank], rank, 2) if n.endswith(CUT) else t for n, t in TENSORS.items()} for rank in range(2)]
    made = plan.make([storage.table_of(tensors) for tensors in ranks])
    for rank, tensors in enumerate(ranks):
        local = {name: each.own[None] if isinstance(each, Stacked) else each for name, each in tensors.items()}
        storage.write(path, rank, [list(tensors)[number] for number in made.chosen[rank]], tensors, local)
    tensors = {name: replace(one, stacked=name.endswith(CUT[:2])) for name, one in made.index.tensors.items()}
    index.write(path / "titan.index", replace(made.index, tensors=tensors))
    state |= {"step": 5, "serial": 9, "world_size": 2, "rest": {"config": {"mesh": {"tp": 2, "pp": 1}}}}
    (path / "state.json").write_text(json.dumps(state))
    mutations.reseal(path)
    return path


def test_the_tensors_of_the_newest_are_shown_without_reading_data(path: Path, say: Say) -> None:
    for file in path.rglob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    code, out, err = say("show", path.parents[1])
    head, _, table = out.partition("\n\n")
    assert (code, err, table) == (0, "", SHOWN)
    assert head.splitlines()[0].split() == ["path", str(path)] and "2 ranks (tp 2), PyTorch" in head
    assert "\nweights     37 parameters, 3 tensors, " in head and "\nstacked     2 tensors: " in head
    told = json.loads(say("show", path, "--json", "--tensor", "layers.2.*")[1])
    kinds = {each["kind"]: each["files"] for each in told["tensors"]}
    assert kinds == {"weights": ["rank-00000.safetensors"], "techniques": ["techniques/rank-00001.safetensors"]}
    assert told["step"] == 5 and told["kinds"]["optimizer"] == {"tensors": 1, "bytes": 88} and told["stacked"] == 2
    code, out, err = say("show", path, "--norms")
    assert code == 2 and out == "" and "is not a valid safetensors file" in err


def test_norms_are_those_of_the_tensors(path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tensors, "READ_AT_ONCE", 3)
    stacked = [*TENSORS["model.norm"], *TENSORS["optimizer.layers.2.w.exp_avg"]]
    wanted = [TENSORS["model.layers.2.w"], TENSORS["model.layers.10.w"], *stacked]
    shown = json.loads(say("show", path, "--norms", "--json")[1])["tensors"]
    assert [each["name"] for each in shown][2:4] == ["norm[0]", "norm[1]"]
    for each, tensor in zip(shown[:6], wanted, strict=True):
        finite = tensor.double()[tensor.isfinite()]
        assert each["l2"] == pytest.approx(finite.norm().item(), rel=1e-14)
        assert each["rms"] == pytest.approx(finite.square().mean().sqrt().item(), rel=1e-14)
        assert each["max_abs"] == finite.abs().max() and each["non_finite"] == tensor.numel() - finite.numel()
        assert each["shape"] == list(tensor.shape)
    rest = [[each[key] for key in ("l2", "max_abs", "non_finite")] for each in shown[6:]]
    assert rest == [[None, None, 2], [None, None, None]]
    _, out, _ = say("show", path, "--norms", "--tensor", "*avg[[]1]")
    assert out.split()[-6:-1] == ["1", "12.218", "3.6839", "5", "0"]


def test_what_cannot_be_shown_is_refused(path: Path, say: Say, tmp_path: Path) -> None:
    for folder, file in (("hf", "config.json"), ("dcp", ".metadata")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    refused = {
        (path, "--tensor", "Layers.2.w"): "no name of the 6 tensors matches 'Layers.2.w' (did you mean 'layers.2.w'?)",
        (path, "--tensor", "zz"): "(a pattern is for whole names; '*zz*' is for a part)",
        (tmp_path / "hf",): "is a Hugging Face folder; `titan convert --from",
        (tmp_path / "dcp",): "PyTorch's default checkpoint format; convert it with `titan convert",
    }
    for words, told in refused.items():
        code, out, err = say("show", *words)
        assert code == 2 and out == "" and told in err, words
    os.truncate(path / "rank-00001.safetensors", 9)
    code, out, err = say("show", path)
    assert code == 2 and out == "" and "is damaged: rank-00001.safetensors has 9 bytes, its manifest says" in err
