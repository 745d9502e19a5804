"""The harness of tests that run commands: `tests.commands`."""

import subprocess
from pathlib import Path

import pytest

from tests.commands import run_titan
from tests.jobs import LLAMA


def test_a_command_stands_in_its_folder_and_its_streams_are_apart(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'base = "{LLAMA}"\n[run]\nname = "mine"\n')
    done = run_titan(["config", "mine.toml", "--json", "--data.path", "x"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and '"name": "mine"' in done.stdout
    refused = run_titan(["config", "none.toml"], tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "") and "none.toml" in refused.stderr


def test_variables_reach_a_command_and_nothing_of_it_comes_back(tmp_path: Path) -> None:
    words = ["train", "--config", str(LLAMA), "--data.path", "nowhere"]
    assert "NPROC = 'none'" in run_titan(words, tmp_path, {"NPROC": "none"}).stderr
    assert "nowhere" in run_titan(words, tmp_path).stderr


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_titan(["plan", "--list-clusters"], tmp_path, timeout=0.0)
