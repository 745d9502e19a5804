"""Untrusted checkpoints: no code in them is executed, and a file that says something else is refused by name.

Each is tried under the manifest of the save, and under one that matches it, as an attacker would write.
"""

import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from bench import mutations
from tests.checkpoints import Box, table_of
from tests.jobs import stored
from tests.malicious_checkpoints import DATA, EVIL, FILES, HEADERS
from tests.malicious_titan_files import INDEXES, STATE_TEXTS, STATES
from titan import cli
from titan.checkpoint.disk import index, plan, tensor_file
from titan.checkpoint.disk.manifest import data_file
from titan.checkpoint.disk.tensor_file import WORDS, Chunk
from titan.errors import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT, CheckpointError

TECHNIQUE, SECOND = f"techniques/{DATA}", data_file(1)
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


@pytest.mark.parametrize("name", HEADERS)
def test_header_that_says_something_else(path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, said = HEADERS[name]
    (path / DATA).write_bytes(change((path / DATA).read_bytes()))
    refused(path, f"{DATA}.*{said}")
    mutations.reseal(path)
    assert cli.main(["checkpoint", "verify", str(path)]) == EXIT_FAILED and DATA in capsys.readouterr().out


def test_no_header_is_read_that_would_need_much_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "LARGEST", 1500)
    refused(path, f"{DATA} .* its header would have 1,856 bytes, and at most 1,500 can be read")


@pytest.mark.parametrize("name", INDEXES)
def test_index_that_says_something_else(path: Path, name: str) -> None:
    change, said = INDEXES[name]
    (path / "titan.index").write_bytes(change((path / "titan.index").read_bytes()))
    refused(path, said)


@pytest.mark.parametrize("name", STATES)
def test_state_that_says_something_else(path: Path, name: str) -> None:
    change, said = STATES[name]
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))
    refused(path, said)


@pytest.mark.parametrize("name", STATE_TEXTS)
def test_state_that_is_no_state(path: Path, name: str) -> None:
    text, said = STATE_TEXTS[name]
    (path / "state.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(path, said)


def test_index_and_header_that_agree_on_10_to_the_12_entries(path: Path) -> None:
    for file in ("titan.index", DATA):
        change = INDEXES["10^12 entries"][0] if file != DATA else HEADERS["10^12 entries in 48 bytes"][0]
        (path / file).write_bytes(change((path / file).read_bytes()))
    refused(path, f"{DATA} is smaller than the chunks that it is to hold")


def _in_two(path: Path, row: int) -> Path:
    """Have a second rank hold each matrix from a row on."""
    values, whole = load((path / DATA).read_bytes()), stored(path).tensors.items()

    def held(rank: int) -> Iterator[tuple[str, str, list[int], Box]]:
        for name, one in whole:
            kind, shape = WORDS[one.dtype], (*one.shape,)
            if len(shape) == 2:
                yield name, kind, [*shape], ((row * rank, 0), (shape[0] - row if rank else row, shape[1]))
            elif not rank:
                yield name, kind, [*shape], ((0,) * len(shape), shape)

    parts = plan.make([table_of(*held(rank)) for rank in range(2)]).index
    index.write(path / "titan.index", parts)
    for file in (DATA, SECOND):
        entries = sorted(parts.header(file).items(), key=lambda item: item[1].begin)
        chunks = {name: entry.chunk for name, entry in entries}

        def value(name: str, chunks: Mapping[str, Chunk] = chunks) -> torch.Tensor:
            dims = zip(chunks[name].offsets or (), chunks[name].shape, strict=True)
            return values[name][tuple(slice(start, start + size) for start, size in dims)]

        tensor_file.write(path / file, chunks, value)
    mutations.reseal(path)
    return path


def test_files_of_two_ranks(path: Path) -> None:
    parts, optimizer = mutations.build()
    mutations.checkpointer(path.parent).load(path, parts, optimizer)
    whole = {name: tensor.clone() for name, tensor in parts[0].module.state_dict().items()}
    for tensor in parts[0].module.state_dict().values():
        tensor.zero_()
    mutations.checkpointer(path.parent).load(_in_two(path, 2), parts, optimizer)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in parts[0].module.state_dict().items())


def _swap(path: Path, other: Path) -> None:
    first, second = ((path / file).read_bytes() for file in (DATA, SECOND))
    (path / DATA).write_bytes(second)
    (path / SECOND).write_bytes(first)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_swap, f"{DATA} is smaller than the chunks that it is to hold"),
        (
            lambda path, other: shutil.copy(other / SECOND, path / SECOND),
            f"the header of {SECOND} and titan.index differ in embed.weight",
        ),
        (lambda path, other: (path / SECOND).unlink(), f"it names {SECOND}, which its manifest does not list"),
        (
            lambda path, other: shutil.copy(other / SECOND, path / data_file(2)),
            f"it does not name {data_file(2)}, which its manifest lists",
        ),
    ],
    ids=["swapped", "mixed", "absent", "one too many"],
)
def test_files_of_other_ranks(path: Path, change: Callable[[Path, Path], object], said: str) -> None:
    other = _in_two(Path(shutil.copytree(path, path.parent / "step-00000003")), 1)
    change(_in_two(path, 2), other)
    refused(path, said)


def test_the_format_of_before(path: Path, marker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {name: {"size": len(EVIL), "sha256": "0" * 64} for name in (".metadata", "__0_0.distcp", "titan.index")}
    for name in old:
        (path / name).write_bytes(EVIL)
    state = json.loads((path / "state.json").read_text()) | {"format": 1}
    (path / "state.json").write_text(json.dumps(state))
    (path / "manifest.json").write_text(json.dumps({"files": old | {"state.json": ENTRY}}))
    refused(path, said := "has format 1, but this version of titan reads format", seals=(False,))
    for action, code in (("verify", EXIT_FAILED), ("list", EXIT_DONE)):
        assert cli.main(["checkpoint", action, str(path)]) == code and said in str(capsys.readouterr())
    assert not marker.exists()


FOLDERS = {"techniques": "techniques is a link, which no checkpoint has|is missing|cannot be read: Not a directory"}


@pytest.mark.parametrize("file", ["titan.index", "state.json", "manifest.json", DATA, TECHNIQUE, *FOLDERS])
@pytest.mark.parametrize("kind", ["link", "link away", "pipe", "folder"])
def test_what_is_no_file(path: Path, tmp_path: Path, file: str, kind: str) -> None:
    away = (path / file).rename(tmp_path / "away" if kind == "link away" else path / "other")
    if kind == "pipe":
        os.mkfifo(path / file)
    elif kind == "folder":
        (path / file).mkdir()
    else:
        (path / file).symlink_to(away)
    refused(path, FOLDERS.get(file, f"{file} is a link, a folder or a pipe|lacks {file}"), seals=(False,))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"files": {"../x": ENTRY}}, r"lists '\.\./x'"),
        ({"files": {"/etc/passwd": ENTRY}}, "lists '/etc/passwd'"),
        ({"files": {f"a/{DATA}": ENTRY}}, f"lists 'a/{DATA}'"),
        ({"files": {f"{DATA}\n": ENTRY}}, "which is not the name of a checkpoint file"),
        ({"files": {"tokenizer/a\nb": ENTRY}}, "which is not the name of a checkpoint file"),
        ({"files": {"rank-0000\u0660.safetensors": ENTRY}}, "which is not the name of a checkpoint file"),
        ({"files": {"titan.index": ENTRY}}, r"lacks titan\.index or state\.json"),
        ({"files": {DATA: {**ENTRY, "size": -1}}}, "gives no valid size and sha256"),
        ({"files": {DATA: {**ENTRY, "size": True}}}, "gives no valid size and sha256"),
        ({"files": {DATA: {**ENTRY, "size": 1e999}}}, "gives no valid size and sha256"),
        ({"files": {DATA: {**ENTRY, "sha256": "x"}}}, "gives no valid size and sha256"),
        ({"files": {DATA: {"size": 1}}}, "gives no valid size and sha256"),
        ({"files": {DATA: [1]}}, "gives no valid size and sha256"),
        ({"files": []}, "is not a table of files"),
        ({"files": {}, "run": "os.system"}, "is not a table of files"),
        ('{"files": {"x": 1, "x": 2}}', "appears twice"),
        ("[" * 200_000, "nested too deep"),
    ],
)
def test_manifests(path: Path, changed: Any, said: str) -> None:
    (path / "manifest.json").write_text(changed if isinstance(changed, str) else json.dumps(changed))
    refused(path, rf"manifest\.json.*{said}", seals=(False,))


def test_the_planted_pickle_does_run_where_pickle_reads_it(marker: Path) -> None:
    pickle.loads(EVIL)
    assert marker.exists()


def test_sixty_mutations_are_refused_or_harmless() -> None:
    assert mutations.run(60, seed=7)["bad"] == []
