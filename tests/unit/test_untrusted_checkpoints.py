"""Untrusted checkpoints: code planted in them is never executed, and the file that holds it is refused by name.

Each payload is tried under a manifest that matches it, as an attacker would write, and under the one of the save.
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import mutations
from tests.malicious_checkpoints import CODE, COMMAND, DATA, EVIL, METADATA, PAYLOADS, PICKLES, Calls
from tests.malicious_titan_files import INDEXES, STATE_TEXTS, STATES, moved
from titan import cli
from titan.checkpoint.disk import manifest, metadata, unpickle
from titan.checkpoint.disk.metadata import dump
from titan.errors import CheckpointError


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mutations.save(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that every planted command makes when it is run."""
    path = tmp_path / "marker"
    os.environ["PLANTED"] = str(path)
    yield path
    del os.environ["PLANTED"]


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(sound, tmp_path / sound.name))


def _read_metadata(path: Path) -> None:
    metadata.read(path, manifest.read(path))


def _refused(path: Path, marker: Path, said: str, read: Callable[[Path], None] = mutations.load) -> None:
    """A changed copy is refused under the manifest of the save, and by name under one that matches; nothing runs."""
    for seal in (False, True):
        if seal:
            mutations.reseal(path)
        with pytest.raises(CheckpointError) as refused:
            read(path)
        assert not marker.exists()
        assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    assert re.search(said, str(refused.value)), str(refused.value)


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_in_place_of_the_metadata(path: Path, marker: Path, name: str) -> None:
    planted, said = PICKLES[name]
    (path / ".metadata").write_bytes(planted)
    _refused(path, marker, said, _read_metadata)


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_says_something_else(path: Path, marker: Path, name: str) -> None:
    change, said = METADATA[name]
    content = pickle.loads((path / ".metadata").read_bytes())
    change(content)
    with (path / ".metadata").open("wb") as file:
        dump(content, file)
    _refused(path, marker, said, _read_metadata)


@pytest.mark.parametrize("name", INDEXES)
def test_index_that_says_something_else(path: Path, marker: Path, name: str) -> None:
    change, said = INDEXES[name]
    (path / "titan.index").write_bytes(change((path / "titan.index").read_bytes()))
    _refused(path, marker, said)


@pytest.mark.parametrize("name", ["a call of os.system", "more behind the end"])
def test_pickles_beside_an_index_are_not_run(
    path: Path, marker: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (path / ".metadata").write_bytes(PICKLES[name][0])
    mutations.reseal(path)
    mutations.load(path)
    assert cli.main(["checkpoint", "verify", str(path)]) == 1
    assert not marker.exists() and f"{path / '.metadata'} " in capsys.readouterr().out


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads_in_place_of_a_tensor(path: Path, marker: Path, name: str) -> None:
    payload, said = PAYLOADS[name]
    end = (path / DATA).stat().st_size
    with (path / DATA).open("ab") as file:
        file.write(payload)
    (path / "titan.index").write_bytes(moved(end, len(payload))((path / "titan.index").read_bytes()))
    _refused(path, marker, said)


@pytest.mark.parametrize("name", STATES)
def test_state_that_says_something_else(path: Path, marker: Path, name: str) -> None:
    change, said = STATES[name]
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))
    _refused(path, marker, said)


@pytest.mark.parametrize("name", STATE_TEXTS)
def test_state_that_is_no_state(path: Path, marker: Path, name: str) -> None:
    text, said = STATE_TEXTS[name]
    (path / "state.json").write_bytes(text.encode(errors="surrogateescape"))
    _refused(path, marker, said)


@pytest.mark.parametrize("file", ["titan.index", "state.json", DATA, "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "link away", "pipe", "folder"])
def test_what_is_no_file(path: Path, tmp_path: Path, file: str, kind: str) -> None:
    content = (path / file).read_bytes()
    (path / file).unlink()
    if kind == "pipe":
        os.mkfifo(path / file)
    elif kind == "folder":
        (path / file).mkdir()
    else:
        target = tmp_path / "away" if kind == "link away" else path / "other"
        target.write_bytes(content)
        (path / file).symlink_to(target)
    with pytest.raises(CheckpointError, match=r"is a link, a folder or a pipe|lacks"):
        mutations.load(path)


ENTRY = {"size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"files": {"../x": ENTRY}}, r"lists '\.\./x'"),
        ({"files": {"/etc/passwd": ENTRY}}, "lists '/etc/passwd'"),
        ({"files": {"a/__0_0.distcp": ENTRY}}, "lists 'a/__0_0.distcp'"),
        ({"files": {"__0_0.distcp\n": ENTRY}}, "which is not the name of a checkpoint file"),
        ({"files": {"__\u0660_0.distcp": ENTRY}}, "which is not the name of a checkpoint file"),
        ({"files": {".metadata": ENTRY}}, r"lacks \.metadata, titan\.index or state\.json"),
        ({"files": {".metadata": {**ENTRY, "size": -1}}}, "gives an invalid size or sha256"),
        ({"files": {".metadata": {**ENTRY, "size": True}}}, "gives an invalid size or sha256"),
        ({"files": {".metadata": {**ENTRY, "size": 1e999}}}, "gives an invalid size or sha256"),
        ({"files": {".metadata": {**ENTRY, "sha256": "x"}}}, "gives an invalid size or sha256"),
        ({"files": {".metadata": {"size": 1}}}, "must give exactly size and sha256"),
        ({"files": {".metadata": [1]}}, "must give exactly size and sha256"),
        ({"files": []}, "is not a table of files"),
        ({"files": {}, "run": "os.system"}, "is not a table of files"),
        ('{"files": {".metadata": 1, ".metadata": 2}}', "appears twice"),
        ("[" * 200_000, "nested too deep"),
    ],
)
def test_manifests(path: Path, changed: Any, said: str) -> None:
    (path / "manifest.json").write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(CheckpointError, match=said) as refused:
        mutations.load(path)
    assert str(path / "manifest.json") in str(refused.value)


def test_what_looks_like_a_class_in_json_stays_plain(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    hints = {"__class__": "os.system", "__reduce__": ["eval", [CODE]], "py/object": "subprocess.Popen", "!!python": 1}
    state["rest"]["techniques"]["hints"] = hints
    (path / "state.json").write_text(json.dumps(state))
    mutations.reseal(path)
    parts, optimizer = mutations.build()
    rest = mutations.checkpointer(path.parent).load(path, parts, optimizer)
    assert rest["techniques"]["hints"] == hints


def test_the_planted_pickles_do_run_where_pickle_reads_them(marker: Path) -> None:
    for planted in (pickle.dumps(EVIL), pickle.dumps(Calls(eval, (CODE,))), pickle.dumps(EVIL, 0)):
        pickle.loads(planted)
        assert marker.exists()
        marker.unlink()


def test_a_tree_and_nothing_else() -> None:
    """What the reader makes of a call that it knows the name of."""
    tree = unpickle.read(pickle.dumps(EVIL), {f"{os.system.__module__}.system"}, "here")
    assert tree == tree and isinstance(tree, unpickle.Record)
    assert (tree.maker, tree.args, tree.state) == (f"{os.system.__module__}.system", (COMMAND,), None)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [None, True, 0, 255, 65535, -1, 2**31, -(2**62), "é" * 300, (), (1,), (1, 2), (1, 2, 3, 4), [1, [2]], [()] * 3],
)
def test_plain_values_are_read_as_pickle_reads_them(protocol: int, value: Any) -> None:
    assert unpickle.read(pickle.dumps(value, protocol), (), "here") == value


def test_sixty_mutations_are_refused_or_harmless() -> None:
    assert mutations.run(60, seed=7)["bad"] == []
