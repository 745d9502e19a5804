"""Untrusted checkpoints: no code in them is executed, and a file that says something else is refused by name.

Each is tried under the manifest of the save, and under one that matches it, as an attacker would write.
"""

import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import mutations
from tests.malicious_checkpoints import DATA, EVIL, FILES, HEADERS
from tests.malicious_titan_files import INDEXES, STATE_TEXTS, STATES
from titan.checkpoint.disk import tensor_file
from titan.checkpoint.disk.manifest import data_file
from titan.errors import EXIT_WRONG_INPUT, CheckpointError

TECHNIQUE = f"techniques/{DATA}"
ENTRY = {"size": 1, "sha256": "0" * 64}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mutations.save(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(sound, tmp_path / sound.name))


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the planted command makes when it is run."""
    monkeypatch.setenv("PLANTED", str(tmp_path / "marker"))
    return tmp_path / "marker"


def refused(path: Path, said: str, seals: tuple[bool, ...] = (False, True)) -> None:
    """Refused in one sentence, which is `said` where the manifest matches. Nothing is loaded, no memory needed."""
    for seal in seals:
        if seal:
            mutations.reseal(path)
        parts, optimizer = mutations.build()
        optimizer.state.clear()
        before = {name: tensor.clone() for name, tensor in parts[0].module.state_dict().items()}
        with little_memory(), pytest.raises(CheckpointError) as told:
            mutations.checkpointer(path.parent).load(path, parts, optimizer)
        text, after = str(told.value), parts[0].module.state_dict()
        assert told.value.exit_code == EXIT_WRONG_INPUT, text
        assert str(path) in text and text.isprintable() and len(text) < 2000
        assert not optimizer.state and all(torch.equal(before[name], after[name]) for name in before)
    assert re.search(said, text), text


@contextmanager
def little_memory() -> Iterator[None]:
    """The address space may grow by 128 MiB."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("file", [DATA, TECHNIQUE, "titan.index"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_safetensors_file(path: Path, marker: Path, file: str, name: str) -> None:
    (path / file).write_bytes(FILES[name])
    refused(path, f"{file} (is not a valid safetensors file|is smaller than the chunks)")
    assert not marker.exists()


def test_no_header_is_read_that_would_need_much_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "LARGEST", 1500)
    refused(path, f"{DATA} .* its header would have .* bytes, and at most 1,500 can be read")


def _state(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        state = json.loads(content)
        change(state)
        return json.dumps(state).encode()

    return changed


def _text(text: str) -> Callable[[bytes], bytes]:
    return lambda _: text.encode(errors="surrogateescape")


CHANGES = {DATA: HEADERS, "titan.index": INDEXES}
CHANGES["state.json"] = {name: (_state(change), said) for name, (change, said) in STATES.items()}
CHANGES["state.json"] |= {name: (_text(text), said) for name, (text, said) in STATE_TEXTS.items()}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, changes in CHANGES.items() for name in changes])
def test_file_that_says_something_else(path: Path, file: str, name: str) -> None:
    change, said = CHANGES[file][name]
    (path / file).write_bytes(change((path / file).read_bytes()))
    refused(path, f"{DATA}.*{said}" if file == DATA else said)


def test_index_and_header_that_agree_on_10_to_the_12_entries(path: Path) -> None:
    for file, name in {"titan.index": "10^12 entries", DATA: "10^12 entries in 48 bytes"}.items():
        (path / file).write_bytes(CHANGES[file][name][0]((path / file).read_bytes()))
    refused(path, f"{DATA} is smaller than the chunks that it is to hold")


@pytest.mark.parametrize(
    ("source", "file", "said"),
    [
        (TECHNIQUE, DATA, f"{DATA} is smaller than the chunks that it is to hold"),
        (DATA, TECHNIQUE, f"the header of {TECHNIQUE} and titan.index differ in "),
        (DATA, data_file(1), f"it does not name {data_file(1)}, which its manifest lists"),
    ],
    ids=["a small one", "a large one", "one too many"],
)
def test_files_that_were_mixed_up(path: Path, source: str, file: str, said: str) -> None:
    shutil.copy(path / source, path / file)
    refused(path, said)


@pytest.mark.parametrize("file", ["titan.index", "state.json", "manifest.json", DATA, TECHNIQUE, "techniques"])
@pytest.mark.parametrize("kind", ["link", "link away", "pipe", "folder"])
def test_what_is_no_file(path: Path, tmp_path: Path, file: str, kind: str) -> None:
    away = (path / file).rename(tmp_path / "away" if kind == "link away" else path / "other")
    if kind == "pipe":
        os.mkfifo(path / file)
    elif kind == "folder":
        (path / file).mkdir()
    else:
        (path / file).symlink_to(away)
    said = "is a link, which no|is missing|Not a directory" if file == "techniques" else "is a link, a folder|lacks"
    refused(path, said, seals=(False,))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"files": {"../x": ENTRY}}, r"lists '\.\./x'"),
        ({"files": {f"{DATA}\n": ENTRY}}, "which is not the name of a checkpoint file"),
        ({"files": {"tokenizer/a\nb": ENTRY}}, "which is not the name of a checkpoint file"),
        ({"files": {"rank-0000\u0660.safetensors": ENTRY}}, "which is not the name of a checkpoint file"),
        ({"files": {"titan.index": ENTRY}}, r"lacks titan\.index or state\.json"),
        ({"files": {DATA: {**ENTRY, "size": -1}}}, "gives no valid size and sha256"),
        ({"files": {DATA: {**ENTRY, "size": True}}}, "gives no valid size and sha256"),
        ({"files": {DATA: {**ENTRY, "sha256": "x"}}}, "gives no valid size and sha256"),
        ({"files": {DATA: [1]}}, "gives no valid size and sha256"),
        ({"files": []}, "is not a table of files"),
        ({"files": {}, "run": "os.system"}, "is not a table of files"),
    ],
)
def test_manifests(path: Path, changed: Any, said: str) -> None:
    (path / "manifest.json").write_text(json.dumps(changed))
    refused(path, rf"manifest\.json.*{said}", seals=(False,))


def test_the_planted_pickle_does_run_where_pickle_reads_it(marker: Path) -> None:
    pickle.loads(EVIL)
    assert marker.exists()


def test_sixty_mutations_are_refused_or_harmless() -> None:
    bad = mutations.run(60, seed=7)["bad"]
    assert not bad, f"{len(bad)} of 60, among them {bad[0]}"
