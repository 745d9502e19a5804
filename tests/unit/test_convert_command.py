"""The command `titan convert`: where it writes, whose tokenizer and model plugin it takes, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import names_in, raising
from tests.huggingface import convert, converting, loaded, plugin, write
from titan import cli
from titan.errors import CheckpointError, ConfigError
from titan.inference.load_model import open_job
from titan.weights import hf_folder


def test_a_full_folder_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(converting(folder, folder.parent)) == 2
    assert f"{folder.parent} is not empty; name a new folder" in capsys.readouterr().err
    assert names_in(folder.parent) == ["llama"]
    (folder.parent / "new.tmp").mkdir()
    assert cli.main(converting(folder, folder.parent / "new")) == 2
    assert f"{folder.parent / 'new.tmp'} exists already; if an earlier conversion left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (".", "--output .: {here} is the working directory; name a new folder, such as ./new"),
        ("../empty", "--output ../empty: {here} is the working directory; name a new folder"),
        ("..", "--output ..: {above} is not empty; name a new folder"),
        ("/", "--output /: / is not empty; name a new folder"),
        ("../file", "--output ../file: {above}/file is not a folder; name a new folder"),
        ("../file/below", "{above}/file/below.tmp cannot be created: Not a directory"),
        ("../circle", "--output ../circle: {above}/circle is not a folder"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_in_a_line(
    folder: Path, to: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    above = folder.parent
    (above / "empty").mkdir()
    (above / "file").write_text("mine")
    (above / "circle").symlink_to("circle")
    monkeypatch.chdir(above / "empty")
    assert cli.main(converting(folder, to)) == 2
    assert said.format(here=above / "empty", above=above) in capsys.readouterr().err
    assert not list((above / "empty").iterdir()) and (above / "file").read_text() == "mine"
    assert names_in(above) == ["circle", "empty", "file", "llama"]


def test_a_link_to_an_empty_folder_is_that_folder(folder: Path) -> None:
    above = folder.parent
    (above / "disk" / "empty").mkdir(parents=True)
    (above / "link").symlink_to("disk/empty")
    convert(folder, above / "link", "hf")
    assert (above / "link").is_symlink() and (above / "disk" / "empty" / "config.json").exists()


def test_a_failure_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hf_folder.Stored, "read", raising(CheckpointError("gone")))
    for form in ("hf", "titan", "dcp"):
        assert cli.main(converting(folder, tmp_path / "new", form)) == 2
    assert names_in(tmp_path) == ["llama"]


def test_grouped_heads_are_not_gpt2(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[model\] gpt: transformers has no equivalent model"):
        write(tmp_path / "new", plugin("gpt", n_kv_heads=2))
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_is_not_guessed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    words = converting(folder, folder.parent / "new", tokenizer="")
    assert cli.main(words) == 0
    assert json.loads((folder.parent / "new" / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    assert cli.main(words) == 2
    assert f"{folder} holds no tokenizer that a plugin can read; name one with --tok" in capsys.readouterr().err
    assert cli.main([*words, "--tokenizer.name", "bpe"]) == 2
    told = "[tokenizer] name = 'bpe': the tokenizer has 4097 ids, but the model's vocab_size is 257"
    assert told in capsys.readouterr().err


MINE = '''"""A llama by another name."""

from titan.contracts import register
from titan.plugins.models.llama import Llama


@register
class Mine(Llama):
    """It knows the model_type mine."""

    name = "mine"

    def hf_config(self):
        return {**super().hf_config(), "model_type": "mine"}

    @classmethod
    def from_hf(cls, config):
        return super().from_hf({**config, "model_type": "llama"}) if config.get("model_type") == "mine" else None
'''


def test_a_plugin_from_outside_reads_its_folders(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "model_type": "mine"}))
    assert cli.main(converting(folder, tmp_path / "kept", "titan")) == 2
    assert "no model plugin supports model_type 'mine'" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text(MINE)
    path = ["--plugins.path", str(tmp_path / "mine.py")]
    convert(folder, tmp_path / "kept", "titan", *path)
    held = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for source in (folder, tmp_path / "kept"):
        where, job = open_job(source, [*path, "--tokenizer.name", "byte"], 1)
        assert job.model.name == "mine"
        assert torch.equal(loaded(where, job.model).embed.weight, held)


def test_where_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(converting(tmp_path / "no", tmp_path / "new", tokenizer="")) == 2
    assert f"--from = '{tmp_path / 'no'}': no such folder" in capsys.readouterr().err
