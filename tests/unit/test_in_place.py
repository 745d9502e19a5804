"""What `titan plan --search --in-place` keeps of a user's file: symlink, mode, line endings, comments, other edits."""

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from titan.cli import main
from titan.config import load_job
from titan.errors import ConfigError
from titan.planner.report import export_toml
from titan.planner.report.export_toml import candidate, set_values, text_to_replace, write_layout
from titan.planner.search import best_first

BASE = Path(__file__).parents[1] / "configs" / "planned.toml"
JOB = f"""# A job.
base = "{BASE}" # sizes

# Recomputation.
[plugins.activation_checkpoint]
mode = "full"

[train]
steps = 7

[mesh] # of ranks
tp = 2 # splits layers
"""
LAYOUT = {"mesh.tp": 1, "plugins.tensor.sequence_parallel": False}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_bytes(JOB.encode())
    return path


def write(path: Path) -> list[str]:
    return write_layout(path, text_to_replace(path), [], LAYOUT)


def folder_of(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def linked_to(job: Path) -> Path:
    link = job.with_name("links") / "mine.toml"
    link.parent.mkdir()
    link.symlink_to("../job.toml")
    return link


def test_a_symlink_stays_and_its_file_is_written(job: Path) -> None:
    link = linked_to(job)
    assert write(link)
    assert link.is_symlink() and "tp = 1 # splits layers" in job.read_text()
    assert folder_of(link) == ["mine.toml"] and folder_of(job) == ["job.toml", "links"]


def test_base_files_are_beside_the_symlink(job: Path) -> None:
    link = linked_to(job)
    link.with_name("sizes.toml").write_text(f'base = "{BASE}"\n')
    job.write_text(JOB.replace(str(BASE), "sizes.toml"))
    assert write(link) and "tp = 1" in job.read_text()


def test_a_mark_of_the_byte_order_stays(job: Path) -> None:
    job.write_bytes(b"\xef\xbb\xbf" + JOB.encode())
    assert write(job) and job.read_bytes().startswith(b"\xef\xbb\xbf# A job.") and b"tp = 1 #" in job.read_bytes()
    job.write_text(JOB, encoding="utf-16")
    with pytest.raises(ConfigError, match=r"job\.toml: is not UTF-8, as a TOML is: .*; save it as UTF-8"):
        load_job(job)


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_the_mode_stays(job: Path, mode: int) -> None:
    job.chmod(mode)
    assert write(job) and stat.S_IMODE(job.stat().st_mode) == mode


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_the_owner_stays(job: Path) -> None:
    os.chown(job, 12345, 54321)
    assert write(job) and (job.stat().st_uid, job.stat().st_gid) == (12345, 54321)


def plan(path: Path, ranks: int = 1, *words: str) -> int:
    return main(["plan", "--config", str(path), "--search", "--in-place", "--world-size", str(ranks), *words])


def test_a_layout_is_written_in_place(job: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(job, 4, "--train.global_batch_size", "16", "--cluster", "a100-80gb") == 0
    said = capsys.readouterr().out
    text = job.read_text()
    for kept in ("# A job.", "# sizes", "[mesh] # of ranks", "# splits layers", "# Recomputation.", "steps = 7"):
        assert kept in text
    assert "global_batch_size = 16" in text and f"wrote into {job}: " in said
    found = re.search(r"^1 +(\S+ m?s)", said, re.M)
    assert main(["plan", "--config", str(job), "--cluster", "a100-80gb"]) == 0
    assert found and f"step time {found[1]}," in capsys.readouterr().out
    assert plan(job, 4, "--cluster", "a100-80gb") == 0
    assert "nothing, because it has this layout" in capsys.readouterr().out and job.read_text() == text
    assert folder_of(job) == ["job.toml"]


def test_what_cannot_be_edited_stays(job: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(job, 4, "--model.preset", "mini") == 2
    assert "cannot take the layout" in capsys.readouterr().err and job.read_text() == JOB
    assert folder_of(job) == ["job.toml"]


def test_a_file_that_is_not_writable_is_refused_before_the_search(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delattr(best_first, "search")
    job.chmod(0o444)
    assert plan(job) == 2
    assert f"{job}: is not writable (mode 0444); make it writable with chmod u+w {job}" in capsys.readouterr().err
    assert job.read_text() == JOB


@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_that_is_not_writable_is_refused(job: Path, linked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = linked_to(job) if linked else job
    shut, access = path.parent, os.access
    monkeypatch.setattr(os, "access", lambda at, how: Path(at) != shut and access(at, how))  # root has all access
    with pytest.raises(ConfigError, match=f"its folder {shut} is not writable"):
        text_to_replace(path)


def test_a_file_edited_during_the_search_stays(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    search, edited = best_first.search, JOB + "dp_shard = 1 # new\n"

    def edits(*args: object, **kwargs: object) -> object:
        job.write_text(edited)
        return search(*args, **{**kwargs, "workers": 1})

    monkeypatch.setattr(best_first, "search", edits)
    assert plan(job, 1, *(f"--mesh.{axis}=1" for axis in ("tp", "pp", "dp_replicate", "dp_shard"))) == 2
    assert f"{job}: changed during the search, so nothing was written; search again" in capsys.readouterr().err
    assert job.read_text() == edited and folder_of(job) == ["job.toml"]


def test_a_file_edited_during_the_writing_stays(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, edited, editing = text_to_replace(job), JOB + "# new\n", export_toml.set_values

    def edits(*args: Any) -> str:
        job.write_text(edited)
        return editing(*args)

    monkeypatch.setattr(export_toml, "set_values", edits)
    with pytest.raises(ConfigError, match="changed during the search"):
        write_layout(job, text, [], LAYOUT)
    assert job.read_text() == edited and folder_of(job) == ["job.toml"]


def test_a_removed_file_is_not_written_again(job: Path) -> None:
    text = text_to_replace(job)
    job.unlink()
    with pytest.raises(ConfigError, match="changed during the search"):
        write_layout(job, text, [], LAYOUT)
    assert folder_of(job) == []


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_endings_stay(job: Path, end: str) -> None:
    job.write_bytes(JOB.replace("\n", end).encode())
    assert write(job)
    text = job.read_bytes().decode()
    assert f"tp = 1 # splits layers{end}" in text and f"sequence_parallel = false{end}" in text
    assert text.count("\n") == text.count(end) > JOB.count("\n")


def test_a_file_with_the_layout_is_not_touched(job: Path) -> None:
    job.write_bytes(JOB.replace("tp = 2", "tp = 1").rstrip("\n").encode())
    before = job.stat()
    assert write_layout(job, text_to_replace(job), [], {"mesh.tp": 1}) == []
    assert (job.stat().st_ino, job.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_other_files_of_the_folder_stay(job: Path) -> None:
    for name in (".job.toml.new", ".titan-job.toml"):
        job.with_name(name).write_text("mine")
    assert write(job)
    assert folder_of(job) == [".job.toml.new", ".titan-job.toml", "job.toml"]
    assert job.with_name(".job.toml.new").read_text() == "mine"


def test_two_commands_do_not_share_a_file(job: Path) -> None:
    with candidate(job, "a") as one, candidate(job, "b") as other:
        assert (one.read_text(), other.read_text()) == ("a", "b")
    assert folder_of(job) == ["job.toml"]


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("[t]\nx = 'a # b'  # d", '[t]\nx = "c"  # d\n'),
        ("[t]\nx = 1 # one\u2028two\u0085x = 3\n", '[t]\nx = "c" # one\u2028two\u0085x = 3\n'),
        ('[t]\nx = """a # b\nc""" # d\ny = 1\n', '[t]\nx = "c" # d\ny = 1\n'),
        ("t = { x = 1, y = 2 } # d\n", 't = { x = "c", y = 2 } # d\n'),
        ("[t]\ny = 1 # d\n\n# of u\n[u]\n", '[t]\ny = 1 # d\nx = "c"\n\n# of u\n[u]\n'),
        ("[t]\ny = 1\r\n[u]\r\n", '[t]\ny = 1\r\nx = "c"\n[u]\r\n'),
        ("t.x = 1\n# d\n", 't.x = "c"\n# d\n'),
        ("", '[t]\nx = "c"\n'),
        ("[t]\r\ny = 1", '[t]\r\ny = 1\r\nx = "c"\r\n'),
    ],
)
def test_comments_and_form_stay(text: str, then: str) -> None:
    assert set_values(text, {"t.x": "c"}).rstrip() == then.rstrip()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--search", "--in-place: needs --config FILE; give the path"),
        ("--search --config {job} --output {job}", "--in-place and --output name the same file"),
        ("--search --config {job}.absent", "absent is not a file; give the path of the TOML to write"),
        ("--config {job}", "--in-place: no layout is searched; add --search"),
    ],
)
def test_what_is_refused_before_the_search(
    words: str, said: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--in-place", *words.format(job=job).split()]) == 2
    assert said in capsys.readouterr().err and job.read_text() == JOB
