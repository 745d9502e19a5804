"""A run's folder: one run in it at a time, and a start that is refused leaves it as it was."""

import errno
import json
import os
from pathlib import Path

import pytest
from torch import Tensor

from tests.checkpoints import names_in
from tests.jobs import LLAMA, SAVING, mesh
from titan import train
from titan.errors import TitanError
from titan.ranks.folder_lock import FolderLock
from titan.testing.jobs import run_job, train_job, write_text
from titan.testing.ranks import RankError, run_ranks
from titan.training import build


def _content(folder: Path) -> dict[str, bytes]:
    """But for the lock, which counts."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith((".log", "lock.json"))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _words(folder: Path, *words: str) -> list[str]:
    if not (folder / "text").exists():
        write_text(folder / "text")
    paths = ["--run.dir", str(folder), "--data.cache", str(folder / "cache"), "--data.path", str(folder / "text")]
    return ["--config", str(LLAMA), "--run.name", "run", *paths, *SAVING, *words]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_start_leaves_the_first_alone(ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, first = tmp_path / "run", FolderLock(tmp_path / "run")
    first.take()
    for name in ("checkpoints/step-00000005.tmp/rank-00000.safetensors", "metrics.jsonl", "config.toml"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text('{"step": 5, "loss": 1.0}\n')
    before = _content(run)
    words = _words(tmp_path, *mesh(dp_shard=ranks))
    assert run_ranks(train.main, ranks, words, init=False) == [2] * ranks
    assert _content(run) == before and not (run / "logs").exists()
    said = capfd.readouterr().out
    assert said.count("Traceback") == 0 and said.count("is in use by another run: host ") == 1
    first.release()
    assert run_ranks(train.main, ranks, [*words, "--train.steps", "1"], init=False) == [0] * ranks
    assert not (run / "lock.json").exists() and not list(run.rglob("*.tmp"))


def for_a_group(words: list[str]) -> int:
    os.umask(0o002)
    return train.main(words)


def test_a_run_that_is_done_or_for_a_group(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every file is as the umask says, so that a colleague may go on; at the last step, or past it, nothing is done."""
    words = _words(tmp_path, "--train.steps", "2", "--metrics.tensorboard.enabled", "true")
    assert run_ranks(for_a_group, 1, words, init=False) == [0]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*")} == {0o664, 0o775}
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capfd.readouterr()
    for steps in ("2", "1"):
        assert run_ranks(train.main, 1, [*words, "--train.steps", steps], init=False) == [0]
        said = capfd.readouterr().out
        what = f"nothing is left to do: the run is at step 2, and train.steps = {steps}; to train on, set train.steps"
        assert what in said and "changed: train.steps" not in said and "--train.steps 4" in said
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows


def taken_over(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    """After step 5 another run holds the folder, and this one's heart has beaten since."""
    from titan.training import trainer

    step = trainer.step

    def late(run: trainer.Run, batches: list[object]) -> object:
        stats = step(run, batches)
        if run.step == 6 and run.rank.number == 0:
            holder = json.loads(run.lock.path.read_text())
            run.lock.path.unlink()
            run.lock.path.write_text(json.dumps({**holder, "token": "another", "pid": 1}))
            with pytest.raises(Exception, match="is held by another run now"):
                run.lock.check()
        return stats

    trainer.step = late
    return run_job(folder, words, config)


def test_a_run_that_has_lost_its_folder_ends_and_writes_nothing_more(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"FolderError: .* is held by another run now, .* pid 1, "):
        train_job(tmp_path, 2, "--mesh.dp_shard", "2", *SAVING, "--checkpoint.async", "false", run=taken_over)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert names_in(tmp_path / "run" / "checkpoints") == ["step-00000004"]
    assert json.loads((tmp_path / "run" / "lock.json").read_text())["token"] == "another"


@pytest.mark.parametrize("wrong", [("--model.dim", "64"), ("--data.seq_len", "8"), ("--checkpoint.resume", "x")])
def test_a_start_that_is_refused_leaves_the_config_of_the_run(wrong: tuple[str, str], tmp_path: Path) -> None:
    if wrong[1] == "x":  # a run of its own whose checkpoint is damaged
        (tmp_path / "x" / "step-00000001").mkdir(parents=True)
        wrong = (wrong[0], str(tmp_path / "x"))
    assert run_ranks(train.main, 1, _words(tmp_path, "--train.steps", "4"), init=False) == [0]
    before = _content(tmp_path / "run")
    assert before["config.toml"]
    assert run_ranks(train.main, 1, _words(tmp_path, *wrong), init=False) in ([1], [2])
    assert _content(tmp_path / "run") == before


def killed_before_the_first_step(folder: str, words: list[str], config: str) -> dict[str, Tensor]:
    from titan.training import trainer

    def look(*_: object) -> None:
        assert "steps = 6" in (Path(folder) / "run" / "config.toml").read_text()
        raise KeyError("looked")

    trainer.step = look
    return run_job(folder, words, config)


def test_the_config_is_there_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="looked"):
        train_job(tmp_path, 1, run=killed_before_the_first_step)


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOTDIR, 2), (errno.EACCES, 2), (errno.ENOSPC, 1), (errno.ESTALE, 1)]
)
def test_a_folder_that_cannot_be_written_is_wrong_input_only_where_it_stays_so(number: int, code: int) -> None:
    told = r"^\[run\] dir cannot be written: runs/x: "
    with pytest.raises(TitanError, match=told) as said, build._writing(Path("runs/x")):
        raise OSError(number, os.strerror(number))
    assert said.value.exit_code == code
