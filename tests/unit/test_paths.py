"""Paths of a user and a machine that lack something: what is refused names the key or the variable to set."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.checkpoints import names_in, raising
from titan import cli, paths
from titan.config import load_job
from titan.errors import ConfigError
from titan.paths import check_output, check_python, check_writable, expanded, shorten_sockets, temporary_folder, told

TIKTOKEN = ["--tokenizer.name=tiktoken", "--tokenizer.path=~/x"]


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user: a number without an entry among the users, and no HOME."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", raising(KeyError()))


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["config", "--run.dir", "~/runs"], "run.dir = '~/runs/quickstart'"),
        (["config", "--checkpoint.resume", "~/x"], "checkpoint.resume = '~/x'"),
        (["config", "--checkpoint.init_from", "~/x"], "checkpoint.init_from = '~/x'"),
        (["data", "prepare", "--data.cache=c", *TIKTOKEN], "tokenizer.path = '~/x'"),
        (["config", "--plugins.path", "~/x"], "[plugins] path = '~/x'"),
        (["plan", "--cluster", "~/x"], "--cluster = '~/x'"),
        (["eval", "--checkpoint", "~/x", "--data", "stdlib"], "--checkpoint = '~/x'"),
        (["data", "prepare", "--data.name", "text", "--data.path", "~/x"], "data.path = '~/x'"),
        (["data", "prepare"], "data.cache = '~/.cache/titan'"),
    ],
)
def test_a_user_without_a_home_is_told_what_to_set(
    words: list[str], key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    what = f"HOME is not set, and no entry of the users gives user {os.getuid()} a home folder; set HOME, or "
    [line] = capsys.readouterr().err.splitlines()
    assert line.removeprefix("error: ").removeprefix("command line: ").startswith(f"{key}: {what}")


def test_a_name_that_begins_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/x", "data.path") == Path("/home/me/x") and expanded("a~/x", "data.path") == Path("a~/x")
    with pytest.raises(ConfigError, match=r"data\.path = '~draft/x': there is no user 'draft'; begin .* with \./"):
        expanded("~draft/x", "data.path")
    Path("~draft").mkdir()
    assert expanded("~draft/x", "data.path") == Path("~draft/x")


def test_a_temporary_folder_too_long_for_sockets(tmp_path: Path) -> None:
    """Processes of a server, as those that load data; in a process of its own, as the folder is remembered."""
    long = tmp_path / ("x" * 116)
    long.mkdir()
    text = (
        "import tempfile\nfrom titan.data.tokens.processes import context\n"
        "if __name__ == '__main__':\n"
        "    process = context().Process(target=print)\n    process.start()\n    process.join()\n"
        f"    assert process.exitcode == 0 and tempfile.gettempdir() == {str(long)!r}\n"
    )
    (tmp_path / "main.py").write_text(text)
    environment = {**os.environ, "TMPDIR": str(long)}
    subprocess.run([sys.executable, tmp_path / "main.py"], env=environment, check=True, timeout=120)


def test_no_folder_is_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 90)
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", raising(PermissionError()))
    with pytest.raises(ConfigError, match=r"TMPDIR = /x+: .* set TMPDIR to a shorter folder"):
        shorten_sockets()
    assert tempfile.tempdir == "/" + "x" * 90


def test_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    monkeypatch.setattr(tempfile, "gettempdir", raising(nowhere))
    with pytest.raises(ConfigError, match=r"No usable temporary directory found.*; set TMPDIR to a folder"):
        temporary_folder()


def test_what_can_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder", "CACHE_DIR")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"CACHE_DIR cannot be written: .*/file/x: Not a directory; set CACHE_DIR"):
        check_writable(tmp_path / "file" / "x", "CACHE_DIR")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("new.toml", ""),
        (".", "is a folder; name a file"),
        ("no/new/new.toml", ""),
        ("file/new/new.toml", "/file is no folder"),
        ("dangling", "dangling is a link to no/new.toml, which is not there"),
    ],
)
def test_an_output_is_refused_before_the_work(name: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("no/new.toml")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=what) if what else nullcontext():
        check_output(tmp_path / name, "--output")


def test_python_of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_python()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=rf"may not execute {tmp_path}/python, .*; install Python where this user"):
        check_python()


def test_names_that_a_locale_cannot_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths.os, "fsencode", lambda name: os.fspath(name).encode("ascii", "surrogateescape"))
    monkeypatch.setattr(paths.sys, "getfilesystemencoding", lambda: "ascii")
    (tmp_path / "job.toml").write_text('base = "quickstart.toml"\n[run]\nname = "läuft"\n')
    with pytest.raises(ConfigError, match=r"run\.dir = 'runs/l\\xe4uft': file names are ascii here; set PYTHONUTF8=1"):
        load_job(tmp_path / "job.toml")


@pytest.mark.parametrize("name", [".", "..", "a/../..", "/tmp/run", "a\0b", ""])
def test_a_run_has_a_folder_of_its_own(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f'base = "quickstart.toml"\n[run]\nname = {json.dumps(name)}\n')
    if not name:
        assert load_job(tmp_path / "job.toml").run.name == "job"
        return
    with pytest.raises(ConfigError, match=r"must be a folder below run\.dir|no file name has a zero byte"):
        load_job(tmp_path / "job.toml")


def test_a_folder_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "\udce4").mkdir()
    monkeypatch.chdir(tmp_path / "\udce4")
    with pytest.raises(ConfigError, match=r"\[run\] dir: '.*\\udce4/runs' is not utf-8; rename what is called so"):
        load_job(None)


def test_a_config_in_the_folder_of_its_run_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    text = f'# mine\nbase = "debug.toml"\n[run]\ndir = "{tmp_path}"\nname = "mine"\n'
    (tmp_path / "mine" / "config.toml").write_text(text)
    assert cli.main(["train", "--config", str(tmp_path / "mine" / "config.toml")]) == 2
    assert "mine holds a config.toml and is not the folder of a run; set another --run" in capsys.readouterr().err
    assert (tmp_path / "mine" / "config.toml").read_text() == text
    assert names_in(tmp_path / "mine") == ["config.toml"]


@pytest.mark.parametrize(("encoding", "then"), [("ascii", "set PYTHONUTF8=1"), ("utf-8", "rename what is called so")])
def test_bytes_of_no_character(encoding: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths.sys, "getfilesystemencoding", lambda: encoding)
    with pytest.raises(ConfigError, match=rf"^command line: 'l\\udce4' is not {encoding}; {then}"):
        load_job(None, ["--run.name", "l\udce4"])


def test_text_that_the_terminal_cannot_show() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "titan.cli", "config", "--run.sample_prompt", "ä数\U0001f600"]
    done = subprocess.run(words, env=environment, capture_output=True, check=True, timeout=120)
    assert tomllib.loads(done.stdout.decode("ascii"))["run"]["sample_prompt"] == "ä数\U0001f600"


def test_a_link_that_leads_nowhere_is_said_to_be_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("gone")
    said = f"{link} is a link to gone, which is not there"
    assert told(FileExistsError(errno.EEXIST, "File exists", str(link))) == said
    assert told(FileNotFoundError(errno.ENOENT, "No such file"), link / "x") == said
    assert told(OSError(errno.EIO, "I/O error", str(tmp_path))) == f"{tmp_path}: I/O error"
    long = str(tmp_path / ("x" * 300) / "y")
    assert told(OSError(errno.ENAMETOOLONG, "File name too long", long)) == f"{long}: File name too long"
    for key in ("init_from", "resume"):
        with pytest.raises(ConfigError, match=said):
            load_job(None, [f"--checkpoint.{key}", str(link)])
    with pytest.raises(ConfigError, match=said):
        load_job(link)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_is_said_where_nothing_can_be_looked_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stat", "lstat", "readlink"):
        monkeypatch.setattr(os, name, raising(OSError(number, os.strerror(number))))
    assert told(OSError(number, "as said", "/a/b")) == "/a/b: as said"


@pytest.mark.parametrize("name", ["", "checkpoints", "logs"])
def test_a_run_whose_folder_is_such_a_link_does_not_begin(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "runs" / "debug" / name
    link.parent.mkdir(parents=True)
    link.symlink_to("gone")
    assert cli.main(["train", "--config", "debug", "--run.dir", str(tmp_path / "runs")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: [run] dir cannot be written: {link} is a link to gone, which is not there"


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, 2), (errno.EIO, 1)])
def test_which_errors_of_the_system_a_command_takes_for_wrong_input(number: int, code: int) -> None:
    text = (
        "import sys\nfrom titan import cli\nfrom titan.testing.commands import plugins\n"
        f"def run(_):\n    raise OSError({number}, 'as said', '/a/file')\n"
        "plugins.run = run\nsys.exit(cli.main(['plugins']))\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (code, b"error: /a/file: as said\n")
