"""Weights in and out of Hugging Face folders: nothing lost, nothing made up."""

import json
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import assert_same
from tests.huggingface import SMALL, Drawn, convert, loaded, model_of, plugin, tensors, write
from titan import cli
from titan.checkpoint.disk import tensor_file
from titan.contracts import Model
from titan.contracts.plugin import registry
from titan.errors import CheckpointError, ConfigError, PluginError
from titan.inference import conversion
from titan.weights import hf_folder, huggingface

GUESTS = ("--plugins.path", str(Path(__file__).parents[1] / "guests"))


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("llama", {"tied": True}, torch.bfloat16),
        ("gpt", {}, torch.bfloat16),
        ("olmo2", {"n_kv_heads": 2}, torch.bfloat16),
        ("bloom", {}, torch.bfloat16),
        ("gemma", {"tied": False, "attention_cap": 0.0, "logit_cap": 0.0}, torch.float32),
        ("neox", {"rotary_pct": 1.0, "tied": True, "rope_theta": 500.0, "gelu_approximate": "tanh"}, torch.float32),
    ],
)
def test_nothing_is_lost_on_the_way(name: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = plugin(name, **options)
    drawn = write(tmp_path / "hf", model, dtype, shard_bytes=4000)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    assert model_of(tmp_path / "hf").hf_config() == model.hf_config()
    convert(tmp_path / "hf", tmp_path / "kept", "titan")
    saved = conversion.open_weights(tmp_path / "kept" / "step-00000000", model)
    assert_same({key: saved.read(key) for key in drawn.tensors}, drawn.tensors)
    convert(tmp_path / "kept", tmp_path / "again", "hf")
    assert_same(tensors(tmp_path / "again"), tensors(tmp_path / "hf"))
    assert_loads(tmp_path / "again", drawn)


def refused(folder: Path, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        loaded(folder)


def assert_loads(folder: Path, drawn: Drawn, model: Model | None = None) -> None:
    parameters = {name: parameter.detach() for name, parameter in loaded(folder, model).named_parameters()}
    assert_same(parameters, {name: tensor.float() for name, tensor in drawn.tensors.items()})


def test_what_is_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(folder, to := tmp_path / "small", "hf", "--dtype", "bfloat16", "--shard-size", "1e-5", "--json")
    told, sizes = json.loads(capsys.readouterr().out), [file.stat().st_size for file in to.iterdir()]
    assert told.keys() == {"from", "to", "format", "tensors", "files", "bytes", "not_carried_over"}
    assert (told["tensors"], told["files"], told["bytes"]) == (21, len(sizes), sum(sizes))
    index = json.loads((to / hf_folder.INDEX).read_text())
    assert index["metadata"]["total_size"] == 2 * sum(t.numel() for t in tensors(folder).values())
    for name, file in index["weight_map"].items():
        with safe_open(to / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert opened.get_slice(name).get_dtype() == "BF16"
            assert len(opened.keys()) == 1 or (to / file).stat().st_size < 10_000 + 2_000
    config = json.loads((to / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["eos_token_id"] == 256


def test_tensors_are_read_once_and_one_by_one(stacked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "hf", stacked)
    names, made, alive, read = list[str](), list[weakref.ref[Any]](), list[int](), huggingface.HfWeights.read

    def tracked(weights: huggingface.HfWeights, name: str) -> Tensor:
        array = read(weights, name).numpy().copy()
        names.append(name)
        made.append(weakref.ref(array))  # which lives as long as any tensor that shares its memory
        alive.append(sum(one() is not None for one in made))
        return torch.from_numpy(array)

    monkeypatch.setattr(huggingface.HfWeights, "read", tracked)
    monkeypatch.setattr(tensor_file, "WAITING", 0)
    for form in ("titan", "hf"):
        convert(tmp_path / "hf", tmp_path / f"new-{form}", form, *GUESTS)
    assert max(alive) <= 2 and sorted(names) == sorted([*huggingface.shapes_of(stacked)] * 2)


def test_heads_may_be_interleaved(tmp_path: Path) -> None:
    """Those of a BLOOM are in the files: [H, 3, N, D] and [H, 3, N]."""
    model = plugin("bloom")
    drawn, held = write(tmp_path, model), tensors(tmp_path)
    weight, bias = (held[f"transformer.h.1.self_attention.query_key_value.{kind}"] for kind in ("weight", "bias"))
    weights = huggingface.HfWeights(tmp_path, model)
    for place, name in enumerate(("wq", "wk", "wv")):
        own, own_bias = (drawn.tensors[f"layers.1.attn.{name}.{kind}"] for kind in ("weight", "bias"))
        assert torch.equal(weight.reshape(4, 3, 4, 16)[:, place], own.view(4, 4, 16))
        assert torch.equal(bias.view(4, 3, 4)[:, place], own_bias.view(4, 4))
        for start, stop in ((0, 16), (4, 8), (5, 7), (3, 9), (15, 16)):
            rows = slice(start, stop)
            assert torch.equal(weights.read(f"layers.1.attn.{name}.weight", (rows, slice(2, 5))), own[rows, 2:5])
            assert torch.equal(weights.read(f"layers.1.attn.{name}.bias", (rows,)), own_bias[rows])


def test_the_hub_s_first_gpt2_is_read(tmp_path: Path) -> None:
    """Its names lack the model's, its buffers are there, its head is not."""
    model = plugin("gpt")
    drawn = write(tmp_path, model)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors(tmp_path).items()}
    for layer in range(2):
        bare[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64)
        bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, tmp_path / hf_folder.SINGLE)
    assert_loads(tmp_path, drawn, model)


def test_a_tied_head_may_stand_there_again(tmp_path: Path) -> None:
    drawn, held = write(tmp_path, plugin("llama", tied=True)), tensors(tmp_path)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, tmp_path / hf_folder.SINGLE)
    assert_loads(tmp_path, drawn)
    held["lm_head.weight"][100, 3] += 1
    save_file(held, tmp_path / hf_folder.SINGLE)
    refused(tmp_path, r"lm_head.weight and \S+ differ, but the model ties them")
    (tmp_path / hf_folder.SINGLE).unlink()
    save_file({key: held[key] for key in held if key != "lm_head.weight"}, tmp_path / "a.safetensors")
    head = loaded_from_index(tmp_path, dict.fromkeys(held, "a.safetensors")).output.weight  # which no shard holds
    assert torch.equal(head, held["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("lost", "changed", "told"),
    [
        (r"mlp|self_attn", {}, r"it lacks model.layers.0.mlp.down_proj.weight, (\S+, ){8}\S+ and 4 more"),
        (
            "nothing",
            {"model.layers.0.self_attn.q_proj.bias": torch.zeros(16), "model.norm.weight": torch.zeros(7)},
            r"the model lacks \S+q_proj.bias; shapes differ in model.norm.weight \(\[7\] there, \[16\] here\)",
        ),
        ("nothing", {"lm_head.weight": torch.zeros(257, 16, dtype=torch.int8)}, r"no plain .* in lm_head.weight \(I8"),
    ],
)
def test_what_does_not_fit_is_told(lost: str, changed: dict[str, Tensor], told: str, folder: Path) -> None:
    held = {name: tensor for name, tensor in tensors(folder).items() if not re.search(lost, name)}
    save_file(held | changed, folder / hf_folder.SINGLE)
    refused(folder, f"does not fit the model: {told}")


def test_another_model_is_told_key_by_key(folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(folder, plugin("llama", tied=True, rope_theta=500.0))
    says = f"{folder / 'config.json'} says"
    keys = [f"[model] tied = True: {says} False", f"[model] rope_theta = 500.0: {says} 10000.0"]
    assert str(refused.value).splitlines() == keys
    with pytest.raises(ConfigError, match=r"\[model\] name = 'gpt': .*config.json has model_type 'llama'"):
        loaded(folder, plugin("gpt"))
    loaded(folder, plugin("llama", n_kv_heads=4, init_std=0.5, max_seq_len=8))


def loaded_from_index(folder: Path, names: dict[str, str]) -> Any:
    (folder / hf_folder.INDEX).write_text(json.dumps({"weight_map": names}))
    return loaded(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "link.safetensors", "absent.safetensors"])
def test_an_index_leads_nowhere_else(name: str, folder: Path) -> None:
    names = dict.fromkeys(tensors(folder), name)
    shutil.move(folder / hf_folder.SINGLE, folder.parent / "other.safetensors")
    (folder / "link.safetensors").symlink_to(folder.parent / "other.safetensors")
    told = "lacks absent.safetensors" if name.startswith("absent") else "which is outside its folder"
    with pytest.raises(CheckpointError, match=told):
        loaded_from_index(folder, names)


def test_the_hub_s_cache_is_read(folder: Path) -> None:
    snapshot, blob = folder.parent / "models--a" / "snapshots" / "0123", folder.parent / "models--a" / "blobs" / "abc"
    blob.parent.mkdir(parents=True)
    shutil.move(folder, snapshot)
    names = dict.fromkeys(tensors(snapshot), "model-1.safetensors")
    shutil.move(snapshot / hf_folder.SINGLE, blob)
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/abc")
    loaded_from_index(snapshot, names)


def test_of_two_shards_the_index_says_which_counts(folder: Path) -> None:
    """Shards of another numbering, and an index beside the single file, count for nothing, as in transformers."""
    held, name, head = tensors(folder), "model.norm.weight", "lm_head.weight"
    stale = {**held, name: held[name] + 1}
    (folder / hf_folder.SINGLE).unlink()
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"")
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for right, first, second in ((shards[0], held, stale), (shards[1], stale, held)):
        save_file({key: tensor for key, tensor in first.items() if key != head}, folder / shards[0])
        save_file({key: second[key] for key in (name, head)}, folder / shards[1])
        names = {**dict.fromkeys(held, shards[0]), head: shards[1], name: right}
        assert torch.equal(loaded_from_index(folder, names).norm.weight, held[name])
    save_file(stale, folder / hf_folder.SINGLE)
    assert torch.equal(loaded_from_index(folder, names).norm.weight, stale[name])


@pytest.mark.parametrize("name", [hf_folder.SINGLE, hf_folder.INDEX, "config.json"])
def test_a_git_lfs_pointer_is_told(name: str, folder: Path) -> None:
    if name == hf_folder.INDEX:
        (folder / hf_folder.SINGLE).unlink()
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 135\n")
    refused(folder, rf"{name} is a Git LFS pointer.*git lfs pull")


def test_index_and_files_must_agree(folder: Path) -> None:
    (folder / hf_folder.SINGLE).rename(folder / "a.safetensors")
    names = dict.fromkeys(tensors(folder), "a.safetensors")
    wanted = loaded_from_index(folder, names).norm.weight
    unnamed = {name: file for name, file in names.items() if name != "model.norm.weight"}
    assert torch.equal(loaded_from_index(folder, unnamed).norm.weight, wanted)  # as transformers reads it
    save_file({"model.norm.weight": torch.zeros(16)}, folder / "b.safetensors")
    for name, file in (("x", "a.safetensors"), ("lm_head.weight", "b.safetensors")):
        with pytest.raises(CheckpointError, match=f"says that {name} is in {file}, which does not hold it"):
            loaded_from_index(folder, {**unnamed, name: file})
    (folder / hf_folder.INDEX).write_text("[]")
    refused(folder, "has no weight_map")


@pytest.mark.parametrize("cut", [0, 4, 100, 10_000, -1])
def test_a_damaged_file_is_told(cut: int, folder: Path) -> None:
    file = folder / hf_folder.SINGLE
    file.write_bytes(file.read_bytes()[:cut])
    refused(folder, "model.safetensors cannot be read: ")


def test_pickles_are_not_read(folder: Path) -> None:
    (folder / hf_folder.SINGLE).rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin is a pickle, which can contain code, and is not")


def test_a_run_cannot_start_from_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--checkpoint.init_from=/no/such"]) == 2
    assert "[checkpoint] init_from = '/no/such': no such folder" in capsys.readouterr().err


@pytest.fixture
def stacked() -> Any:
    """A model whose stacks [3, 16, 16] are three tensors each of a folder."""
    registry.load_plugins([Path(__file__).parents[1] / "guests"])
    model: Any = registry.find("model", "stacked")
    sizes = {key: value for key, value in SMALL.items() if key != "ffn_dim"}
    return model(model.Config(**sizes, n_kv_heads=2, stacked=3))


def test_elements_of_a_stack_are_tensors_of_their_own(stacked: Any, tmp_path: Path) -> None:
    drawn = write(tmp_path / "hf", stacked, torch.bfloat16, shard_bytes=1500)
    held = tensors(tmp_path / "hf")
    index = json.loads((tmp_path / "hf" / hf_folder.INDEX).read_text())["weight_map"]
    for layer in range(2):
        own = drawn.tensors[f"layers.{layer}.ffn.stack.weight"]
        names = [f"model.layers.{layer}.mlp.{element}" for element in range(3)]
        assert all(torch.equal(held[name], own[element].T) for element, name in enumerate(names))
        assert len({index[name] for name in names}) == 2  # one stack lies in several files
    convert(tmp_path / "hf", tmp_path / "kept", "titan", *GUESTS)
    convert(tmp_path / "kept", tmp_path / "again", "hf", *GUESTS)
    assert_same(tensors(tmp_path / "again"), held)
    assert_loads(tmp_path / "again", drawn, stacked)


def test_part_of_a_stack_reads_its_elements(stacked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a type of its own."""
    drawn, held = write(tmp_path, stacked, torch.bfloat16), tensors(tmp_path)
    held["model.layers.1.mlp.1"] = held["model.layers.1.mlp.1"].float() + 1e-4
    save_file(held, tmp_path / hf_folder.SINGLE)
    weights, name = huggingface.HfWeights(tmp_path, stacked), "layers.1.ffn.stack.weight"
    read, stored = [], hf_folder.Stored.read
    monkeypatch.setattr(hf_folder.Stored, "read", lambda one, *given: read.append(one.name) or stored(one, *given))
    part = weights.read(name, [slice(1, 3), slice(2, 7), slice(0, 16)])
    assert read == ["model.layers.1.mlp.1", "model.layers.1.mlp.2"]
    assert weights.dtype(name) is part.dtype is torch.float32
    assert torch.equal(part[0].T, held["model.layers.1.mlp.1"][:, 2:7])
    assert torch.equal(part[1], drawn.tensors[name][2, 2:7].float())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda last: [], r"must hold layers\.0\.ffn\.stack\.weight\[0\] exactly once"),
        (lambda last: [last, last], r"must hold layers\.0\.ffn\.stack\.weight\[0\] exactly once"),
        (lambda last: [last, replace(last, element=3)], r"must hold layers\.0\.ffn\.stack\.weight\[3\]"),
        (lambda last: [last, replace(last, element=None)], r"must hold .*stack\.weight exactly"),
        (lambda last: [last, replace(last, ours=last.ours * 2)], r"must hold .*stack\.weight\[0\]"),
        (lambda last: [replace(last, groups=2)], r"cuts .*stack\.weight \(3 rows\) into 2 groups, which are not equal"),
    ],
    ids=["missing", "twice", "beyond", "whole", "joined", "groups"],
)
def test_a_model_must_hold_each_element_once(change: Any, told: str, stacked: Any, monkeypatch: Any) -> None:
    *others, last = sorted(stacked.hf_tensors(), key=lambda one: one.element == 0 and "layers.0" in one.name)
    monkeypatch.setattr(type(stacked), "hf_tensors", lambda _: [*others, *change(last)])
    with pytest.raises(PluginError, match=told):
        huggingface.made_of(stacked, huggingface.shapes_of(stacked))
