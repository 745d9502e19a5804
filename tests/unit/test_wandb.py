"""The wandb tracker, offline: what stands in the files that `wandb sync` would send, and what a failure does."""

import json
import logging
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.jobs import LLAMA
from titan.config import load_job
from titan.contracts import RunInfo
from titan.errors import ConfigError
from titan.plugins.trackers.wandb import Config, Wandb

ROW: dict[str, Any] = {"step": 10, "loss": 2.5, "tokens_per_s": 1234.5, "mfu": None, "save_time_s": 0.25, "time": 1.7e9}
CONFIG = {"train": {"steps": 600}, "data": {"paths": ["a", "b"]}}


def test_it_is_off_unless_its_table_stands(tmp_path: Path) -> None:
    plain = ["--data.path", "tests"]
    assert "wandb" not in [tracker.name for tracker in load_job(LLAMA, plain).trackers]
    job = tmp_path / "job.toml"
    job.write_text(f'base = "{LLAMA}"\n[metrics.wandb]\nmode = "offline"\n')
    chosen = load_job(job, plain)
    assert "wandb" in [tracker.name for tracker in chosen.trackers]
    json.dumps(chosen.table)
    assert "wandb" not in [t.name for t in load_job(job, [*plain, "--metrics.wandb.enabled", "false"]).trackers]


def test_without_the_package_a_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    told = r"^\[metrics.wandb\] needs the wandb package: .* -m pip install -e .*\[wandb\]'$"
    with pytest.raises(ConfigError, match=told):
        Wandb(Config()).start(info(tmp_path))


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb, without what the user's environment and home say."""
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def info(folder: Path, start_step: int = 0) -> RunInfo:
    return RunInfo(folder / "run", "tiny", CONFIG, start_step=start_step, steps=600, params=1000, every=10)


def run(folder: Path, rows: list[dict[str, Any]], start_step: int = 0, **options: Any) -> None:
    tracker = Wandb(Config(mode="offline", **options))
    tracker.start(info(folder, start_step))
    for row in rows:
        tracker.log(row)
    tracker.close()


def records(file: Path) -> Iterator[Any]:
    """What wandb wrote, record by record: a LevelDB log behind a header of its own."""
    from wandb.proto import wandb_internal_pb2 as proto

    data, at, whole = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of a record, or the last piece of one
            record = proto.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def written(folder: Path) -> list[list[Any]]:
    """The records of each time that the run was begun, in order."""
    import wandb

    wandb.teardown()  # its process closes files a little after a run's end
    files = (folder / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    return [list(records(file)) for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)]


def values(items: Any) -> dict[str, Any]:
    return {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in items}


def history(found: list[Any]) -> list[dict[str, Any]]:
    rows = (values(r.history.item) for r in found if r.HasField("history"))
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def summary(found: list[Any]) -> dict[str, Any]:
    """The last value of each key: those that were said to be the summary, over those of the rows."""
    last = {key: value for row in history(found) for key, value in row.items()}
    return last | values(item for r in found if r.HasField("summary") for item in r.summary.update)


@pytest.mark.usefixtures("alone")
def test_rows_config_and_summary_are_in_the_file(tmp_path: Path) -> None:
    rows = [ROW, {"step": 10, "validation_loss": 2.4}, {**ROW, "step": 20, "loss": 2.0}]
    run(tmp_path, rows, project="llama", entity="us", group="g", tags=("a", "b"))
    (found,) = written(tmp_path)
    (begun,) = (r.run for r in found if r.HasField("run"))
    assert (begun.project, begun.entity, begun.run_group, begun.display_name) == ("llama", "us", "g", "tiny")
    assert list(begun.tags) == ["a", "b"]
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert history(found) == [{k: v for k, v in row.items() if v is not None} for row in rows]
    total = summary(found)
    assert [total[key] for key in ("params", "loss", "validation_loss", "step")] == [1000, 2.0, 2.4, 20]
    (ended,) = (r.exit for r in found if r.HasField("exit"))
    assert ended.exit_code == 0
    assert not [r for r in found if r.HasField("stats")], "system metrics"


@pytest.mark.usefixtures("alone")
def test_a_run_that_goes_on_is_the_same_run(tmp_path: Path) -> None:
    run(tmp_path, [ROW])
    run(tmp_path, [{**ROW, "step": 20}], start_step=10)
    run(tmp_path, [ROW])
    own = tmp_path / "run" / "wandb" / "id-tiny"
    own.rename(own.with_name("id-original"))  # as in a copy of the folder of another run
    run(tmp_path, [{**ROW, "step": 20}], start_step=10)
    first, second, anew, copy = (next(r.run for r in found if r.HasField("run")) for found in written(tmp_path))
    assert first.run_id == second.run_id != anew.run_id != copy.run_id
    assert own.read_text() == copy.run_id


@pytest.mark.usefixtures("alone")
def test_a_run_that_raises_has_failed(tmp_path: Path) -> None:
    tracker = Wandb(Config(mode="offline"))
    tracker.start(info(tmp_path))
    with pytest.raises(KeyError):
        try:
            raise KeyError
        finally:
            tracker.close()
    (found,) = written(tmp_path)
    assert [r.exit.exit_code for r in found if r.HasField("exit")] == [1]


def test_training_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose package is not asked for: another stands in its place."""
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("titan"), "warning", said.append)
    gone = Mock(**{f"{act}.side_effect": ConnectionResetError("gone") for act in ("log", "finish")}, summary={}, dir="")
    monkeypatch.setitem(sys.modules, "wandb", Mock(Error=OSError, **{"init.return_value": gone}))
    tracker = Wandb(Config())
    tracker.start(info(tmp_path))
    tracker.log(ROW)
    tracker.log(ROW)
    tracker.start(info(tmp_path))
    tracker.close()
    tracker.close()
    assert said == [
        "wandb: ConnectionResetError: gone; wandb gets no more rows",
        "wandb: ConnectionResetError: gone; wandb may show the run as unfinished",
    ]
